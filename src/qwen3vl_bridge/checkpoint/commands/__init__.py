"""The commands: import, export, reformat, verify, inspect."""

"""The command line: `main.py` and a module for each command. The command `train` is in the recipes."""

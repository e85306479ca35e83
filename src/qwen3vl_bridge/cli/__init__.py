"""The command line: `main.py`, and a module for each command except `train`, which is in the recipes."""

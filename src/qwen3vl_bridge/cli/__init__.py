"""The command line: `main.py`, and a module for each command but `train`, which is the recipes'."""

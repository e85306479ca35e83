"""Checkpoint formats: a module for each format, the layouts of weights in them, and reading and writing tensors."""

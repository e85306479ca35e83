"""Checkpoint formats: descriptions of tensors, slices, layouts; a folder for each format."""

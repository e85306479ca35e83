"""Checkpoint formats: descriptions of tensors, slices, layouts; a module for each format."""

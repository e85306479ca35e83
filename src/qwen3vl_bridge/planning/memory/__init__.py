"""Bytes that a rank holds: parameters, optimizer state, activations."""

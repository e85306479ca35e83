"""Checkpoints of a run: weight loading, both formats, optimizer state, all-or-none saves."""

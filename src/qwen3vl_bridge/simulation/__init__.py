"""Simulate a training run on a machine without a GPU: what it allocates, launches and sends."""

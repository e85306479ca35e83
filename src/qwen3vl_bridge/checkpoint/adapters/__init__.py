"""Trained adapters: their settings, export for the `peft` library, merging into weights."""

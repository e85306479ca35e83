"""Modules that all model families share: provider, bridge, vision tower, layers, loss and pipeline schedule."""

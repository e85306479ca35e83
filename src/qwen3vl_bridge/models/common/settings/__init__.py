"""Checks of a provider's settings: kernels, parallel sizes, experts, recompute, vision on ranks of its own."""

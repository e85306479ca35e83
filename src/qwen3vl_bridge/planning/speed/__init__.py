"""Seconds that a step takes: operations, pipeline stages, exchange of gradients."""

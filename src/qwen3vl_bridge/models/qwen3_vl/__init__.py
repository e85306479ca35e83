"""Qwen3-VL: weight table, configuration, provider, presets, bridge, model."""

"""Qwen3.5-VL: a text model with Gated DeltaNet and gated attention, and a vision tower without DeepStack."""

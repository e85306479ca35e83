"""Qwen3.5-VL: gated delta net and gated attention in the text model, a vision tower without DeepStack."""

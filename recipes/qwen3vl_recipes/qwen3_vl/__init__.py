"""Recipes of Qwen3-VL, a file for each size."""

"""Answers of the Megatron model."""

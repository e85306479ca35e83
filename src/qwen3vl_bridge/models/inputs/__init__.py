"""Batches in the formats of callers (transformers, Megatron-Bridge, RL frameworks), converted to `ModelInputs`."""

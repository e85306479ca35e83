"""Generation with the Megatron model."""

"""The weight table, which maps Hugging Face tensors to Megatron parameters, and FP8 weights."""

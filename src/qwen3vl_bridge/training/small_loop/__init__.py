"""The small training loop for machines without CUDA, until Megatron-Bridge's own takes its place."""

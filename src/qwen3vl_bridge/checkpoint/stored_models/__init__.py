"""Models on disk: folder, configuration and weights together, Hugging Face's and Megatron's."""

"""The folder of a Megatron checkpoint and its files other than tensors."""

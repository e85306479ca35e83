"""The folder of a Megatron checkpoint and the files beside its tensors."""

"""A run in Megatron-Bridge's loop: the forward step, configuration, callbacks and checkpoints."""

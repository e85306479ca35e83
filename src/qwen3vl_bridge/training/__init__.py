"""Train in Megatron-Bridge's loop: configuration, forward step, callbacks and checkpoints."""

"""Running where Megatron was not meant to: the import hook, the CPU module, replaced functions, quiet logs."""

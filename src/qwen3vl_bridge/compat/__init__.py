"""Running where Megatron does not run by itself: the import hook, the CPU module, replaced functions, quiet logs."""

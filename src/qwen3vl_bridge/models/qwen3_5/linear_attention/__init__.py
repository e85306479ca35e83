"""Linear attention of Qwen3.5: megatron-core's layer made fit for packed rows, its rule in torch, and which is used."""

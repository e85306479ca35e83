"""Convert Qwen3-VL between Hugging Face safetensors and Megatron checkpoints. No GPU, no model in memory.

This is `qwen3vl convert`, from a clone.

    python conversion/convert.py import --hf-model Qwen/Qwen3-VL-2B-Instruct --megatron-path checkpoints/qwen3vl-2b
    python conversion/convert.py export --megatron-path checkpoints/qwen3vl-2b --hf-path exported
"""

import sys

from qwen3vl_bridge.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())

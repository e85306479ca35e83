"""Convert a model between Hugging Face safetensors and Megatron checkpoints. Needs no GPU, nor memory for the model.

This script is `qwen3vl convert`, run from a clone of the repository.

    python conversion/convert.py import --hf-model Qwen/Qwen3-VL-2B-Instruct --megatron-path checkpoints/qwen3vl-2b
    python conversion/convert.py export --megatron-path checkpoints/qwen3vl-2b --hf-path exported
"""

import sys

from qwen3vl_bridge.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())

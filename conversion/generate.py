"""Ask a checkpoint a question through the Megatron model, without exporting it.

This script is `qwen3vl generate`, run from a clone of the repository.

    python conversion/generate.py --hf-model HF_FOLDER --megatron-path MEGATRON --image cat.png "What is this?"
"""

import sys

from qwen3vl_bridge.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())

"""Ask a checkpoint a question through the Megatron model, without exporting it: `qwen3vl generate`, from a clone.

python conversion/generate.py --hf-model HF_FOLDER --megatron-path MEGATRON --image cat.png "What is this?"
"""

import sys

from qwen3vl_bridge.cli.generate import main

if __name__ == "__main__":
    sys.exit(main())

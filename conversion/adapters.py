"""Export trained adapters as a folder for `peft` and vLLM, or merge them into a complete model.

    python conversion/adapters.py export --megatron-path RUN --hf-path ADAPTER
    python conversion/adapters.py merge --megatron-path RUN --hf-path MERGED

This is `qwen3vl adapters`, from a clone.
"""

import sys

from qwen3vl_bridge.cli.convert import adapters

if __name__ == "__main__":
    sys.exit(adapters())

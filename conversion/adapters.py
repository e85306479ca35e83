"""Export trained adapters as a folder for `peft` and vLLM, or merge them into a complete model.

    python conversion/adapters.py export --megatron-path RUN --hf-path ADAPTER
    python conversion/adapters.py merge --megatron-path RUN --hf-path MERGED

This script is `qwen3vl adapters`, run from a clone of the repository.
"""

import sys

from qwen3vl_bridge.cli.convert import adapters

if __name__ == "__main__":
    sys.exit(adapters())

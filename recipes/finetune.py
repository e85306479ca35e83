r"""Fine-tune a model with a recipe. This script is `qwen3vl train`, run from a clone of the repository.

For example, on one node:

    torchrun --nproc_per_node 8 --shutdown-timeout 600 recipes/finetune.py --recipe qwen3_vl_8b_sft_config \
        --data-path DATA --save RUN train.global_batch_size=64
"""

import sys

from qwen3vl_recipes.cli import train

if __name__ == "__main__":
    sys.exit(train())

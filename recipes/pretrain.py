r"""Pretrain a model with a recipe. This script is `qwen3vl train --from-scratch`, run from a clone of the repository.

For example, on each of eight nodes (docs/recipes.md has a script for Slurm):

    torchrun --nnodes 8 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 --rdzv-id RUN_ID \
        --shutdown-timeout 600 recipes/pretrain.py --recipe qwen3_vl_8b_pretrain_config --data-path DATA --save RUN
"""

import sys

from qwen3vl_recipes.cli import train

if __name__ == "__main__":
    sys.exit(train(["--from-scratch", *sys.argv[1:]]))

r"""Pretrain Qwen3-VL by a recipe: the command `qwen3vl-pretrain`, from a clone.

For example, on one of eight nodes:

    torchrun --nproc_per_node 8 --shutdown-timeout 600 recipes/pretrain.py --recipe qwen3_vl_8b_pretrain_config \
        --data-path DATA --save RUN
"""

from qwen3vl_recipes.cli import pretrain

if __name__ == "__main__":
    pretrain()

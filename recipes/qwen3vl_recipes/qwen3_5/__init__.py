"""Recipes of Qwen3.5-VL, a file for each size, by Megatron-Bridge's names. TP * CP is at most sixteen, the number of
key heads of linear attention.
"""

from functools import partial

from qwen3vl_recipes import base

sft, peft, pretrain = (partial(kind, family="qwen3_5") for kind in (base.sft, base.peft, base.pretrain))

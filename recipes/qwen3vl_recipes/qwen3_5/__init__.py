"""Recipes of Qwen3.5-VL, a file for each size, by Megatron-Bridge's names; linear attention's sixteen key heads bound
tensor and context parallelism together.

What lives here: the family that the kinds of recipes are of. What may not: settings (`base.py`).
"""

from functools import partial

from qwen3vl_recipes import base

sft, peft, pretrain = (partial(kind, family="qwen3_5") for kind in (base.sft, base.peft, base.pretrain))

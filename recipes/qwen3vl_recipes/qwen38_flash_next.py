"""Recipes of Qwen3.8-Flash-Next, as in `qwen3_vl.py`.

EP is large, because it divides experts and n-gram tables, whose optimizer states need most of the memory. EP is a
divisor or a multiple of 16, the number of hash heads. There is no recipe with Megatron-FSDP, which supports n-gram
tables only without EP.
"""

from functools import partial, wraps

from qwen3vl_recipes import base
from qwen3vl_recipes.base import sft, sft_32k

on = partial(base.on, family="qwen4_exp")


def with_model(kind, **fields):
    """Wrap `kind`, a function such as `sft`, so that its configuration has these fields of the model."""

    @wraps(kind)
    def build(size, **settings):
        cfg = kind(size, **settings)
        for name, value in fields.items():
            setattr(cfg.model, name, value)
        return cfg

    return build


# Pipeline stages exchange residual streams, and megatron-core does not know the size of these tensors in advance.
pretrain = with_model(base.pretrain, variable_seq_lengths=True)
pretrain_fp8_mx = with_model(base.pretrain_fp8_mx, variable_seq_lengths=True)
peft = with_model(base.peft, freeze_ngram_table=True)  # as LoRA does anyway; `ngram_table_dtype` needs it

qwen38_flash_next_sft_config = on(64, sft, "Flash-Next", tp=4, ep=64, recompute="all")
qwen38_flash_next_sft_32k_config = on(64, sft_32k, "Flash-Next", tp=4, cp=4, ep=64, recompute="all")
qwen38_flash_next_peft_config = on(8, peft, "Flash-Next", tp=2, ep=8, recompute="all")
qwen38_flash_next_pretrain_config = on(128, pretrain, "Flash-Next", tp=2, pp=2, ep=32, recompute="all")

on_b200 = partial(on, gpu="B200", reshardable=False)

qwen38_flash_next_sft_b200_config = on_b200(32, sft, "Flash-Next", tp=2, ep=16, recompute="all")
qwen38_flash_next_sft_32k_b200_config = on_b200(32, sft_32k, "Flash-Next", tp=4, ep=16, recompute="all")
qwen38_flash_next_peft_b200_config = on(8, peft, "Flash-Next", gpu="B200", ep=8)
qwen38_flash_next_pretrain_fp8_mx_config = on_b200(64, pretrain_fp8_mx, "Flash-Next", pp=2, ep=8, recompute="all")

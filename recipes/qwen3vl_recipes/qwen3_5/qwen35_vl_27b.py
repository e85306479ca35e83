"""Recipes of Qwen3.5-VL-27B."""

from qwen3vl_recipes.base import K, fsdp, recompute_all, recompute_layers, split
from qwen3vl_recipes.qwen3_5 import peft, pretrain, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=16)
def qwen35_vl_27b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: TP 4, PP 4, half of the layers recomputed."""
    return recompute_layers(split(sft("27B"), tp=4, pp=4), 8)


@recipe(gpus=32)
def qwen35_vl_27b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 32 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("27B")))


@recipe(gpus=32)
def qwen35_vl_27b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 32 H100: TP 4, PP 4, CP 2."""
    return recompute_all(split(sft("27B", seq_length=32 * K, global_batch_size=16), tp=4, pp=4, cp=2))


@recipe(gpus=64)
def qwen35_vl_27b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 64 H100: TP 4, PP 4, CP 4."""
    return recompute_all(split(sft("27B", seq_length=128 * K, global_batch_size=8), tp=4, pp=4, cp=4))


@recipe(gpus=8)
def qwen35_vl_27b_peft_config():
    """LoRA, rows of 8K tokens, 8 H100: TP 2, activations recomputed."""
    return recompute_all(split(peft("27B"), tp=2))


@recipe(gpus=128)
def qwen35_vl_27b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: TP 4, PP 4."""
    return split(pretrain("27B"), tp=4, pp=4)

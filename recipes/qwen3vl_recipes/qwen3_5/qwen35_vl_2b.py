"""Recipes of Qwen3.5-VL-2B."""

from qwen3vl_recipes.base import K, fsdp, recompute_all, split
from qwen3vl_recipes.qwen3_5 import peft, pretrain, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=8)
def qwen35_vl_2b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: a complete model on each GPU."""
    return sft("2B")


@recipe(gpus=8)
def qwen35_vl_2b_sft_fsdp_config():
    """As qwen35_vl_2b_sft_config, sharded by Megatron-FSDP."""
    return fsdp(qwen35_vl_2b_sft_config())


@recipe(gpus=8)
def qwen35_vl_2b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: CP 4."""
    return split(sft("2B", seq_length=32 * K, global_batch_size=16), cp=4)


@recipe(gpus=8)
def qwen35_vl_2b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: CP 8, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=128 * K, global_batch_size=8), cp=8))


@recipe(gpus=16)
def qwen35_vl_2b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 2, CP 8, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8))


@recipe(gpus=1)
def qwen35_vl_2b_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("2B")


@recipe(gpus=64)
def qwen35_vl_2b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: a complete model on each GPU."""
    return pretrain("2B")

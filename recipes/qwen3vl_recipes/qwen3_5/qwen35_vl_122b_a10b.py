"""Recipes of Qwen3.5-VL-122B-A10B."""

from qwen3vl_recipes.base import K, fsdp, recompute_all, split
from qwen3vl_recipes.qwen3_5 import peft, pretrain, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=48)
def qwen35_vl_122b_a10b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 48 H100: TP 2, PP 6, EP 8."""
    return recompute_all(split(sft("122B-A10B", global_batch_size=48), tp=2, pp=6, ep=8))


@recipe(gpus=64)
def qwen35_vl_122b_a10b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 64 H100: Megatron-FSDP, EP 16."""
    return recompute_all(fsdp(split(sft("122B-A10B", global_batch_size=64), ep=16)))


@recipe(gpus=96)
def qwen35_vl_122b_a10b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 96 H100: TP 2, PP 6, CP 4, EP 8."""
    return recompute_all(split(sft("122B-A10B", seq_length=32 * K, global_batch_size=48), tp=2, pp=6, cp=4, ep=8))


@recipe(gpus=192)
def qwen35_vl_122b_a10b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 192 H100: TP 2, PP 6, CP 8, EP 8."""
    return recompute_all(split(sft("122B-A10B", seq_length=128 * K, global_batch_size=32), tp=2, pp=6, cp=8, ep=8))


@recipe(gpus=8)
def qwen35_vl_122b_a10b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 8 H100: TP 2, EP 8."""
    return recompute_all(split(peft("122B-A10B"), tp=2, ep=8))


@recipe(gpus=192)
def qwen35_vl_122b_a10b_pretrain_config():
    """Pretraining, rows of 8K tokens, 192 H100: TP 2, PP 6, EP 8."""
    return recompute_all(split(pretrain("122B-A10B", global_batch_size=1024), tp=2, pp=6, ep=8))

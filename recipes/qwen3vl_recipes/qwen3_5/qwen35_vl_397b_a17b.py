"""Recipes of Qwen3.5-VL-397B-A17B."""

from qwen3vl_recipes.base import K, fsdp, recompute_all, split
from qwen3vl_recipes.qwen3_5 import peft, pretrain, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 256 H100: TP 2, PP 4, EP 32."""
    return recompute_all(split(sft("397B-A17B", global_batch_size=128), tp=2, pp=4, ep=32))


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 256 H100: Megatron-FSDP, EP 32."""
    return recompute_all(fsdp(split(sft("397B-A17B", global_batch_size=256), ep=32)))


@recipe(gpus=256)
def qwen35_vl_397b_a17b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 256 H100: TP 2, PP 4, CP 4, EP 32."""
    return recompute_all(split(sft("397B-A17B", seq_length=32 * K, global_batch_size=64), tp=2, pp=4, cp=4, ep=32))


@recipe(gpus=512)
def qwen35_vl_397b_a17b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 512 H100: TP 2, PP 4, CP 8, EP 64."""
    return recompute_all(split(sft("397B-A17B", seq_length=128 * K, global_batch_size=32), tp=2, pp=4, cp=8, ep=64))


@recipe(gpus=32)
def qwen35_vl_397b_a17b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 32 H100: TP 2, EP 32."""
    return recompute_all(split(peft("397B-A17B"), tp=2, ep=32))


@recipe(gpus=512)
def qwen35_vl_397b_a17b_pretrain_config():
    """Pretraining, rows of 8K tokens, 512 H100: TP 2, PP 4, EP 32."""
    return recompute_all(split(pretrain("397B-A17B", global_batch_size=1024), tp=2, pp=4, ep=32))

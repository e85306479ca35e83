"""Recipes of Qwen3-VL-4B."""

from qwen3vl_recipes.base import K, fsdp, peft, pretrain, recompute_all, sft, split
from qwen3vl_recipes.registry import recipe


@recipe(gpus=8)
def qwen3_vl_4b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: TP 2."""
    return split(sft("4B"), tp=2)


@recipe(gpus=8)
def qwen3_vl_4b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: Megatron-FSDP."""
    return fsdp(sft("4B"))


@recipe(gpus=8)
def qwen3_vl_4b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: TP 2, CP 4."""
    return split(sft("4B", seq_length=32 * K, global_batch_size=16), tp=2, cp=4)


@recipe(gpus=8)
def qwen3_vl_4b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: TP 2, CP 4, activations recomputed."""
    return recompute_all(split(sft("4B", seq_length=128 * K, global_batch_size=8), tp=2, cp=4))


@recipe(gpus=16)
def qwen3_vl_4b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 2, CP 8, activations recomputed."""
    return recompute_all(split(sft("4B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8))


@recipe(gpus=1)
def qwen3_vl_4b_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("4B")


@recipe(gpus=1)
def qwen3_vl_4b_peft_dora_config():
    """DoRA, rows of 8K tokens, one H100."""
    return peft("4B", dora=True)


@recipe(gpus=64)
def qwen3_vl_4b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: TP 2."""
    return split(pretrain("4B"), tp=2)

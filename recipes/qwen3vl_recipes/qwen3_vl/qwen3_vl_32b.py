"""Recipes of Qwen3-VL-32B."""

from qwen3vl_recipes.base import K, fsdp, peft, pretrain, recompute_all, sft, split
from qwen3vl_recipes.registry import recipe


@recipe(gpus=16)
def qwen3_vl_32b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: TP 8, activations recomputed."""
    return recompute_all(split(sft("32B"), tp=8))


@recipe(gpus=16)
def qwen3_vl_32b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("32B")))


@recipe(gpus=32)
def qwen3_vl_32b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 32 H100: TP 8, CP 2, activations recomputed."""
    return recompute_all(split(sft("32B", seq_length=32 * K, global_batch_size=16), tp=8, cp=2))


@recipe(gpus=32)
def qwen3_vl_32b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 32 H100: TP 8, CP 4, activations recomputed."""
    return recompute_all(split(sft("32B", seq_length=128 * K, global_batch_size=8), tp=8, cp=4))


@recipe(gpus=64)
def qwen3_vl_32b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 64 H100: TP 8, CP 8, activations recomputed."""
    return recompute_all(split(sft("32B", seq_length=256 * K, global_batch_size=4), tp=8, cp=8))


@recipe(gpus=8)
def qwen3_vl_32b_peft_config():
    """LoRA, rows of 8K tokens, 8 H100: TP 4."""
    return split(peft("32B"), tp=4)


@recipe(gpus=1, gpu="H200")
def qwen3_vl_32b_peft_dora_config():
    """DoRA, rows of 8K tokens, one H200, activations recomputed; DoRA needs a complete model on each GPU."""
    return recompute_all(peft("32B", dora=True))


@recipe(gpus=128)
def qwen3_vl_32b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: TP 8."""
    return split(pretrain("32B"), tp=8)

"""Recipes of Qwen3.5-VL-35B-A3B."""

from qwen3vl_recipes.base import K, fsdp, recompute_all, split
from qwen3vl_recipes.qwen3_5 import peft, pretrain, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: TP 2, EP 16."""
    return recompute_all(split(sft("35B-A3B"), tp=2, ep=16))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: Megatron-FSDP, EP 8."""
    return recompute_all(fsdp(split(sft("35B-A3B"), ep=8)))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 16 H100: TP 2, CP 4, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=32 * K, global_batch_size=16), tp=2, cp=4, ep=16))


@recipe(gpus=16)
def qwen35_vl_35b_a3b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 16 H100: TP 2, CP 8, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=128 * K, global_batch_size=8), tp=2, cp=8, ep=16))


@recipe(gpus=32)
def qwen35_vl_35b_a3b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 32 H100: TP 2, CP 8, EP 16, activations recomputed."""
    return recompute_all(split(sft("35B-A3B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8, ep=16))


@recipe(gpus=8)
def qwen35_vl_35b_a3b_peft_config():
    """LoRA on all but routed experts, rows of 8K tokens, 8 H100: TP 2, EP 4."""
    return recompute_all(split(peft("35B-A3B"), tp=2, ep=4))


@recipe(gpus=128)
def qwen35_vl_35b_a3b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: TP 2, EP 16."""
    return recompute_all(split(pretrain("35B-A3B"), tp=2, ep=16))

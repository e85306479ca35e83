"""Recipes of Qwen3-VL-30B-A3B."""

from qwen3vl_recipes.base import K, dist_train, fsdp, keep_tower, peft, pretrain, recompute_all, sft, split
from qwen3vl_recipes.registry import recipe


@recipe(gpus=16)
def qwen3_vl_30b_a3b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 16 H100: EP 8."""
    return recompute_all(split(sft("30B-A3B"), ep=8))


@recipe(gpus=16)
def qwen3_vl_30b_a3b_sft_fsdp_config():
    """As qwen3_vl_30b_a3b_sft_config, sharded by Megatron-FSDP."""
    return fsdp(qwen3_vl_30b_a3b_sft_config())


@recipe(gpus=16)
def qwen3_vl_30b_a3b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 16 H100: CP 4, EP 8, activations recomputed."""
    return recompute_all(split(sft("30B-A3B", seq_length=32 * K, global_batch_size=16), cp=4, ep=8))


@recipe(gpus=32)
def qwen3_vl_30b_a3b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 32 H100: CP 8, EP 8, activations recomputed."""
    return recompute_all(split(sft("30B-A3B", seq_length=128 * K, global_batch_size=8), cp=8, ep=8))


@recipe(gpus=32)
def qwen3_vl_30b_a3b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 32 H100: CP 16, EP 8, activations recomputed."""
    return recompute_all(split(sft("30B-A3B", seq_length=256 * K, global_batch_size=4), cp=16, ep=8))


@recipe(gpus=32)
def qwen3_vl_30b_a3b_sft_dist_train_config():
    """Full fine-tuning, rows of 8K tokens, 32 H100: 8 vision ranks; language model: TP 2, PP 3, EP 8."""
    cfg = split(sft("30B-A3B", global_batch_size=96), tp=2, pp=3, ep=8)
    return dist_train(keep_tower(cfg), vision=8, language=24)


@recipe(gpus=8)
def qwen3_vl_30b_a3b_peft_config():
    """LoRA on attention, rows of 8K tokens, 8 H100: EP 8, activations recomputed."""
    return recompute_all(split(peft("30B-A3B"), ep=8))


@recipe(gpus=8)
def qwen3_vl_30b_a3b_peft_dora_config():
    """DoRA on attention, rows of 8K tokens, 8 H100: EP 8."""
    return split(peft("30B-A3B", dora=True), ep=8)


@recipe(gpus=128)
def qwen3_vl_30b_a3b_pretrain_config():
    """Pretraining, rows of 8K tokens, 128 H100: EP 8."""
    return recompute_all(split(pretrain("30B-A3B"), ep=8))

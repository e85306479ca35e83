"""Recipes of Qwen3-VL-235B-A22B."""

from qwen3vl_recipes.base import (
    K,
    dist_train,
    fsdp,
    peft,
    pretrain,
    recompute_all,
    recompute_modules,
    sft,
    split,
)
from qwen3vl_recipes.registry import recipe


def _pipeline(cfg, **sizes):
    """94 layers, and the embedding and the output layer in place of one each."""
    cfg.model.account_for_embedding_in_pipeline_split = cfg.model.account_for_loss_in_pipeline_split = True
    return split(cfg, **sizes)


@recipe(gpus=128)
def qwen3_vl_235b_a22b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 128 H100: TP 4, PP 4, EP 32."""
    return recompute_all(_pipeline(sft("235B-A22B", global_batch_size=128), tp=4, pp=4, ep=32))


@recipe(gpus=128)
def qwen3_vl_235b_a22b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 128 H100: Megatron-FSDP, EP 32."""
    return recompute_all(fsdp(split(sft("235B-A22B", global_batch_size=128), ep=32)))


@recipe(gpus=128)
def qwen3_vl_235b_a22b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 128 H100: TP 4, PP 4, CP 2, EP 32."""
    cfg = sft("235B-A22B", seq_length=32 * K, global_batch_size=64)
    return recompute_all(_pipeline(cfg, tp=4, pp=4, cp=2, ep=32))


@recipe(gpus=256)
def qwen3_vl_235b_a22b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 256 H100: TP 4, PP 4, CP 8, EP 32."""
    cfg = sft("235B-A22B", seq_length=128 * K, global_batch_size=32)
    return recompute_all(_pipeline(cfg, tp=4, pp=4, cp=8, ep=32))


@recipe(gpus=512)
def qwen3_vl_235b_a22b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 512 H100: TP 4, PP 4, CP 16, EP 32."""
    cfg = sft("235B-A22B", seq_length=256 * K, global_batch_size=32)
    return recompute_all(_pipeline(cfg, tp=4, pp=4, cp=16, ep=32))


@recipe(gpus=144)
def qwen3_vl_235b_a22b_sft_dist_train_config():
    """Full fine-tuning, rows of 8K tokens, 144 H100: 16 vision ranks with TP 2; language model: TP 4, PP 16, EP 8."""
    cfg = _pipeline(sft("235B-A22B", global_batch_size=128), tp=4, pp=16, ep=8)
    return dist_train(recompute_modules(cfg, "moe_act", "layernorm"), vision=16, language=128, vision_tp=2)


@recipe(gpus=16)
def qwen3_vl_235b_a22b_peft_config():
    """LoRA on attention, rows of 8K tokens, 16 H100: EP 16."""
    return recompute_all(split(peft("235B-A22B"), ep=16))


@recipe(gpus=16)
def qwen3_vl_235b_a22b_peft_dora_config():
    """DoRA on attention, rows of 8K tokens, 16 H100: EP 16."""
    return recompute_all(split(peft("235B-A22B", dora=True), ep=16))


@recipe(gpus=512)
def qwen3_vl_235b_a22b_pretrain_config():
    """Pretraining, rows of 8K tokens, 512 H100: TP 4, PP 4, EP 32."""
    return recompute_all(_pipeline(pretrain("235B-A22B", global_batch_size=1024), tp=4, pp=4, ep=32))

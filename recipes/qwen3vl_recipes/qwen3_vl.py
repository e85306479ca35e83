"""Recipes of Qwen3-VL, small models first."""

from qwen3vl_recipes.base import (
    K,
    dist_train,
    fsdp,
    keep_tower,
    peft,
    pretrain,
    recompute_all,
    recompute_layers,
    recompute_modules,
    sft,
    split,
)
from qwen3vl_recipes.registry import recipe


@recipe(gpus=8)
def qwen3_vl_2b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: a complete model on each GPU."""
    return sft("2B")


@recipe(gpus=8)
def qwen3_vl_2b_sft_fsdp_config():
    """As qwen3_vl_2b_sft_config, sharded by Megatron-FSDP."""
    return fsdp(qwen3_vl_2b_sft_config())


@recipe(gpus=8)
def qwen3_vl_2b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: CP 4."""
    return split(sft("2B", seq_length=32 * K, global_batch_size=16), cp=4)


@recipe(gpus=8)
def qwen3_vl_2b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 8 H100: CP 4, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=128 * K, global_batch_size=8), cp=4))


@recipe(gpus=8)
def qwen3_vl_2b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 8 H100: CP 8, activations recomputed."""
    return recompute_all(split(sft("2B", seq_length=256 * K, global_batch_size=4), cp=8))


@recipe(gpus=1)
def qwen3_vl_2b_peft_config():
    """LoRA, rows of 8K tokens, one H100."""
    return peft("2B")


@recipe(gpus=1)
def qwen3_vl_2b_peft_dora_config():
    """DoRA, rows of 8K tokens, one H100."""
    return peft("2B", dora=True)


@recipe(gpus=64)
def qwen3_vl_2b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: a complete model on each GPU."""
    return pretrain("2B")


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


@recipe(gpus=8)
def qwen3_vl_8b_sft_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: TP 2, ten layers recomputed."""
    return recompute_layers(split(sft("8B"), tp=2), 10)


@recipe(gpus=8)
def qwen3_vl_8b_sft_fsdp_config():
    """Full fine-tuning, rows of 8K tokens, 8 H100: Megatron-FSDP, activations recomputed."""
    return recompute_all(fsdp(sft("8B")))


@recipe(gpus=8)
def qwen3_vl_8b_sft_32k_config():
    """Full fine-tuning, rows of 32K tokens, 8 H100: TP 2, CP 4, ten layers recomputed."""
    return recompute_layers(split(sft("8B", seq_length=32 * K, global_batch_size=16), tp=2, cp=4), 10)


@recipe(gpus=16)
def qwen3_vl_8b_sft_128k_config():
    """Full fine-tuning, rows of 128K tokens, 16 H100: TP 2, CP 4, activations recomputed."""
    return recompute_all(split(sft("8B", seq_length=128 * K, global_batch_size=8), tp=2, cp=4))


@recipe(gpus=16)
def qwen3_vl_8b_sft_256k_config():
    """Full fine-tuning, rows of 256K tokens, 16 H100: TP 2, CP 8, activations recomputed."""
    return recompute_all(split(sft("8B", seq_length=256 * K, global_batch_size=4), tp=2, cp=8))


@recipe(gpus=1)
def qwen3_vl_8b_peft_config():
    """LoRA, rows of 8K tokens, one H100, activations recomputed."""
    return recompute_all(peft("8B"))


@recipe(gpus=1)
def qwen3_vl_8b_peft_dora_config():
    """DoRA, rows of 8K tokens, one H100."""
    return peft("8B", dora=True)


@recipe(gpus=64)
def qwen3_vl_8b_pretrain_config():
    """Pretraining, rows of 8K tokens, 64 H100: TP 2."""
    return split(pretrain("8B"), tp=2)


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

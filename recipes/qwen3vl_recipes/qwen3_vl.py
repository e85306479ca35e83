"""Recipes of Qwen3-VL, small models first: `on(number of GPUs, kind of training, size of the model)`.

Further arguments of `on` state how a recipe differs from its kind of training.
"""

from qwen3vl_recipes.base import (
    dist_train,
    dpo,
    embedding,
    keep_vision_activations,
    kto,
    on,
    peft,
    peft_dora,
    pretrain,
    pretrain_fp8_cs,
    pretrain_fp8_mx,
    reranker,
    set_parallel_sizes,
    sft,
    sft_32k,
    sft_128k,
    sft_256k,
    sft_fsdp,
)
from qwen3vl_recipes.registry import recipe

qwen3_vl_2b_sft_config = on(8, sft, "2B")
qwen3_vl_2b_sft_fsdp_config = on(8, sft_fsdp, "2B")
qwen3_vl_2b_sft_32k_config = on(8, sft_32k, "2B", cp=4)
qwen3_vl_2b_sft_128k_config = on(8, sft_128k, "2B", cp=4, recompute="all")
qwen3_vl_2b_sft_256k_config = on(8, sft_256k, "2B", cp=8, recompute="all")
qwen3_vl_2b_peft_config = on(1, peft, "2B")
qwen3_vl_2b_peft_dora_config = on(1, peft_dora, "2B")
qwen3_vl_2b_dpo_config = on(1, dpo, "2B")
qwen3_vl_2b_kto_config = on(1, kto, "2B")
qwen3_vl_2b_embedding_config = on(1, embedding, "2B")
qwen3_vl_2b_reranker_config = on(1, reranker, "2B")
qwen3_vl_2b_pretrain_config = on(64, pretrain, "2B")

qwen3_vl_4b_sft_config = on(8, sft, "4B", tp=2)
qwen3_vl_4b_sft_fsdp_config = on(8, sft_fsdp, "4B")
qwen3_vl_4b_sft_32k_config = on(8, sft_32k, "4B", tp=2, cp=4)
qwen3_vl_4b_sft_128k_config = on(8, sft_128k, "4B", tp=2, cp=4, recompute="all")
qwen3_vl_4b_sft_256k_config = on(16, sft_256k, "4B", tp=2, cp=8, recompute="all")
qwen3_vl_4b_peft_config = on(1, peft, "4B")
qwen3_vl_4b_peft_dora_config = on(1, peft_dora, "4B")
qwen3_vl_4b_dpo_config = on(1, dpo, "4B")
qwen3_vl_4b_pretrain_config = on(64, pretrain, "4B", tp=2)

qwen3_vl_8b_sft_config = on(8, sft, "8B", tp=2, recompute=10)
qwen3_vl_8b_sft_fsdp_config = on(8, sft_fsdp, "8B", recompute="all")
qwen3_vl_8b_sft_32k_config = on(8, sft_32k, "8B", tp=2, cp=4, recompute=10)
qwen3_vl_8b_sft_128k_config = on(16, sft_128k, "8B", tp=2, cp=4, recompute="all")
qwen3_vl_8b_sft_256k_config = on(16, sft_256k, "8B", tp=2, cp=8, recompute="all")
qwen3_vl_8b_peft_config = on(1, peft, "8B", recompute="all")
qwen3_vl_8b_peft_dora_config = on(1, peft_dora, "8B", recompute="all")
qwen3_vl_8b_dpo_config = on(1, dpo, "8B", recompute="all")
qwen3_vl_8b_kto_config = on(1, kto, "8B", recompute="all")
qwen3_vl_8b_embedding_config = on(1, embedding, "8B", recompute="all")
qwen3_vl_8b_reranker_config = on(1, reranker, "8B", recompute="all")
qwen3_vl_8b_pretrain_config = on(64, pretrain, "8B", tp=2)

qwen3_vl_32b_sft_config = on(16, sft, "32B", tp=8, recompute="all")
qwen3_vl_32b_sft_fsdp_config = on(16, sft_fsdp, "32B", recompute="all", init_on_cpu=True)
qwen3_vl_32b_sft_32k_config = on(32, sft_32k, "32B", tp=8, cp=2, recompute="all")
qwen3_vl_32b_sft_128k_config = on(32, sft_128k, "32B", tp=8, cp=4, recompute="all")
qwen3_vl_32b_sft_256k_config = on(64, sft_256k, "32B", tp=8, cp=8, recompute="all")
qwen3_vl_32b_peft_config = on(8, peft, "32B", tp=4)
qwen3_vl_32b_peft_dora_config = on(1, peft_dora, "32B", gpu="H200", recompute="all")
qwen3_vl_32b_dpo_config = on(8, dpo, "32B", tp=4)
qwen3_vl_32b_pretrain_config = on(128, pretrain, "32B", tp=8)

qwen3_vl_30b_a3b_sft_config = on(16, sft, "30B-A3B", ep=8, recompute="all")
qwen3_vl_30b_a3b_sft_fsdp_config = on(16, sft_fsdp, "30B-A3B", ep=8, recompute="all")
qwen3_vl_30b_a3b_sft_32k_config = on(16, sft_32k, "30B-A3B", cp=4, ep=8, recompute="all")
qwen3_vl_30b_a3b_sft_128k_config = on(32, sft_128k, "30B-A3B", cp=8, ep=8, recompute="all")
qwen3_vl_30b_a3b_sft_256k_config = on(32, sft_256k, "30B-A3B", cp=16, ep=8, recompute="all")


@recipe(gpus=32)
def qwen3_vl_30b_a3b_sft_dist_train_config():
    """Full fine-tuning, rows of 8K tokens, 32 H100: 8 vision ranks; language model: TP 2, PP 3, EP 8."""
    cfg = set_parallel_sizes(sft("30B-A3B", global_batch_size=96), tp=2, pp=3, ep=8)
    return dist_train(keep_vision_activations(cfg), vision=8, language=24)


qwen3_vl_30b_a3b_peft_config = on(8, peft, "30B-A3B", ep=8, overlap=True)
qwen3_vl_30b_a3b_peft_dora_config = on(8, peft_dora, "30B-A3B", ep=8, overlap=True)
qwen3_vl_30b_a3b_dpo_config = on(8, dpo, "30B-A3B", ep=8)
qwen3_vl_30b_a3b_pretrain_config = on(128, pretrain, "30B-A3B", ep=8, recompute="all")
qwen3_vl_30b_a3b_pretrain_fp8_cs_config = on(128, pretrain_fp8_cs, "30B-A3B", ep=8, recompute="all")
qwen3_vl_30b_a3b_pretrain_fp8_mx_config = on(64, pretrain_fp8_mx, "30B-A3B", gpu="B200", ep=8)

qwen3_vl_235b_a22b_sft_config = on(128, sft, "235B-A22B", tp=4, pp=4, ep=32, recompute="all", rows=128)
qwen3_vl_235b_a22b_sft_fsdp_config = on(128, sft_fsdp, "235B-A22B", ep=32, recompute="all", rows=128)
qwen3_vl_235b_a22b_sft_32k_config = on(128, sft_32k, "235B-A22B", tp=4, pp=4, cp=2, ep=32, recompute="all", rows=64)
qwen3_vl_235b_a22b_sft_128k_config = on(256, sft_128k, "235B-A22B", tp=4, pp=4, cp=8, ep=32, recompute="all", rows=32)
qwen3_vl_235b_a22b_sft_256k_config = on(512, sft_256k, "235B-A22B", tp=4, pp=4, cp=16, ep=32, recompute="all", rows=32)


@recipe(gpus=144)
def qwen3_vl_235b_a22b_sft_dist_train_config():
    """Full fine-tuning, rows of 8K tokens, 144 H100: 16 vision ranks with TP 2; language model: TP 4, PP 16, EP 8."""
    cfg = set_parallel_sizes(sft("235B-A22B", global_batch_size=128), tp=4, pp=16, ep=8)
    cfg.model.recompute_granularity, cfg.model.recompute_modules = "selective", ["moe_act", "layernorm"]
    # Set even if Transformer Engine is not installed. The run then reports that it is missing.
    cfg.model.transformer_impl, cfg.model.moe_grouped_gemm = "transformer_engine", True
    return dist_train(cfg, vision=16, language=128, vision_tp=2)


qwen3_vl_235b_a22b_peft_config = on(16, peft, "235B-A22B", ep=16, recompute="all")
qwen3_vl_235b_a22b_peft_dora_config = on(16, peft_dora, "235B-A22B", ep=16, recompute="all")
qwen3_vl_235b_a22b_pretrain_config = on(512, pretrain, "235B-A22B", tp=4, pp=4, ep=32, recompute="all", rows=1024)
qwen3_vl_235b_a22b_pretrain_fp8_cs_config = on(
    512, pretrain_fp8_cs, "235B-A22B", tp=4, pp=4, ep=32, recompute="all", rows=1024
)
qwen3_vl_235b_a22b_pretrain_fp8_mx_config = on(
    128, pretrain_fp8_mx, "235B-A22B", gpu="B200", tp=2, pp=4, ep=32, rows=1024
)

"""Recipes of Qwen3.5-VL, small models first, as in `qwen3_vl.py`.

Linear attention has sixteen key heads. Where TP * CP is above sixteen, ranks exchange its states instead of dividing
its heads (`model.linear_cp_mode`).
"""

from functools import partial

from qwen3vl_recipes import base
from qwen3vl_recipes.base import (
    dpo,
    peft,
    pretrain,
    pretrain_fp8_cs,
    pretrain_fp8_mx,
    sft,
    sft_1m,
    sft_32k,
    sft_128k,
    sft_256k,
    sft_fsdp,
)

on = partial(base.on, family="qwen3_5")

qwen35_vl_800m_sft_config = on(8, sft, "0.8B")
qwen35_vl_800m_sft_fsdp_config = on(8, sft_fsdp, "0.8B")
qwen35_vl_800m_sft_32k_config = on(8, sft_32k, "0.8B", cp=4)
qwen35_vl_800m_sft_128k_config = on(8, sft_128k, "0.8B", cp=4, recompute="all")
qwen35_vl_800m_sft_256k_config = on(8, sft_256k, "0.8B", cp=8, recompute="all")
qwen35_vl_800m_peft_config = on(1, peft, "0.8B")
qwen35_vl_800m_pretrain_config = on(64, pretrain, "0.8B")

qwen35_vl_2b_sft_config = on(8, sft, "2B")
qwen35_vl_2b_sft_fsdp_config = on(8, sft_fsdp, "2B")
qwen35_vl_2b_sft_32k_config = on(8, sft_32k, "2B", cp=4)
qwen35_vl_2b_sft_128k_config = on(8, sft_128k, "2B", cp=8, recompute="all")
qwen35_vl_2b_sft_256k_config = on(16, sft_256k, "2B", tp=2, cp=8, recompute="all")
qwen35_vl_2b_peft_config = on(1, peft, "2B")
qwen35_vl_2b_pretrain_config = on(64, pretrain, "2B")

qwen35_vl_4b_sft_config = on(8, sft, "4B", tp=2)
qwen35_vl_4b_sft_fsdp_config = on(8, sft_fsdp, "4B", recompute="all")
qwen35_vl_4b_sft_32k_config = on(8, sft_32k, "4B", tp=2, cp=4)
qwen35_vl_4b_sft_128k_config = on(8, sft_128k, "4B", tp=2, cp=4, recompute="all")
qwen35_vl_4b_sft_256k_config = on(16, sft_256k, "4B", tp=2, cp=8, recompute="all")
qwen35_vl_4b_peft_config = on(1, peft, "4B")
qwen35_vl_4b_dpo_config = on(1, dpo, "4B")
qwen35_vl_4b_pretrain_config = on(64, pretrain, "4B", tp=2)

qwen35_vl_9b_sft_config = on(8, sft, "9B", tp=4)
qwen35_vl_9b_sft_fsdp_config = on(8, sft_fsdp, "9B", recompute="all")
qwen35_vl_9b_sft_32k_config = on(8, sft_32k, "9B", tp=4, cp=2)
qwen35_vl_9b_sft_128k_config = on(16, sft_128k, "9B", tp=4, cp=4, recompute="all")
qwen35_vl_9b_sft_256k_config = on(16, sft_256k, "9B", tp=4, cp=4, recompute="all")
qwen35_vl_9b_sft_1m_config = on(64, sft_1m, "9B", tp=4, cp=16, recompute="all")
qwen35_vl_9b_peft_config = on(1, peft, "9B", recompute="all")
qwen35_vl_9b_dpo_config = on(1, dpo, "9B", recompute="all")
qwen35_vl_9b_pretrain_config = on(64, pretrain, "9B", tp=4)

qwen35_vl_27b_sft_config = on(16, sft, "27B", tp=4, pp=4, recompute=8)
qwen35_vl_27b_sft_fsdp_config = on(32, sft_fsdp, "27B", recompute="all")
qwen35_vl_27b_sft_32k_config = on(32, sft_32k, "27B", tp=4, pp=4, cp=2, recompute="all")
qwen35_vl_27b_sft_128k_config = on(64, sft_128k, "27B", tp=4, pp=4, cp=4, recompute="all")
qwen35_vl_27b_sft_256k_config = on(128, sft_256k, "27B", tp=4, pp=4, cp=8, recompute="all")
qwen35_vl_27b_peft_config = on(8, peft, "27B", tp=2, recompute="all")
qwen35_vl_27b_dpo_config = on(8, dpo, "27B", tp=2, recompute="all")
qwen35_vl_27b_pretrain_config = on(128, pretrain, "27B", tp=4, pp=4)

qwen35_vl_35b_a3b_sft_config = on(16, sft, "35B-A3B", tp=2, ep=16, recompute="all")
qwen35_vl_35b_a3b_sft_fsdp_config = on(16, sft_fsdp, "35B-A3B", ep=8, recompute="all")
qwen35_vl_35b_a3b_sft_32k_config = on(16, sft_32k, "35B-A3B", tp=2, cp=4, ep=16, recompute="all")
qwen35_vl_35b_a3b_sft_128k_config = on(16, sft_128k, "35B-A3B", tp=2, cp=8, ep=16, recompute="all")
qwen35_vl_35b_a3b_sft_256k_config = on(32, sft_256k, "35B-A3B", tp=2, cp=8, ep=16, recompute="all")
qwen35_vl_35b_a3b_sft_1m_config = on(64, sft_1m, "35B-A3B", tp=2, cp=32, ep=16, recompute="all")
qwen35_vl_35b_a3b_peft_config = on(8, peft, "35B-A3B", tp=2, ep=4, overlap=True)
qwen35_vl_35b_a3b_dpo_config = on(8, dpo, "35B-A3B", tp=2, ep=4)
qwen35_vl_35b_a3b_pretrain_config = on(128, pretrain, "35B-A3B", tp=2, ep=16, overlap=True)
qwen35_vl_35b_a3b_pretrain_fp8_cs_config = on(128, pretrain_fp8_cs, "35B-A3B", tp=2, ep=16, recompute="all")
qwen35_vl_35b_a3b_pretrain_fp8_mx_config = on(64, pretrain_fp8_mx, "35B-A3B", gpu="B200", ep=8)

qwen35_vl_122b_a10b_sft_config = on(48, sft, "122B-A10B", tp=2, pp=6, ep=8, recompute="all", rows=48)
qwen35_vl_122b_a10b_sft_fsdp_config = on(64, sft_fsdp, "122B-A10B", ep=16, recompute="all", rows=64)
qwen35_vl_122b_a10b_sft_32k_config = on(96, sft_32k, "122B-A10B", tp=2, pp=6, cp=4, ep=8, recompute="all", rows=48)
qwen35_vl_122b_a10b_sft_128k_config = on(192, sft_128k, "122B-A10B", tp=2, pp=6, cp=8, ep=8, recompute="all", rows=32)
qwen35_vl_122b_a10b_sft_256k_config = on(384, sft_256k, "122B-A10B", tp=2, pp=6, cp=16, ep=8, recompute="all", rows=32)
qwen35_vl_122b_a10b_peft_config = on(8, peft, "122B-A10B", tp=2, ep=8, recompute="all")
qwen35_vl_122b_a10b_pretrain_config = on(192, pretrain, "122B-A10B", tp=2, pp=6, ep=8, recompute="all", rows=1024)
qwen35_vl_122b_a10b_pretrain_fp8_cs_config = on(
    192, pretrain_fp8_cs, "122B-A10B", tp=2, pp=6, ep=8, recompute="all", rows=1024
)
qwen35_vl_122b_a10b_pretrain_fp8_mx_config = on(
    64, pretrain_fp8_mx, "122B-A10B", gpu="B200", tp=2, pp=4, ep=8, rows=1024
)

qwen35_vl_397b_a17b_sft_config = on(256, sft, "397B-A17B", tp=2, pp=4, ep=32, recompute="all", rows=128)
qwen35_vl_397b_a17b_sft_fsdp_config = on(256, sft_fsdp, "397B-A17B", ep=32, recompute="all", rows=256)
qwen35_vl_397b_a17b_sft_32k_config = on(256, sft_32k, "397B-A17B", tp=2, pp=4, cp=4, ep=32, recompute="all", rows=64)
qwen35_vl_397b_a17b_sft_128k_config = on(512, sft_128k, "397B-A17B", tp=2, pp=4, cp=8, ep=64, recompute="all", rows=32)
qwen35_vl_397b_a17b_sft_256k_config = on(
    1024, sft_256k, "397B-A17B", tp=2, pp=4, cp=16, ep=64, recompute="all", rows=32
)
qwen35_vl_397b_a17b_peft_config = on(32, peft, "397B-A17B", tp=2, ep=32, recompute="all")
qwen35_vl_397b_a17b_pretrain_config = on(512, pretrain, "397B-A17B", tp=2, pp=4, ep=32, recompute="all", rows=1024)
qwen35_vl_397b_a17b_pretrain_fp8_cs_config = on(
    512, pretrain_fp8_cs, "397B-A17B", tp=2, pp=4, ep=32, recompute="all", rows=1024
)
qwen35_vl_397b_a17b_pretrain_fp8_mx_config = on(
    256, pretrain_fp8_mx, "397B-A17B", gpu="B200", tp=2, pp=4, ep=32, rows=1024
)

qwen35_vl_proxy_sft_config = on(8, sft, "proxy", tp=2, ep=4, overlap=True)
qwen35_vl_proxy_sft_fsdp_config = on(8, sft_fsdp, "proxy", ep=4)

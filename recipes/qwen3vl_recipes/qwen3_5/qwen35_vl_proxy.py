"""Recipes of Qwen3.5-VL-397B-A17B in small: the real widths, four layers, sixteen experts."""

from qwen3vl_recipes.base import fsdp, split
from qwen3vl_recipes.qwen3_5 import sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=8)
def qwen35_vl_proxy_sft_config():
    """Full fine-tuning, rows of 8K tokens of the 397B-A17B's proxy, 8 H100: TP 2, EP 4."""
    return split(sft("proxy"), tp=2, ep=4)


@recipe(gpus=8)
def qwen35_vl_proxy_sft_fsdp_config():
    """As qwen35_vl_proxy_sft_config, with Megatron-FSDP instead of tensor parallelism."""
    return fsdp(split(sft("proxy"), ep=4))

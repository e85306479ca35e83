"""Qwen3-VL: a dense or MoE text model, and a vision tower with DeepStack."""

from qwen3vl_bridge.models.qwen3_vl import config, presets, table
from qwen3vl_bridge.registry import Family

FAMILY = Family(
    name=config.FAMILY_NAME,
    title="Qwen3-VL",
    architectures={"qwen3_vl": "Qwen3VLForConditionalGeneration", "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration"},
    table=table.table,
    dimensions=config.dimensions_of,
    check=config.check_settings,
    fields=config.fields_of,
    fields_of_run=config.fields_of_run,
    bridge=f"{__name__}.bridge",
    presets=presets,
    dist_train=True,
)

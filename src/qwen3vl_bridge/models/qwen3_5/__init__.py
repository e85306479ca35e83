"""Qwen3.5-VL: a text model with Gated DeltaNet and gated attention, and a vision tower without DeepStack."""

from qwen3vl_bridge.config import hybrid_config
from qwen3vl_bridge.models.qwen3_5 import config, presets, table
from qwen3vl_bridge.registry import Family
from qwen3vl_bridge.weights.rows import ExpertLayout

FAMILY = Family(
    name=config.FAMILY_NAME,
    title="Qwen3.5-VL",
    architectures={"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"},
    table=table.table,
    dimensions=config.dimensions_of,
    check=config.check_settings,
    fields=hybrid_config.fields_of,
    fields_of_run=config.fields_of_run,
    bridge=f"{__name__}.bridge",
    presets=presets,
    released_experts=ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT,
    fp8_experts=ExpertLayout.PER_EXPERT,
    optional={"mtp": hybrid_config.MTP_LAYERS},
)

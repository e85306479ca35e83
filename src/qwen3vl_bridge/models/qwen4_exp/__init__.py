"""Qwen3.8-Flash-Next (`qwen4_exp`): Qwen3.5's layers with gated residuals, n-gram embeddings and sparse attention."""

from qwen3vl_bridge.config import hybrid_config
from qwen3vl_bridge.models.qwen4_exp import config, presets, table
from qwen3vl_bridge.registry import Family
from qwen3vl_bridge.weights.rows import ExpertLayout

FAMILY = Family(
    name=config.FAMILY_NAME,
    title="Qwen3.8-Flash-Next",
    architectures={"qwen4_exp": "Qwen4ExpForConditionalGeneration"},
    table=table.table,
    dimensions=config.dimensions_of,
    check=config.check_settings,
    fields=config.fields_of,
    fields_of_run=config.fields_of_run,
    bridge=f"{__name__}.bridge",
    presets=presets,
    released_experts=ExpertLayout.OUTPUT_MAJOR,
    fp8_experts=ExpertLayout.PER_EXPERT,
    fp8_only_experts=True,
    constants=config.constants_of,
    fp8_table_field="ple_embedding_dtype",
    optional={"mtp": hybrid_config.MTP_LAYERS},
)

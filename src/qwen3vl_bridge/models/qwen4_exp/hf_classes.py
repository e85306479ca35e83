"""Configuration classes of Qwen3.8-Flash-Next for releases of transformers that do not know the model (before 5.16).

`register_configs` registers the classes with `AutoConfig`, so that `config.json` can be read. Where transformers has
classes of its own, nothing is registered.
"""

from __future__ import annotations

from typing import Any, ClassVar

from qwen3vl_bridge.config.hybrid_config import LINEAR
from qwen3vl_bridge.models.qwen4_exp.config import INDEXED, NGRAM_FIELDS, RESIDUAL_FIELDS, SEED

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import (
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5MoeVisionConfig,
)

MODEL_TYPE = "qwen4_exp"


class TextConfig(Qwen3_5MoeTextConfig):
    """Configuration of the text model; fields and defaults as in transformers 5.20, Qwen4ExpTextConfig."""

    model_type = f"{MODEL_TYPE}_text"

    def __post_init__(self, **kwargs: Any) -> None:
        """Set the fields that Qwen3.5's configuration lacks, and name full attention `indexed_attention`."""
        defaults = {
            **RESIDUAL_FIELDS, **NGRAM_FIELDS, "seed": SEED, "ple_layer_ids": (), "ple_embed_dim": None,
            "norm_topk_prob": True, "output_gate_type": None,
            **dict.fromkeys(("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim")),
            **dict.fromkeys(("indexer_budget", "indexer_compress_ratio")),
        }  # fmt: skip
        for name, default in defaults.items():
            value = kwargs.pop(name, None)
            setattr(self, name, default if value is None else value)
        self.ple_layer_ids = sorted(set(self.ple_layer_ids))
        if self.ple_embed_dim is None:
            self.ple_embed_dim = self.hidden_size
        super().__post_init__(**kwargs)
        self.layer_types = [kind if kind == LINEAR else INDEXED for kind in self.layer_types]


class VisionConfig(Qwen3_5MoeVisionConfig):
    """Configuration of the vision tower, which is Qwen3.5's."""

    model_type = f"{MODEL_TYPE}_vision"


class Config(Qwen3_5MoeConfig):
    """Configuration of the complete model."""

    model_type = MODEL_TYPE
    sub_configs: ClassVar[dict[str, type]] = {"vision_config": VisionConfig, "text_config": TextConfig}

    def __post_init__(self, **kwargs: Any) -> None:
        """Parse `text_config` and `vision_config`; the latter may have the `model_type` of the complete model."""
        if isinstance(self.vision_config, dict) and self.vision_config.get("model_type") == MODEL_TYPE:
            self.vision_config = {**self.vision_config, "model_type": VisionConfig.model_type}
        super().__post_init__(**kwargs)


def register_configs() -> None:
    """Register the classes with `AutoConfig`, unless transformers knows the model."""
    if MODEL_TYPE not in CONFIG_MAPPING:
        for kind in (Config, TextConfig, VisionConfig):
            AutoConfig.register(kind.model_type, kind)

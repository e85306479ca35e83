"""The Qwen3.8-Flash-Next bridge, registered with Megatron-Bridge: from a Hugging Face configuration to our provider."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.models.common.bridge import provider_by_model_type, stored_config
from qwen3vl_bridge.models.common.hybrid_bridge import HybridBridge
from qwen3vl_bridge.models.qwen4_exp import config as hf
from qwen3vl_bridge.models.qwen4_exp.hf_classes import register_configs
from qwen3vl_bridge.models.qwen4_exp.model import Qwen4ExpModel
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import share_scales
from qwen3vl_bridge.models.qwen4_exp.ngram_mapping import NgramHeadMapping, NgramScaleMapping, gather_tables
from qwen3vl_bridge.models.qwen4_exp.provider import Qwen4ExpModelProvider
from qwen3vl_bridge.models.qwen4_exp.table import NgramHead
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.bridge_mappings import param_mappings
from qwen3vl_bridge.weights.rows import Dimensions, expand

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import HFWeightTuple, MegatronModelBridge
from megatron.core.utils import unwrap_model

register_configs()


@MegatronModelBridge.register_bridge(
    source="Qwen4ExpForConditionalGeneration",  # a name, because only later releases of transformers have the class
    target=Qwen4ExpModel,
    provider=Qwen4ExpModelProvider,
    model_type=hf.FAMILY_NAME,
)
class Qwen4ExpBridge(HybridBridge):
    """AutoBridge support for Qwen3.8-Flash-Next."""

    family = hf.FAMILY_NAME

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """Return the provider's fields from a Hugging Face configuration."""
        text = config.text_config.to_dict()
        fields = super().provider_fields(config)
        fields |= {name: text[name] for name in (*hf.RESIDUAL_FIELDS, *hf.NGRAM_FIELDS, "ple_embed_dim")}
        fields |= {name: text[name] for name in hf.INDEXER_FIELDS if text[name] is not None}
        return fields | dict(
            ple_layers=list(hf.ple_layers_of(text)),
            ngram_seed=text["seed"],
            linear_output_gate=text["output_gate_type"] or "silu",
            eos_token_id=hf.eos_of(text),
        )

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the registry of Megatron-Bridge's parameter mappings, made from the weight table.

        The sizes of n-gram tables determine which tensors store a hash head, so the rows of hash heads are expanded.
        """
        rows, dimensions = family(self.family).rows(self.expert_layout()), self._stored_dimensions()
        tables = list(expand(tuple(row for row in rows if isinstance(row, NgramHead)), dimensions))
        return MegatronMappingRegistry(
            *param_mappings(tuple(row for row in rows if not isinstance(row, NgramHead))),
            *(NgramHeadMapping(row, dimensions, self.shared_scale) for row in tables),
            *(NgramScaleMapping(row) for row in tables if row.position[1] == 0),
        )

    def load_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Load weights as the base class does. Then ranks tell each other the scales of n-gram tables in FP8."""
        loaded = super().load_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)
        share_scales(loaded)
        return loaded

    def stream_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Yield converted weights as the base class does. At the end the scales of n-gram tables in FP8 are set."""
        yield from super().stream_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)
        share_scales(megatron_model if isinstance(megatron_model, list) else [megatron_model])

    def stream_weights_megatron_to_hf(
        self, megatron_model: Any, hf_pretrained: Any, cpu: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        """Yield weights in Hugging Face format, then the n-gram tables and the constants of their hashes.

        If `conversion_tasks` selects tasks, tables and constants are included only if a task belongs to a table.
        """
        yield from super().stream_weights_megatron_to_hf(megatron_model, hf_pretrained, cpu, *args, **kwargs)
        tasks = kwargs.get("conversion_tasks")
        if tasks is not None and not any(isinstance(task.mapping, NgramHeadMapping) for task in tasks):
            return
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        config = stored_config(self.family, hf_pretrained)
        layers = unwrap_model(chunks)[0].config.num_layers  # it may have fewer than the checkpoint
        text = config["text_config"]
        numbers = [number for number in text.get("ple_layer_ids") or () if number <= layers]
        config = {**config, "text_config": {**text, "ple_layer_ids": numbers}}
        for name, part in gather_tables(chunks, family(self.family).dimensions(config)):
            yield HFWeightTuple(name, part.cpu() if cpu else part)
        device = None if cpu else next(chunks[0].parameters()).device
        for name, values in family(self.family).constants(config).items():
            yield HFWeightTuple(name, torch.tensor(values, device=device))

    def _stored_dimensions(self) -> Dimensions:
        return family(self.family).dimensions(stored_config(self.family, self.hf_pretrained))


def provider_from_hf_config(hf_config: Mapping[str, Any], **settings: Any) -> Qwen4ExpModelProvider:
    """Return a provider for a `config.json`, see `provider_by_model_type`.

    The `run_config.yaml` of a converted checkpoint contains the name and the arguments of this function.
    """
    return provider_by_model_type((Qwen4ExpBridge,), hf_config, settings)

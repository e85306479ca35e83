"""The bridge: the common part of all families' bridges.

Megatron-Bridge calls it: `AutoBridge.to_megatron_provider` calls `provider_bridge`; loading and exporting weights,
`mapping_registry`. The caller of the former then calls the provider's `finalize()` and `provide_distributed_model`, as
Megatron-Bridge's `pretrain` and `finetune` do, the first of them when they validate the run's configuration.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import types
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from qwen3vl_bridge.models.hf_config import EXPERT_FIELDS, TEXT_FIELDS, TOKEN_IDS, fp8_block
from qwen3vl_bridge.models.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.models.settings import text_activation
from qwen3vl_bridge.peft.model_adapters import AdapterConversion
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.bridge_mappings import param_mappings
from qwen3vl_bridge.weights.fp8 import SCALES, Block, dequantized
from qwen3vl_bridge.weights.rows import ExpertLayout, expand, expert_layout_of

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, WeightConversionTask
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from transformers import CONFIG_MAPPING

# A saved run_config.yaml names our classes; Megatron-Bridge builds only allowed ones.
register_allowed_target_prefix("qwen3vl_bridge.")


class FamilyBridge(AdapterConversion, MegatronModelBridge):
    """AutoBridge support for a family: a subclass sets `family`, completes `provider_fields`, and is registered.

    Class attributes:
        family: its name in the registry.
        PROVIDER_CLASS: its provider, set by registration.
    """

    family: ClassVar[str]
    PROVIDER_CLASS: ClassVar[type[VisionLanguageProvider]]

    def provider_bridge(self, hf_pretrained: Any) -> VisionLanguageProvider:
        """The provider of a Hugging Face model, whose `config` is the family's class of transformers.

        Raises:
            ValueError: a setting that this model does not support.
        """
        config = hf_pretrained.config
        family(self.family).check(config.to_dict())
        return self.PROVIDER_CLASS(**self.provider_fields(config))

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: list[MegatronModule], *args: Any, **kwargs: Any
    ) -> Any:
        """Like Megatron-Bridge's, which silently keeps the initial values of a weight that the checkpoint lacks, and
        ignores layers that config.json does not count. A model may have fewer layers than both.

        Raises:
            ValueError: tensors are missing, or of layers or experts beyond config.json's; the message names them.
        """
        self.hf_pretrained = hf_pretrained
        _read_fp8(hf_pretrained, unwrap_model(megatron_model)[0].config.params_dtype)
        rows = family(self.family).rows(self.expert_layout())
        dimensions = unwrap_model(megatron_model)[0].config.dimensions()
        wanted = {name for row in expand(rows, dimensions) for name in row.hf}
        path, found = hf_pretrained.model_name_or_path, set(hf_pretrained.state.keys())
        if missing := sorted(wanted - found):
            advice = ""
            if all(name.startswith("mtp.") for name in missing):
                advice = "; set mtp_num_layers=None to load the model without multi-token prediction"
            raise ValueError(f"{path} lacks {len(missing)} tensors: {_some(missing)}{advice}")
        counted = expand(rows, family(self.family).dimensions(stored_config(self.family, hf_pretrained)))
        own = {name for row in counted for name in row.hf}
        kinds = {_without_numbers(name) for name in own}
        if beyond := sorted(name for name in found - own if _without_numbers(name) in kinds):
            raise ValueError(
                f"{path} has {len(beyond)} tensors of layers or experts that its config.json does not count: "
                f"{_some(beyond)}; expected the config.json that these weights were saved with"
            )
        return super().load_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)

    def stream_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Megatron-Bridge's, from weights in FP8 too."""
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        _read_fp8(hf_pretrained, unwrap_model(chunks)[0].config.params_dtype)
        return super().stream_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)

    def stream_weights_megatron_to_hf(self, megatron_model: Any, hf_pretrained: Any, *args: Any, **kwargs: Any) -> Any:
        """Like Megatron-Bridge's; never in FP8, whatever the Hugging Face model is in."""
        _read_fp8(hf_pretrained, torch.bfloat16)
        return super().stream_weights_megatron_to_hf(megatron_model, hf_pretrained, *args, **kwargs)

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """The provider's fields that a Hugging Face configuration determines, as far as all families share them."""
        text = config.text_config
        dtype = self.dtype_from_hf(text, default=self.dtype_from_hf(config, default=torch.float32))
        fields = dict(
            **{name: getattr(text, of_text) for name, of_text in TEXT_FIELDS.items()},
            vocab_size=text.vocab_size,
            seq_length=text.max_position_embeddings,
            init_method_std=text.initializer_range,
            activation_func=text_activation(text.hidden_act),
            attention_dropout=text.attention_dropout,
            # transformers keeps the setting in the whole model's configuration; the text part has only a default.
            share_embeddings_and_output_weights=config.tie_word_embeddings,
            make_vocab_size_divisible_by=self.make_vocab_size_divisible_by(text.vocab_size),
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            vision_config=config.vision_config,
            **{name: getattr(config, name) for name in TOKEN_IDS},
        )
        token_ids = ("bos_token_id", "eos_token_id", "pad_token_id")
        fields |= {name: getattr(text, name) for name in token_ids if getattr(text, name, None) is not None}
        if issubclass(self.PROVIDER_CLASS, ExpertsMixin):
            fields |= {name: getattr(text, of_text) for name, of_text in EXPERT_FIELDS.items()}
            fields["moe_aux_loss_coeff"] = text.router_aux_loss_coef
        return fields

    def build_conversion_tasks(
        self, hf_pretrained: Any, megatron_model: list[Any], *args: Any, **kwargs: Any
    ) -> list[WeightConversionTask | None]:
        """Like Megatron-Bridge's; of a quantised model without scales that have no Hugging Face name."""
        from modelopt.torch.quantization.utils import is_quantized

        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, *args, **kwargs)
        return [task for task in tasks if task is not None] if is_quantized(megatron_model[0]) else tasks

    def mapping_registry(self) -> MegatronMappingRegistry:
        """The weight table as Megatron-Bridge's mappings."""
        return MegatronMappingRegistry(*param_mappings(family(self.family).rows(self.expert_layout())))

    def expert_layout(self) -> ExpertLayout:
        """The expert format of the checkpoint; without a checkpoint or experts, that of the released ones.

        Raises:
            ValueError: an unknown format.
        """
        own = family(self.family)
        pretrained = getattr(self, "hf_pretrained", None)
        source = _files_of(pretrained)
        if source is None:
            return own.released_experts
        dimensions = own.dimensions(stored_config(self.family, pretrained))
        if not dimensions.indices["moe_layers"]:
            return own.released_experts
        of_layer, shapes = f".layers.{dimensions.indices['moe_layers'][0]}.mlp.experts.", {}
        by_file = defaultdict(list)
        for name, file in source.key_to_filename_map.items():
            if of_layer in name:
                by_file[file].append(name)
        for file, names in by_file.items():  # from its header, without reading tensors
            with safe_open(source.path / file, framework="pt") as tensors:
                shapes.update((name, tensors.get_slice(name).get_shape()) for name in names)
        return expert_layout_of(own.rows, shapes, dimensions)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


class _Fp8Source(SafeTensorsStateSource):
    """Weight files in FP8 as if they were not: without scales, and with values in a dtype."""

    def __init__(self, path: str | Path, block: Block | None, dtype: torch.dtype) -> None:
        super().__init__(path)
        self._stored, self._block, self._dtype = SafeTensorsStateSource(path), block, dtype
        stored = self._stored.key_to_filename_map
        scales = {name + SCALES for name in stored}
        self._key_to_filename_map_cache = {name: file for name, file in stored.items() if name not in scales}

    def load_tensors(self, keys_to_load: list[str]) -> dict[str, torch.Tensor]:
        """See Megatron-Bridge's."""
        loaded = self._stored.load_tensors(keys_to_load)
        for name in [name for name, tensor in loaded.items() if tensor.dtype == torch.float8_e4m3fn]:
            scales = self._stored.load_tensors([name + SCALES])[name + SCALES]
            loaded[name] = dequantized(loaded[name], scales, self._block, self._dtype)
        return loaded


def _read_fp8(hf_pretrained: Any, dtype: torch.dtype) -> None:
    """Make Megatron-Bridge read the weights of a Hugging Face model in FP8 as their values in a dtype."""
    if (source := _files_of(hf_pretrained)) is not None:
        quantization = hf_pretrained.config.to_dict().get("quantization_config")
        if quantization is not None:
            hf_pretrained.state.source = _Fp8Source(source.model_name_or_path, fp8_block(quantization), dtype)


def _files_of(hf_pretrained: Any) -> SafeTensorsStateSource | None:
    """The weight files of a Hugging Face model; None if there are none."""
    source = getattr(getattr(hf_pretrained, "state", None), "source", None)
    return source if isinstance(source, SafeTensorsStateSource) else None


def scaled_rope(rope: dict[str, Any]) -> dict[str, Any] | None:
    """A provider's `rope_parameters`, of a family's."""
    return None if rope["rope_type"] == "default" else rope


def stored_config(name: str, hf_pretrained: Any) -> Mapping[str, Any]:
    """The configuration of a Hugging Face model, without optional parts that a local checkpoint lacks."""
    config, source = hf_pretrained.config.to_dict(), _files_of(hf_pretrained)
    if source is None or not Path(source.model_name_or_path).is_dir() or not source.key_to_filename_map:
        return config
    return family(name).config_of(config, source.key_to_filename_map)


def provider_by_model_type(
    bridges: Iterable[type[FamilyBridge]], hf_config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    """The provider, not finalized, of a whole `config.json`, created by the bridge of its `model_type`; with settings.

    Raises:
        ValueError: a setting that the model does not support, or another model's configuration.
        TypeError: a setting that is not a field of the provider.
    """
    by_type = {bridge.MODEL_TYPE: bridge for bridge in bridges}
    kind = hf_config.get("model_type")
    if kind not in by_type:
        raise ValueError(f"model_type is {kind!r}, expected one of {', '.join(by_type)}")
    # Some of transformers' configuration classes modify the mapping that they are given.
    config = CONFIG_MAPPING[kind].from_dict(copy.deepcopy(dict(hf_config)))
    provider = by_type[kind]().provider_bridge(types.SimpleNamespace(config=config))
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(provider)}:
        raise TypeError(f"{type(provider).__name__} has no {', '.join(sorted(unknown))}")
    for name, value in settings.items():
        setattr(provider, name, value)
    return provider

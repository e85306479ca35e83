"""Base class of the bridges of all families: converts a Hugging Face model to a provider and to Megatron weights.

Megatron-Bridge calls a bridge. `AutoBridge.to_megatron_provider` calls `provider_bridge`, and loading and exporting
weights call `mapping_registry`. The caller of `to_megatron_provider` then calls `finalize()` of the provider and
`provide_distributed_model`. Megatron-Bridge's `pretrain` and `finetune` call `finalize()` when they validate a run.
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

from qwen3vl_bridge.checkpoint.stored_models import write_config_of_weights
from qwen3vl_bridge.config.fields import text_activation
from qwen3vl_bridge.config.hf_config import EXPERT_FIELDS, TEXT_FIELDS, TOKEN_IDS, fp8_block
from qwen3vl_bridge.core.collectives import is_rank_zero
from qwen3vl_bridge.models.common.provider import ExpertsMixin, VisionLanguageProvider
from qwen3vl_bridge.peft.running_model_export import AdapterConversion
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.bridge_mappings import param_mappings
from qwen3vl_bridge.weights.fp8 import SCALES, Block, dequantize, find_scales, scales_to_float32
from qwen3vl_bridge.weights.rows import ExpertLayout, detect_expert_layout, expand

import torch
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import MegatronModelBridge, WeightConversionTask
from megatron.bridge.models.hf_pretrained.state import SafeTensorsStateSource
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import unwrap_model
from safetensors import safe_open
from transformers import CONFIG_MAPPING

# A saved run_config.yaml names our classes, and Megatron-Bridge builds only classes with an allowed prefix.
register_allowed_target_prefix("qwen3vl_bridge.")


class FamilyBridge(AdapterConversion, MegatronModelBridge):
    """Base class of a family's bridge, with which AutoBridge converts models of the family.

    A subclass sets `family`, extends `provider_fields`, and is registered with Megatron-Bridge (`registration.py`).

    Class attributes:
        family: name of the family in the registry.
        PROVIDER_CLASS: the provider, set by registration.
    """

    family: ClassVar[str]
    PROVIDER_CLASS: ClassVar[type[VisionLanguageProvider]]

    def provider_bridge(self, hf_pretrained: Any) -> VisionLanguageProvider:
        """Return a provider with the settings of a Hugging Face model's `config`.

        Raises:
            ValueError: the configuration has a setting that this model does not support.
        """
        config = hf_pretrained.config
        family(self.family).check(config.to_dict())
        return self.PROVIDER_CLASS(**self.provider_fields(config))

    def load_weights_hf_to_megatron(
        self, hf_pretrained: Any, megatron_model: list[MegatronModule], *args: Any, **kwargs: Any
    ) -> Any:
        """Check that the checkpoint has the layers and experts that its config.json describes, then load the weights.

        Without the check Megatron-Bridge silently keeps initial values of missing weights, and ignores layers beyond
        the number in config.json. The Megatron model may have fewer layers than the checkpoint.

        Raises:
            ValueError: the checkpoint lacks tensors of the Megatron model, has more layers or experts than config.json,
                or stores constants (tensors that follow from config.json) with other values.
        """
        self.hf_pretrained = hf_pretrained
        _read_fp8(hf_pretrained, unwrap_model(megatron_model)[0].config.params_dtype)
        path, found = hf_pretrained.model_name_or_path, set(hf_pretrained.state.keys())
        config = stored_config(self.family, hf_pretrained)
        for name, expected in family(self.family).constants(config).items():
            if name in found and (values := hf_pretrained.state[name].tolist()) != list(expected):
                raise ValueError(
                    f"{path}, tensor {name}: found {values}, expected {list(expected)}, which follow from config.json"
                )
        rows = family(self.family).rows(self.expert_layout())
        dimensions = unwrap_model(megatron_model)[0].config.dimensions()
        needed = {name for row in expand(rows, dimensions) for name in row.hf}
        if missing := sorted(needed - found):
            advice = ""
            if all(name.startswith("mtp.") for name in missing):
                advice = "; set mtp_num_layers=None to load the model without multi-token prediction"
            raise ValueError(f"{path} lacks {len(missing)} tensors: {_list_names(missing)}{advice}")
        stored_rows = expand(rows, family(self.family).dimensions(config))
        counted = {name for row in stored_rows for name in row.hf}
        patterns = {_without_numbers(name) for name in counted}
        if uncounted := sorted(name for name in found - counted if _without_numbers(name) in patterns):
            raise ValueError(
                f"{path} has {len(uncounted)} tensors of layers or experts that its config.json does not count: "
                f"{_list_names(uncounted)}. Use the config.json that these weights were saved with"
            )
        return super().load_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)

    def stream_weights_hf_to_megatron(self, hf_pretrained: Any, megatron_model: Any, *args: Any, **kwargs: Any) -> Any:
        """Yield converted Megatron weights as Megatron-Bridge does. FP8 checkpoints are dequantized."""
        chunks = megatron_model if isinstance(megatron_model, list) else [megatron_model]
        _read_fp8(hf_pretrained, unwrap_model(chunks)[0].config.params_dtype)
        return super().stream_weights_hf_to_megatron(hf_pretrained, megatron_model, *args, **kwargs)

    def stream_weights_megatron_to_hf(self, megatron_model: Any, hf_pretrained: Any, *args: Any, **kwargs: Any) -> Any:
        """Yield weights in Hugging Face format as Megatron-Bridge does, but never in FP8.

        If the weights are saved, the folder gets a `config.json` that describes them.
        """
        _read_fp8(hf_pretrained, torch.bfloat16)
        if (source := _weight_files(hf_pretrained)) is not None and not isinstance(source, _WeightFiles):
            hf_pretrained.state.source = _WeightFiles(source.model_name_or_path)
        return super().stream_weights_megatron_to_hf(megatron_model, hf_pretrained, *args, **kwargs)

    def provider_fields(self, config: Any) -> dict[str, Any]:
        """Return the provider's fields from a Hugging Face configuration. A family adds its own fields."""
        text = config.text_config
        dtype = self.dtype_from_hf(text, default=self.dtype_from_hf(config, default=torch.float32))
        fields = dict(
            **{name: getattr(text, of_text) for name, of_text in TEXT_FIELDS.items()},
            vocab_size=text.vocab_size,
            seq_length=text.max_position_embeddings,
            init_method_std=text.initializer_range,
            activation_func=text_activation(text.hidden_act),
            attention_dropout=text.attention_dropout,
            # transformers keeps the setting in the configuration of the full model; `text_config` has only a default.
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
        """Return Megatron-Bridge's conversion tasks. If ModelOpt has quantized the model, leave out entries of None."""
        from modelopt.torch.quantization.utils import is_quantized

        tasks = super().build_conversion_tasks(hf_pretrained, megatron_model, *args, **kwargs)
        return [task for task in tasks if task is not None] if is_quantized(megatron_model[0]) else tasks

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the registry of Megatron-Bridge's parameter mappings, made from the weight table."""
        return MegatronMappingRegistry(*param_mappings(family(self.family).rows(self.expert_layout())))

    def shared_scale(self, name: str) -> float | None:
        """Return the scale that a tensor shares with others in an FP8 checkpoint; None if it shares none."""
        source = _weight_files(getattr(self, "hf_pretrained", None))
        return source.shared_scale(name) if isinstance(source, _Fp8WeightFiles) else None

    def expert_layout(self) -> ExpertLayout:
        """Return the expert layout of the checkpoint, or of released checkpoints if it has no weight files or experts.

        Raises:
            ValueError: the layout is unknown.
        """
        model_family = family(self.family)
        # Megatron-Bridge sets `hf_pretrained` when AutoBridge makes this object or streams weights, and
        # `load_weights_hf_to_megatron` sets it above. `provider_by_model_type` makes a bridge without it.
        pretrained = getattr(self, "hf_pretrained", None)
        source = _weight_files(pretrained)
        if source is None:
            return model_family.released_experts
        dimensions = model_family.dimensions(stored_config(self.family, pretrained))
        if not dimensions.indices["moe_layers"]:
            return model_family.released_experts
        infix, shapes = f".layers.{dimensions.indices['moe_layers'][0]}.mlp.experts.", {}
        by_file = defaultdict(list)
        for name, file in source.key_to_filename_map.items():
            if infix in name:
                by_file[file].append(name)
        for file, names in by_file.items():  # reads headers only
            with safe_open(source.path / file, framework="pt") as tensors:
                shapes.update((name, tensors.get_slice(name).get_shape()) for name in names)
        return detect_expert_layout(model_family.rows, shapes, dimensions)


def _list_names(names: list[str]) -> str:
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def _without_numbers(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)


class _WeightFiles(SafeTensorsStateSource):
    """Safetensors files of a model. Weights can be read from them, and saved to another folder under the same names."""

    def save_generator(
        self,
        generator: Iterable[tuple[str, torch.Tensor]],
        output_path: str | Path,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save weights on all ranks, then correct the `config.json` that Megatron-Bridge has copied before.

        The copied file describes the model that was loaded. The saved weights may have another dtype, or lack optional
        components.
        """
        super().save_generator(generator, output_path, *args, **kwargs)
        # The first rank returns last, even if others save files of their own. A caller may save only weights.
        first = not torch.distributed.is_initialized() or is_rank_zero()
        if first and (Path(output_path) / "config.json").is_file():
            write_config_of_weights(output_path)


class _Fp8WeightFiles(_WeightFiles):
    """FP8 weight files, read as tensors that are dequantized to another dtype. Scales are not listed."""

    def __init__(self, path: str | Path, block: Block | None, dtype: torch.dtype) -> None:
        super().__init__(path)
        self._stored, self._block, self._dtype = SafeTensorsStateSource(path), block, dtype
        stored = self._stored.key_to_filename_map
        scales = {find_scales(name, stored) for name in stored}
        self._files = {name: file for name, file in stored.items() if name not in scales}

    def shared_scale(self, name: str) -> float | None:
        """Return the scale that a tensor shares with others; None if it shares none."""
        scale = find_scales(name, self._stored.key_to_filename_map)
        if scale == name + SCALES:
            return None
        return scales_to_float32(self._stored.load_tensors([scale])[scale]).item()

    @property
    def key_to_filename_map(self) -> dict[str, str]:
        """Return a mapping from tensor name to the file that contains the tensor. Scales are omitted."""
        return self._files

    def load_tensors(self, keys_to_load: list[str]) -> dict[str, torch.Tensor]:
        """Return a dict from name to tensor. FP8 tensors are dequantized.

        Raises:
            ValueError: the scales of an FP8 tensor are missing or have an unexpected shape.
        """
        loaded = self._stored.load_tensors(keys_to_load)
        for name in [name for name, tensor in loaded.items() if tensor.dtype == torch.float8_e4m3fn]:
            where = f"{self.model_name_or_path}, tensor {name}"
            of_scales = find_scales(name, stored := self._stored.key_to_filename_map)
            if of_scales not in stored:
                raise ValueError(f"{where}: it is in FP8, but its scales {of_scales} are missing")
            scales = self._stored.load_tensors([of_scales])[of_scales]
            block = self._block if of_scales == name + SCALES else None  # the parts of an n-gram table share it
            try:
                loaded[name] = dequantize(loaded[name], scales, block, self._dtype)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
        return loaded


def _read_fp8(hf_pretrained: Any, dtype: torch.dtype) -> None:
    """If a Hugging Face model is stored in FP8, make Megatron-Bridge read its weights dequantized to `dtype`."""
    if (source := _weight_files(hf_pretrained)) is not None:
        quantization = hf_pretrained.config.to_dict().get("quantization_config")
        if quantization is not None:
            hf_pretrained.state.source = _Fp8WeightFiles(source.model_name_or_path, fp8_block(quantization), dtype)


def _weight_files(hf_pretrained: Any) -> SafeTensorsStateSource | None:
    """Return the safetensors files of a Hugging Face model; None if it has none."""
    source = getattr(getattr(hf_pretrained, "state", None), "source", None)
    return source if isinstance(source, SafeTensorsStateSource) else None


def stored_config(name: str, hf_pretrained: Any) -> Mapping[str, Any]:
    """Return the contents of a model's `config.json`, without optional components that a local checkpoint lacks.

    `name` is the name of the family.
    """
    config, source = getattr(hf_pretrained, "config", hf_pretrained).to_dict(), _weight_files(hf_pretrained)
    if source is None or not Path(source.model_name_or_path).is_dir() or not source.key_to_filename_map:
        return config
    return family(name).config_of(config, source.key_to_filename_map)


def provider_by_model_type(
    bridges: Iterable[type[FamilyBridge]], hf_config: Mapping[str, Any], settings: Mapping[str, Any]
) -> Any:
    """Return a provider for a complete `config.json`, not finalized.

    Args:
        bridges: bridges of the family; the `model_type` selects one.
        hf_config: contents of the `config.json`.
        settings: values of further provider fields, by name.

    Raises:
        ValueError: the configuration has an unknown `model_type`, or a setting that the model does not support.
        TypeError: a setting is not a field of the provider.
    """
    by_type = {bridge.MODEL_TYPE: bridge for bridge in bridges}
    model_type = hf_config.get("model_type")
    if model_type not in by_type:
        raise ValueError(f"model_type is {model_type!r}, expected one of {', '.join(by_type)}")
    # Some configuration classes of transformers modify their argument.
    config = CONFIG_MAPPING[model_type].from_dict(copy.deepcopy(dict(hf_config)))
    provider = by_type[model_type]().provider_bridge(types.SimpleNamespace(config=config))
    if unknown := settings.keys() - {field.name for field in dataclasses.fields(provider)}:
        raise TypeError(
            f"{type(provider).__name__} has no {', '.join(sorted(unknown))}: set only fields of the provider"
        )
    for name, value in settings.items():
        setattr(provider, name, value)
    return provider

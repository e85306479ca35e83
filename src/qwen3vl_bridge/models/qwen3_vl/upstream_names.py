"""Names of Megatron-Bridge's own Qwen3-VL provider for values that ours has under other names."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import logging
from typing import Any

from qwen3vl_bridge.models.settings.activations import name_of
from qwen3vl_bridge.models.settings.fields import VisionLanguageFields

from transformers import Qwen3VLMoeTextConfig, Qwen3VLTextConfig

logger = logging.getLogger(__name__)

# Attributes other than fields that callers store on a provider.
_NOTES = frozenset({"pretrained_model_name", "swiglu", "bridge", "grid", "world_size", "rank_offset"})
# Settings of a configuration on which no layer of the model depends.
_NOT_THE_MODELS = frozenset(
    {"dtype", "max_position_embeddings", "use_cache", "_name_or_path", "router_aux_loss_coef", "tie_word_embeddings"}
)
# From this similarity on a name counts as a misspelt field; Megatron-Bridge's recipes set some names that are not
# fields.
_LIKE = 0.85


class _OfVision:
    """A setting of `vision_config` under its own name.

    Setting it replaces the configuration by a changed copy, because it may be shared with the bridge that has read it.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, provider: VisionLanguageFields | None, owner: type | None = None) -> Any:
        return self if provider is None else getattr(provider.vision_config, self.name)

    def __set__(self, provider: VisionLanguageFields, value: Any) -> None:
        provider.vision_config = copy.deepcopy(provider.vision_config)
        setattr(provider.vision_config, self.name, value)


class UpstreamNames:
    """Properties of every model."""

    patch_size = _OfVision()
    temporal_patch_size = _OfVision()
    in_channels = _OfVision()
    spatial_merge_size = _OfVision()
    num_position_embeddings = _OfVision()
    out_hidden_size = _OfVision()
    deepstack_visual_indexes = _OfVision()

    @property
    def head_dim(self: Any) -> int | None:
        """`kv_channels`."""
        return self.kv_channels

    @head_dim.setter
    def head_dim(self: Any, size: int) -> None:
        self.kv_channels = size

    @property
    def language_max_sequence_length(self: Any) -> int:
        """`seq_length`, unless a limit was set: rotary positions have none."""
        return self.seq_length if self._longest_row is None else self._longest_row

    @language_max_sequence_length.setter
    def language_max_sequence_length(self: Any, tokens: int) -> None:
        self._longest_row = tokens

    _longest_row: int | None = None

    @property
    def hf_text_config(self: Any) -> Qwen3VLTextConfig | Qwen3VLMoeTextConfig:
        """The text model as a transformers configuration, created from the fields; changing it has no effect here."""
        return hf_text_config(self)

    @hf_text_config.setter
    def hf_text_config(self: Any, config: Any) -> None:
        found, expected = config.to_dict(), hf_text_config(self).to_dict()
        differ = [name for name in expected if name in found and found[name] != expected[name]]
        differ = [name for name in differ if name not in _NOT_THE_MODELS]
        if differ:
            raise ValueError(
                f"hf_text_config has {', '.join(f'{name} {found[name]!r}' for name in differ)}, which contradict "
                "the provider's fields: set these fields, or use the provider that AutoBridge makes from the whole "
                "configuration"
            )


class UpstreamExpertNames:
    """Properties of models with experts. `moe_layer_freq` determines which layers have experts."""

    @property
    def mlp_only_layers(self: Any) -> list[int]:
        """Layers without experts."""
        return [layer for layer in range(self.num_layers) if layer not in self.moe_layers]

    @mlp_only_layers.setter
    def mlp_only_layers(self: Any, layers: list[int]) -> None:
        self._expect_layers("mlp_only_layers", list(layers))

    @property
    def decoder_sparse_step(self: Any) -> int:
        """1: every layer that `mlp_only_layers` does not name has experts."""
        return 1

    @decoder_sparse_step.setter
    def decoder_sparse_step(self: Any, step: int) -> None:
        self._expect_layers("decoder_sparse_step", step)

    def _expect_layers(self, name: str, found: object) -> None:
        if found != (expected := getattr(self, name)):
            raise ValueError(f"{name} is {found}, expected {expected}, as moe_layer_freq says; set moe_layer_freq")


def hf_text_config(provider: VisionLanguageFields) -> Qwen3VLTextConfig | Qwen3VLMoeTextConfig:
    """The text part of a provider's model as a transformers configuration.

    Args:
        provider: finalised or not.
    """
    rope = dict(rope_type="default", rope_theta=provider.rotary_base, mrope_section=list(provider.mrope_section))
    shared = dict(
        vocab_size=provider.vocab_size,
        hidden_size=provider.hidden_size,
        intermediate_size=provider.ffn_hidden_size,
        num_hidden_layers=provider.num_layers,
        num_attention_heads=provider.num_attention_heads,
        num_key_value_heads=provider.num_query_groups or provider.num_attention_heads,
        head_dim=provider.kv_channels,
        hidden_act=name_of(provider.activation_func),
        max_position_embeddings=provider.seq_length,
        rms_norm_eps=provider.layernorm_epsilon,
        initializer_range=provider.init_method_std,
        attention_dropout=provider.attention_dropout,
        rope_parameters=provider.rope_parameters or rope | dict(mrope_interleaved=True),
        bos_token_id=provider.bos_token_id,
        eos_token_id=provider.eos_token_id,
        pad_token_id=provider.pad_token_id,
        tie_word_embeddings=provider.share_embeddings_and_output_weights,
    )
    if not provider.moe_layers:
        return Qwen3VLTextConfig(**shared)
    return Qwen3VLMoeTextConfig(
        **shared,
        num_experts=provider.num_moe_experts,
        num_experts_per_tok=provider.moe_router_topk,
        moe_intermediate_size=provider.moe_ffn_hidden_size,
        decoder_sparse_step=provider.decoder_sparse_step,
        mlp_only_layers=provider.mlp_only_layers,
    )


def check_names(provider: VisionLanguageFields) -> None:
    """Check attributes of a provider that are not fields, and would have no effect.

    Callers may store their own attributes there; so a name that is not similar to a field's is only logged.

    Raises:
        ValueError: a misspelt field name; or a limit of rows below their length.
    """
    if provider.language_max_sequence_length < provider.seq_length:
        raise ValueError(
            f"language_max_sequence_length is {provider.language_max_sequence_length}, expected seq_length, "
            f"{provider.seq_length}, or more; rotary positions have no limit, so it can be omitted"
        )
    fields = [field.name for field in dataclasses.fields(provider)]
    for name, value in vars(provider).items():
        if name in fields or name in _NOTES or name.startswith("_") or value is None or value is False:
            continue
        if like := difflib.get_close_matches(name, fields, n=1, cutoff=_LIKE):
            raise ValueError(f"{name} is set, but {type(provider).__name__} has no such setting: expected {like[0]}")
        logger.warning("%s is set, but %s has no such setting: it has no effect", name, type(provider).__name__)

"""Reading a Qwen3.8-Flash-Next (`qwen4_exp`) `config.json`: checks, dimensions, and the fields that identify the model.

Standard library only. Source of the defaults: transformers 5.20, Qwen4ExpTextConfig.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

from qwen3vl_bridge.config import hf_config, hybrid_config
from qwen3vl_bridge.config.hf_config import POSITIVE, TOKEN, Kind, renamed, shown
from qwen3vl_bridge.config.hybrid_config import FULL, LINEAR, layer_types_of
from qwen3vl_bridge.models.qwen4_exp.hash_constants import head_sizes, multipliers, table_rows
from qwen3vl_bridge.weights.rows import Dimensions

FAMILY_NAME = "qwen4_exp"
INDEXED = "indexed_attention"  # layer type of full attention in transformers' configuration objects, unlike in files

# Fields of the text model, which the provider has under the same names, with defaults.
RESIDUAL_FIELDS: Mapping[str, int] = {"hc_count": 4, "hc_lowrank": 320}
NGRAM_FIELDS: Mapping[str, int] = {
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 512,
}
INDEXER_FIELDS = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_TABLE_MULTIPLE = "make_ngram_vocab_size_divisible_by"
SEED = 1234

_FIELDS: Mapping[str, Kind] = {
    **dict.fromkeys((*RESIDUAL_FIELDS, *NGRAM_FIELDS, *INDEXER_FIELDS, "indexer_kv_heads", "ple_embed_dim"), POSITIVE),
    "seed": TOKEN,
    "ple_layer_ids": Kind(
        lambda value: isinstance(value, list | tuple) and all(type(layer) is int and layer > 0 for layer in value),
        "a list of layers, counted from 1",
    ),
    "output_gate_type": hf_config.one_of(("sigmoid", "silu")),
}


def check_settings(config: Any) -> None:
    """Check that a configuration is well-formed and supported.

    Raises:
        ValueError: a field is missing, invalid or not supported; the message names it.
    """
    config = _as_hybrid(config)
    hybrid_config.check_settings(config)
    text = config["text_config"]
    for name, kind in _FIELDS.items():
        if text.get(name) is not None and not kind.fits(text[name]):
            raise ValueError(f"text_config.{name} is {shown(text[name])}, expected {kind.expected}")
    if not hf_config.experts_of(text):
        raise ValueError("text_config.num_experts is 0, expected experts in every layer: qwen4_exp has no dense models")
    if text_field(text, "hc_count") < 2:
        raise ValueError(f"text_config.hc_count is {text['hc_count']}, expected at least 2 residual streams")
    _check_indexer(text)
    if text.get("ple_layer_ids"):
        _check_ngrams(text)


def _as_hybrid(config: Any) -> Any:
    """Return the configuration with `full_attention` in place of transformers' layer type `indexed_attention`."""
    text = config.get("text_config") if isinstance(config, Mapping) else None
    if not isinstance(text, Mapping) or not isinstance(text.get("layer_types"), list | tuple):
        return config
    types = [FULL if kind == INDEXED else kind for kind in text["layer_types"]]
    return {**config, "text_config": {**text, "layer_types": types}}


def _check_indexer(text: Mapping[str, Any]) -> None:
    if FULL not in layer_types_of(text):
        return
    for name in INDEXER_FIELDS:
        if text.get(name) is None:
            raise ValueError(
                f"the configuration lacks the field text_config.{name}, expected a number: layers have sparse attention"
            )
    budget, ratio = text["indexer_budget"], text["indexer_compress_ratio"]
    if budget % ratio:
        raise ValueError(
            f"text_config.indexer_budget is {budget}, expected a multiple of indexer_compress_ratio, which is {ratio}"
        )
    rotated = int((text.get("head_dim") or hybrid_config.HEAD_DIM) * rope_factor(text))
    if rotated > text["indexer_head_dim"]:
        raise ValueError(
            f"text_config.indexer_head_dim is {text['indexer_head_dim']}, expected at least the {rotated} rotated "
            "dimensions of an attention head"
        )
    if (heads := text.get("indexer_kv_heads", 1)) != 1:
        raise ValueError(f"text_config.indexer_kv_heads is {heads!r}, expected 1: other numbers are not implemented")


def rope_factor(text: Mapping[str, Any]) -> float:
    """Return the fraction of a head's dimensions that are rotated."""
    return hybrid_config.rope_parameters(text)["partial_rotary_factor"]


def _check_ngrams(text: Mapping[str, Any]) -> None:
    heads, dim = ngram_heads(text), text.get("ple_embed_dim") or text["hidden_size"]
    if heads == 0 or dim % heads:
        raise ValueError(
            f"text_config.ple_embed_dim is {dim}, expected a multiple of the {heads} hash heads "
            "((ngram_size - 1) * heads_per_ngram)"
        )
    types = layer_types_of(text)
    for layer in text["ple_layer_ids"]:
        if layer > len(types) or types[layer - 1] != LINEAR:
            raise ValueError(
                f"text_config.ple_layer_ids has layer {layer} (counted from 1), expected layers with linear attention "
                f"of the {len(types)} layers"
            )
    if eos_of(text) is None:
        raise ValueError(
            "the configuration lacks the field text_config.eos_token_id, expected a token id: the n-gram embedding "
            "separates documents by this token"
        )
    parts = text_field(text, "split_ngram_parts")
    for index in range(len(ple_layers_of(text))):
        if (rows := sum(ngram_table_rows(text, index))) % parts:
            raise ValueError(
                f"text_config.split_ngram_parts is {parts}, expected a divisor of the {rows} rows of the n-gram table"
            )


def eos_of(text: Mapping[str, Any]) -> int | None:
    """Return `eos_token_id`. If it is a list, return its first entry, as transformers does."""
    eos = text.get("eos_token_id")
    return eos[0] if isinstance(eos, list | tuple) and eos else eos


def text_field(text: Mapping[str, Any], name: str) -> int:
    """Return a field of the text model, or its default if it is missing or null."""
    value = text.get(name)
    return {**RESIDUAL_FIELDS, **NGRAM_FIELDS, "seed": SEED}[name] if value is None else value


def ngram_heads(text: Mapping[str, Any]) -> int:
    """Return the number of hash heads: `heads_per_ngram` for each length of n-grams from 2 to `ngram_size`."""
    return (text_field(text, "ngram_size") - 1) * text_field(text, "heads_per_ngram")


def ngram_table_rows(text: Mapping[str, Any], index: int) -> tuple[int, ...]:
    """Return the number of n-gram table rows of each hash head, for a layer by its index among `ple_layer_ids`."""
    base, multiple = (text_field(text, name) for name in ("ngram_vocab_size_base", _TABLE_MULTIPLE))
    return table_rows(base, ngram_heads(text), index, multiple)


def ple_layers_of(text: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the indices of the layers with an n-gram embedding, counted from 0. Files count from 1."""
    return tuple(layer - 1 for layer in sorted(set(text.get("ple_layer_ids") or ())))


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Return the dimensions that the weight table uses, from a `config.json`. Raise KeyError for a missing field."""
    config = _as_hybrid(config)
    return add_dimensions(hybrid_config.dimensions_of(config, FAMILY_NAME), config["text_config"])


def add_dimensions(shared: Dimensions, text: Mapping[str, Any]) -> Dimensions:
    """Return `shared`, the dimensions of a hybrid model, with the sizes that only `qwen4_exp` has."""
    streams, hidden = text_field(text, "hc_count"), shared["hidden"]
    layers, heads = ple_layers_of(text), ngram_heads(text)
    embedded = text.get("ple_embed_dim") or hidden
    sizes = {
        "streams": streams,
        "streams_hidden": streams * hidden,
        "lowrank": text_field(text, "hc_lowrank"),
        "index_dim": text.get("indexer_head_dim") or 0,
        "index_qk": ((text.get("indexer_n_heads") or 0) + 1) * (text.get("indexer_head_dim") or 0),
        "index_budget": text.get("indexer_budget") or 0,
        "index_block": text.get("indexer_compress_ratio") or 1,
        "ple": int(bool(layers)),
        "ple_dim": embedded,
        "ple_conv": text_field(text, "ple_conv_kernel_size"),
        "ngram_dim": embedded // heads,
        "ngram_parts": text_field(text, "split_ngram_parts"),
    }
    indices = {"ple_layers": layers, "ngram_heads": range(heads)}
    # Number of n-gram table rows of each hash head, layer by layer.
    indices["ngram_rows"] = tuple(rows for index in range(len(layers)) for rows in ngram_table_rows(text, index))
    return replace(shared, sizes={**shared.sizes, **sizes}, indices={**shared.indices, **indices})


def constants_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the integer tensors of a checkpoint that follow from its `config.json`: the constants of the hashes."""
    text, constants = config["text_config"], {}
    base, heads = text_field(text, "ngram_vocab_size_base"), ngram_heads(text)
    for index, layer in enumerate(ple_layers_of(text)):
        prefix = f"model.language_model.layers.{layer}.ple.ple_embedding."
        sizes, seed = head_sizes(base, heads, index), text_field(text, "seed")
        constants[f"{prefix}layer_multipliers"] = multipliers(
            text["vocab_size"], text_field(text, "ngram_size"), index, seed
        )
        constants[f"{prefix}ngram_heads_vocab_sizes"] = sizes
        constants[f"{prefix}ngram_heads_offsets"] = tuple(accumulate(sizes[:-1], initial=0))
    return constants


_IDENTITY = (*RESIDUAL_FIELDS, *INDEXER_FIELDS, *NGRAM_FIELDS, "ple_embed_dim")
_SECTION = "text_config."


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` that are equal for the same model, with defaults filled in."""
    text = config["text_config"]
    fields = hybrid_config.fields_of(_as_hybrid(config))
    fields |= {_SECTION + name: text_field(text, name) for name in RESIDUAL_FIELDS}
    fields |= {_SECTION + name: text.get(name) for name in INDEXER_FIELDS}
    fields |= {
        _SECTION + "ple_layer_ids": [layer + 1 for layer in ple_layers_of(text)],
        _SECTION + "output_gate_type": text.get("output_gate_type") or "silu",
    }
    if ple_layers_of(text):
        fields |= {_SECTION + name: text_field(text, name) for name in NGRAM_FIELDS if name != "split_ngram_parts"}
        fields[_SECTION + "ple_embed_dim"] = text.get("ple_embed_dim") or text["hidden_size"]
        fields[_SECTION + "seed"] = text_field(text, "seed")
        fields[_SECTION + "eos_token_id"] = eos_of(text)
    return fields


def fields_of_run(model: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `config`, a result of `fields_of`, that the section `model` of a run contains."""
    fields = hybrid_config.fields_of_run(model, config, FAMILY_NAME)
    if "model_type" in fields:
        fields["model_type"] = FAMILY_NAME  # which has experts
    names = {name: _SECTION + name for name in _IDENTITY if _SECTION + name in config}
    names |= {"linear_output_gate": _SECTION + "output_gate_type"}
    if _SECTION + "seed" in config:
        names |= {"ngram_seed": _SECTION + "seed", "eos_token_id": _SECTION + "eos_token_id"}
    fields |= renamed(model, names)
    if isinstance(layers := model.get("ple_layers"), list | tuple):
        fields[_SECTION + "ple_layer_ids"] = [layer + 1 for layer in layers]
    return fields

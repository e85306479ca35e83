"""The numbers of one model: what the weight table's symbols stand for.

What lives here: reading them off a Hugging Face configuration. Standard library only. What may not: parameter names
(`models/qwen3_vl/table.py`), whether a configuration is one we honour (`models/qwen3_vl/config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Dimensions:
    """The numbers of one model that the table's symbols stand for; `dimensions[name]` is one of the sizes.

    Attributes:
        sizes: by name, those in the rows' shapes, conditions (0 or 1) and counts of heads.
        indices: by name, the numbers that a `*` takes.
    """

    sizes: Mapping[str, int]
    indices: Mapping[str, Sequence[int]]

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def with_vocab(self, rows: int) -> Dimensions:
        """The same with a vocabulary of so many rows."""
        return Dimensions({**self.sizes, "vocab": rows}, self.indices)


def moe_layers_of(text: Mapping) -> tuple[int, ...]:
    """Which layers of a text configuration have experts. Source: transformers, Qwen3VLMoeTextDecoderLayer."""
    if not experts_of(text):
        return ()
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    return tuple(i for i in range(text["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def experts_of(text: Mapping) -> int:
    """Experts of a MoE layer, in the spelling of the released files or of transformers 5; 0 in a dense model."""
    return text.get("num_experts", text.get("num_local_experts")) or 0


def head_dim_of(text: Mapping) -> int:
    """Dimensions of a head of a text configuration."""
    # What a file without the field means: in transformers the dense model has a default, the other has not.
    head_dim = text.get("head_dim", None if experts_of(text) else 128)
    return head_dim or text["hidden_size"] // text["num_attention_heads"]


def dimensions_of(config: Mapping) -> Dimensions:
    """The numbers that the table's symbols stand for.

    Args:
        config: a Qwen3-VL `config.json` as a mapping (`text_config`, `vision_config`, `tie_word_embeddings`).

    Raises:
        KeyError: the mapping lacks a field; the message names it.
    """
    text, vision = config["text_config"], config["vision_config"]
    head_dim = head_dim_of(text)
    kv_heads = text["num_key_value_heads"] or text["num_attention_heads"]
    moe_layers = moe_layers_of(text)
    moe_ffn = text["moe_intermediate_size"] if moe_layers else 0
    sizes = {
        "vocab": text["vocab_size"],
        "hidden": text["hidden_size"],
        "ffn": text["intermediate_size"],
        "head_dim": head_dim,
        "heads": text["num_attention_heads"],
        "kv_heads": kv_heads,
        "q": text["num_attention_heads"] * head_dim,
        "kv": kv_heads * head_dim,
        "experts": experts_of(text),
        "moe_ffn": moe_ffn,
        "moe_gate_up": 2 * moe_ffn,
        "untied": int(not config.get("tie_word_embeddings", False)),
        **vision_sizes(vision),
    }
    indices = indices_of(
        layers=text["num_hidden_layers"],
        moe_layers=moe_layers,
        experts=experts_of(text),
        vision_layers=vision["depth"],
        deepstack_taps=len(vision["deepstack_visual_indexes"]),
    )
    return Dimensions(sizes, indices)


def vision_sizes(vision: Mapping) -> dict[str, int]:
    """Those of the vision tower, from its configuration alone."""
    return {
        "v_hidden": vision["hidden_size"],
        "v_heads": vision["num_heads"],
        "v_qkv": 3 * vision["hidden_size"],
        "v_ffn": vision["intermediate_size"],
        "v_merged": vision["hidden_size"] * vision["spatial_merge_size"] ** 2,
        "v_positions": vision["num_position_embeddings"],
        "v_channels": vision.get("in_channels", 3),
        "v_patch": vision["patch_size"],
        "v_temporal_patch": vision["temporal_patch_size"],
    }


def indices_of(
    *, layers: int, moe_layers: Sequence[int], experts: int, vision_layers: int, deepstack_taps: int
) -> dict[str, Sequence[int]]:
    """`Dimensions.indices` of a model with these counts, whose `moe_layers` have experts and whose others have not."""
    return {
        "text_layers": range(layers),
        "dense_layers": tuple(i for i in range(layers) if i not in moe_layers),
        "moe_layers": moe_layers,
        "experts": range(experts),
        "vision_layers": range(vision_layers),
        "deepstack_taps": range(deepstack_taps),
    }

"""Dimensions of a Qwen3-VL model, read from its Hugging Face configuration.

What lives here: reading them, in every format of the configuration. Standard library only. What may not: parameter
names (`table.py`), whether a configuration is supported (`config_checks.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from qwen3vl_bridge.models.config.fields import experts_of
from qwen3vl_bridge.weights.dimensions import Dimensions, indices_of, text_sizes, vision_sizes

FAMILY = "qwen3_vl"


def moe_layers_of(text: Mapping) -> tuple[int, ...]:
    """Indices of the layers with experts of a text configuration. Source: transformers, Qwen3VLMoeTextDecoderLayer."""
    if not experts_of(text):
        return ()
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    return tuple(i for i in range(text["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0)


def head_dim_of(text: Mapping) -> int:
    """Head dimension of a text configuration."""
    # Default for files without the field: in transformers only the dense model has one.
    head_dim = text.get("head_dim", None if experts_of(text) else 128)
    return head_dim or text["hidden_size"] // text["num_attention_heads"]


def dimensions_of(config: Mapping) -> Dimensions:
    """Values of the weight table's symbols.

    Args:
        config: a Qwen3-VL `config.json` as a mapping (`text_config`, `vision_config`, `tie_word_embeddings`).

    Raises:
        KeyError: a field is missing; the message names it.
    """
    text, vision = config["text_config"], config["vision_config"]
    moe_layers = moe_layers_of(text)
    sizes = text_sizes(
        vocab=text["vocab_size"],
        hidden=text["hidden_size"],
        ffn=text["intermediate_size"],
        heads=text["num_attention_heads"],
        kv_heads=text["num_key_value_heads"] or text["num_attention_heads"],
        head_dim=head_dim_of(text),
        untied=not config.get("tie_word_embeddings", False),
        experts=experts_of(text),
        chosen_experts=text["num_experts_per_tok"] if moe_layers else 0,
        moe_ffn=text["moe_intermediate_size"] if moe_layers else 0,
    )
    indices = indices_of(
        layers=text["num_hidden_layers"],
        moe_layers=moe_layers,
        experts=experts_of(text),
        vision_layers=vision["depth"],
        tapped_layers=vision["deepstack_visual_indexes"],
    )
    return Dimensions(sizes | vision_sizes(vision), indices, FAMILY)

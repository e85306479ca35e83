"""Names of the same weights in megatron-core and transformers, for all families."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.rows import Row

OUTPUT_LAYER = "language_model.output_layer"
# Megatron-Bridge's names of an adapter's parameters: `layer`, MARK, and one of the three.
MARK = ".adapter."
IN, OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"

# If a layer spec has no fused norm-and-linear module, its norms are separate modules; if it has no grouped experts,
# each expert is.
_LOCAL_NAMES = (
    (r"self_attention\.(linear_qkv|in_proj)\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+|\*)", r"mlp.experts.local_experts.\2.\1.weight"),
)


def local_name(name: str) -> str:
    """The local layer spec's name of a parameter given with Transformer Engine's name."""
    for pattern, instead in _LOCAL_NAMES:
        name = re.sub(pattern, instead, name)
    return name


_ONE_EXPERT = re.compile(r"(?<=\.mlp\.experts)\.local_experts\.\d+(?=\.)")


def is_of_experts(layer: str) -> bool:
    """Whether a linear layer, by its name in either layer spec, is of experts."""
    return ".mlp.experts." in layer


def is_of_mtp(name: str) -> bool:
    """Whether a Megatron module or parameter is of multi-token prediction."""
    return ".mtp." in name


def shared_name(layer: str) -> str:
    """A linear layer's name as shared by all experts of its layer; any other layer's own name."""
    return _ONE_EXPERT.sub("", layer)


# Indices that megatron-core's own format turns into dimensions of a tensor.
_KINDS_OF_TEXT_LAYERS = ("dense_layers", "moe_layers", "linear_layers", "full_layers")
_STACKED: Mapping[str, str] = dict.fromkeys(_KINDS_OF_TEXT_LAYERS, "text_layers")
# They stay in the name if layers of one stack differ, like the layers of a model with dense and MoE layers.
NAMED_IF_MIXED = ("text_layers", *_KINDS_OF_TEXT_LAYERS)


def stacked_name(
    row: Row, dimensions: Dimensions, named: Collection[str] = (), *, local: bool = False
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Name in megatron-core's own format, `torch_dist`, of the tensor that an expanded row is a part of.

    Source: megatron-core 0.19, `sharded_state_dict` of TransformerBlock, SequentialMLP and TEGroupedMLP.

    Args:
        row: an expanded row.
        dimensions: from `dimensions_of`.
        named: indices that stay in the name.
        local: whether it was saved with megatron-core's own local layer spec. That renames norms as if they were all
            fused, because the norm before experts is in no spec; ours does not rename that one.

    Returns:
        The name, and for each dimension in front of the parameter's own: the row's index in it, and its size.
    """
    name = re.sub(r"mlp\.experts\.(local_experts\.)?", "mlp.experts.experts.", row.pattern)
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # its earlier name in megatron-core
    name = name.replace("weight*", "weight.*")
    if local:
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    stacked = []
    for index, number in zip(row.indices, row.position, strict=True):
        if index in named:
            name = name.replace("*", str(number), 1)
        else:
            name = name.replace(".*", "", 1)
            stacked.append((number, len(dimensions.indices[_STACKED.get(index, index)])))
    return name, tuple(stacked)

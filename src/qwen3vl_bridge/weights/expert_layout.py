"""Formats of experts in a Hugging Face checkpoint: in one tensor, in either orientation, or one by one.

Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.rows import Row, hf_shapes


class ExpertLayout(Enum):
    """Format of the experts of a layer in a Hugging Face checkpoint."""

    INPUT_MAJOR = "packed [experts, in, out]"  # the released checkpoints
    OUTPUT_MAJOR = "packed [experts, out, in]"  # a model saved by transformers 5
    PER_EXPERT = "one tensor per expert"
    OUTPUT_MAJOR_MTP_PER_EXPERT = "packed [experts, out, in], one tensor per expert of multi-token prediction"


def expert_layout_of(
    table: Callable[[ExpertLayout], Sequence[Row]], shapes: Mapping[str, Sequence[int]], dimensions: Dimensions
) -> ExpertLayout:
    """The format of a checkpoint's experts, from the shapes of one layer's tensors.

    No model is ambiguous: if one tensor's two orientations have the same shape, the other's have not.

    Args:
        table: the rows of a checkpoint in a given format.
        shapes: of the checkpoint's tensors, by Hugging Face name. Only those of the first MoE layer and of multi-token
            prediction are read.
        dimensions: of a model with MoE layers.

    Raises:
        ValueError: an unknown format.
    """
    layer = dimensions.indices["moe_layers"][0]
    names: list[str] = []
    for layout in ExpertLayout:
        expected: dict[str, tuple[int, ...]] = {}
        for row in table(layout):
            if "experts" not in row.indices or (row.condition is not None and not dimensions[row.condition]):
                continue
            for expert in dimensions.indices["experts"]:
                one = row.at(*(expert if index == "experts" else layer for index in row.indices))
                expected.update(zip(one.hf, hf_shapes(one, dimensions), strict=True))
        if all(tuple(shapes.get(name, ())) == shape for name, shape in expected.items()):
            return layout
        names += expected
    prefix = names[0].rpartition(".")[0] + "."  # of a packed tensor
    found = sorted((name, list(shape)) for name, shape in shapes.items() if name.startswith(prefix))
    raise ValueError(
        f"experts of layer {layer}: found {found[:4] or 'no tensors'}, expected {dimensions['experts']} experts of "
        f"{dimensions['hidden']} x {dimensions['moe_ffn']}, {' or '.join(layout.value for layout in ExpertLayout)}"
    )

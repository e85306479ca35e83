"""Which ranks hold which rows of a tensor, for given parallel sizes.

Correctness does not depend on this being exact. A rank reads all chunks that contain a part of what it holds; if they
are cut elsewhere than ranks are, it reads more than it keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import Shape
from qwen3vl_bridge.checkpoint.topology import Owner, Part, Topology
from qwen3vl_bridge.weights.rows import Dimensions, Row

# Tensor-parallel ranks split the rows of the first, and the columns of the second. All others are assumed to be whole
# on each.
_BY_ROWS = re.compile(r"\.(linear_(qkv|fc1)\.(weight|bias)|(word_embeddings|output_layer|in_proj|conv1d)\.weight)")
_BY_COLUMNS = re.compile(r"\.(linear_(proj|fc2)|out_proj)\.weight")
_TEXT_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers")
_LAST_STAGE = ("language_model.decoder.final_layernorm.", "language_model.output_layer.", "language_model.mtp.")

# By a tensor's name, then by the indices in its leading dimensions: its parts, in order.
Holders = Mapping[str, Mapping[Shape, Sequence[Part]]]


def holders(rows: Collection[Row], layout: FsdpDtensor | TorchDist, topology: Topology) -> Holders:
    """The rows that ranks hold.

    Args:
        rows: the weight table, expanded for the model.
        layout: the format.
        topology: sizes that suit the model.

    Returns:
        Parts of every tensor; empty if one rank reads each as a whole. torch_dist's ranks read gate and up projection
        separately, even a single rank.
    """
    if topology.ranks == 1 and isinstance(layout, FsdpDtensor):
        return {}
    found: dict[str, dict[Shape, list[Part]]] = {}
    parts = _in_units(rows, layout, topology) if isinstance(layout, FsdpDtensor) else _in_stages(rows, layout, topology)
    for name, index, part in parts:
        found.setdefault(name, {}).setdefault(index, []).append(part)
    for of_tensor in found.values():
        for of_index in of_tensor.values():
            of_index.sort()
    return found


class _Parameter(NamedTuple):
    """A parameter of a tensor-parallel rank: the tensors in which it is stored, concatenated, and its part of each."""

    tensors: tuple[tuple[str, int], ...]  # names, and rows of the rank's part
    columns: int
    copies: int  # tensor-parallel ranks that hold rows of their own

    @property
    def name(self) -> str:
        return self.tensors[0][0]

    @property
    def numel(self) -> int:
        return sum(rows for _, rows in self.tensors) * self.columns


def _in_units(rows: Collection[Row], layout: FsdpDtensor, topology: Topology) -> Iterator[tuple[str, Shape, Part]]:
    """A unit of Megatron-FSDP is a layer without its experts; all parameters outside of layers are one too.

    Source: megatron-core 0.19, `_get_parameter_groups` of Megatron-FSDP's `param_and_grad_buffer.py`.
    """
    units: dict[tuple[str, int, bool, int], list[_Parameter]] = {}
    for row in rows:
        of_experts, tensors = "experts" in row.indices, layout.tensors(row)
        tp, shape = topology.expert_tp if of_experts else topology.tp, next(iter(tensors.values()))
        copies = tp if _BY_ROWS.search(row.megatron) else 1
        columns = math.prod(shape[1:]) // (tp if _BY_COLUMNS.search(row.megatron) else 1)
        in_layer = row.indices[:1] and row.indices[0].endswith("layers")
        tower, layer = (row.megatron.partition(".")[0], row.position[0]) if in_layer else ("", 0)
        key = (tower, layer, of_experts, _expert_group(row, layout.dimensions, topology))
        mine = tuple((name, shape[0] // copies) for name, shape in tensors.items())
        units.setdefault(key, []).append(_Parameter(mine, columns, copies))
    for (_, _, of_experts, group), parameters in units.items():
        ranks = topology.ranks // (topology.ep * topology.expert_tp if of_experts else topology.tp)
        yield from _shards(parameters, ranks, (int(of_experts), group))


def _shards(parameters: Sequence[_Parameter], ranks: int, owner: Owner) -> Iterator[tuple[str, Shape, Part]]:
    """Parameters of a unit are concatenated, the widest first, and cut into equal parts.

    Source: megatron-core 0.19, `build_data_parallel_buffer_index`. The parts consist of whole rows of all of them.
    """
    # Equally wide ones are in the module's order: attention's output layer comes first, the last merger after the
    # others.
    ordered = sorted(parameters, key=lambda one: (-one.columns, "linear_proj" not in one.name, ".merger." in one.name))
    step = 1
    for one in ordered:
        step = math.lcm(step, one.columns) if one.numel >= step else step
    starts, end = {}, 0
    for small in (False, True):
        for one in ordered:
            if (one.numel < step) == small:
                starts[one.name] = end
                end += one.numel if small else math.ceil(one.numel / step) * step
    share = math.ceil(end / (ranks * step)) * step
    for one in ordered:
        start = starts[one.name]
        for name, rows in one.tensors:
            end = start + rows * one.columns
            for shard in range(start // share, (end - 1) // share + 1):
                row = max(shard * share - start, 0) // one.columns
                for copy in range(one.copies):
                    yield name, (), Part(copy * rows + row, (*owner, shard, copy))
            start = end


def _in_stages(rows: Collection[Row], layout: TorchDist, topology: Topology) -> Iterator[tuple[str, Shape, Part]]:
    """A pipeline stage has consecutive layers; the vision tower is on the first."""
    layers = len(layout.dimensions.indices["text_layers"]) // topology.pp
    for row in rows:
        (_, stacked), tensors, of_experts = layout.name(row), layout.tensors(row), "experts" in row.indices
        stage = row.position[0] // layers if row.indices[:1] and row.indices[0] in _TEXT_LAYERS else 0
        stage = topology.pp - 1 if row.megatron.startswith(_LAST_STAGE) else stage
        group = _expert_group(row, layout.dimensions, topology)
        # Gate and up projection are concatenated, and each rank has its rows of both.
        tp = topology.expert_tp if of_experts else topology.tp
        halves, copies = len(row.stored) // len(tensors), tp if _BY_ROWS.search(row.megatron) else 1
        for name, shape in tensors.items():
            share = shape[len(stacked)] // (halves * copies)
            for part in range(halves * copies):
                owner = (stage, int(of_experts), group, part % copies)
                yield name, tuple(number for number, _ in stacked), Part(part * share, owner)


def _expert_group(row: Row, dimensions: Dimensions, topology: Topology) -> int:
    """Index of the expert-parallel rank that has an expert."""
    return row.expert * topology.ep // dimensions["experts"] if "experts" in row.indices else 0

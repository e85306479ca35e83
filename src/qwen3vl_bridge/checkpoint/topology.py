"""Parallel sizes for which a checkpoint is laid out, and which ranks then hold which rows of a tensor.

A written checkpoint can be loaded with any topology. But a loader reads every chunk of which it needs a part as a
whole, so chunks are small, and cut at rank boundaries. Correctness does not depend on these being exact: if chunks are
cut elsewhere than ranks are, a rank reads more than it keeps.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, TorchDist
from qwen3vl_bridge.checkpoint.formats.tensors import Shape, TensorSpec
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.models.divisibility import indivisible
from qwen3vl_bridge.weights.rows import Dimensions, WeightRow

# Minimum size of chunks. In a small model each of many ranks has less of a layer, and a separate item for each would
# take longer to find than to read.
_LEAST_BYTES = 1 << 20

# Identifies ranks, or groups of them; equal values have more of the same rows.
Owner = tuple[int, ...]


class OwnedRows(NamedTuple):
    """Rows of a tensor from `first` on, up to the next part."""

    first: int
    owner: Owner


@dataclass(frozen=True)
class Topology:
    """Parallel sizes, and the maximum size of a chunk.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size; None for `tp`.
        world_size: number of training processes; None for the minimum of the other sizes.
        chunk_bytes: maximum size of a chunk, unless a single row is larger.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    world_size: int | None = None
    chunk_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and size < 1:
                raise CheckpointError(f"--{name.replace('_', '-')} is {size}, expected 1 or more")

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def ranks(self) -> int:
        """Number of training processes."""
        return math.lcm(*self._products().values()) if self.world_size is None else self.world_size

    def _products(self) -> dict[str, int]:
        """The divisors of the number of processes, as text."""
        products = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:
            products["etp * ep * pp"] = self.expert_tp * self.ep * self.pp
        return products

    def check(self, dimensions: Dimensions, *, stages: bool) -> None:
        """Raise a CheckpointError if a model cannot be split this way; its "vocab" includes padding.

        `stages` is whether the format has pipeline stages.
        """
        if self.pp > 1 and not stages:
            raise CheckpointError(f"--pp is {self.pp}, expected 1: an fsdp_dtensor checkpoint has no pipeline stages")
        if not dimensions.indices["moe_layers"] and (self.ep > 1 or (self.etp or 1) > 1):
            name, size = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
            raise CheckpointError(f"--{name} is {size}, expected 1: a dense model has no experts to distribute")
        shares = indivisible(dimensions, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.expert_tp)
        for setting, size, split, ranks, either in shares:
            option = "tp, which --etp follows," if split == "etp" and self.etp is None else split.split(" of ")[0]
            divisor = "multiple or divisor" if either else "divisor"
            raise CheckpointError(f"--{option} is {ranks}, expected a {divisor} of {setting}, which is {size}")
        layers = len(dimensions.indices["text_layers"])
        if layers % self.pp:
            raise CheckpointError(f"--pp is {self.pp}, expected a divisor of the {layers} text layers")
        for name, product in self._products().items():
            if self.ranks % product:
                raise CheckpointError(
                    f"--world-size is {self.world_size}, expected a multiple of {name}, which is {product}"
                )

    def chunks(
        self, spec: TensorSpec, leading: int = 0, parts: Mapping[Shape, Sequence[OwnedRows]] | None = None
    ) -> Iterator[tuple[Owner, Shape, Shape]]:
        """Cut a tensor into boxes that are consecutive in memory.

        Args:
            spec: the tensor.
            leading: number of its leading dimensions that count layers or experts; each gets its own boxes.
            parts: rows of different ranks, by the indices in the leading dimensions; None for one part.

        Yields:
            Owner of a box's first row; offsets and sizes of the box, in order.
        """
        counts, shape = spec.shape[:leading], spec.shape[leading:]
        rows, nbytes = shape[0] if shape else 1, spec.nbytes // max(math.prod(counts), 1)
        for index in itertools.product(*map(range, counts)):
            held = (parts or {}).get(index, (OwnedRows(0, ()),))
            for start, count, owner in self._rows(rows, nbytes, held):
                offsets = (start, *(0 for _ in shape[1:])) if shape else ()
                sizes = (count, *shape[1:]) if shape else ()
                yield owner, (*index, *offsets), (*(1 for _ in counts), *sizes)

    def _rows(self, rows: int, nbytes: int, held: Sequence[OwnedRows]) -> Iterator[tuple[int, int, Owner]]:
        """First row, number of rows and owner of each box."""
        least = min(_LEAST_BYTES, self.chunk_bytes) * rows / max(nbytes, 1)
        most = max(self.chunk_bytes * rows // max(nbytes, 1), 1)
        first, owner = 0, held[0].owner
        for part in (*held[1:], OwnedRows(rows, ())):
            if part.first < rows and (part.first - first < least or rows - part.first < least):
                continue
            segments = math.ceil((part.first - first) / most)
            step = math.ceil((part.first - first) / max(segments, 1))
            for start in range(first, part.first, max(step, 1)):
                yield start, min(step, part.first - start), owner
            first, owner = part.first, part.owner


# Tensor-parallel ranks split the rows of the first, and the columns of the second. All others are assumed to be whole
# on each.
_BY_ROWS = re.compile(r"\.(linear_(qkv|fc1)\.(weight|bias)|(word_embeddings|output_layer|in_proj|conv1d)\.weight)")
_BY_COLUMNS = re.compile(r"\.(linear_(proj|fc2)|out_proj)\.weight")
_TEXT_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers")
_LAST_STAGE = ("language_model.decoder.final_layernorm.", "language_model.output_layer.", "language_model.mtp.")

# By a tensor's name, then by the indices in its leading dimensions: its parts, in order.
Holders = Mapping[str, Mapping[Shape, Sequence[OwnedRows]]]


def holders(rows: Collection[WeightRow], layout: FsdpDtensor | TorchDist, topology: Topology) -> Holders:
    """The rows that ranks hold, of every tensor; nothing if one rank reads each as a whole.

    torch_dist's ranks read gate and up projection separately, even a single rank.
    """
    if topology.ranks == 1 and isinstance(layout, FsdpDtensor):
        return {}
    found: dict[str, dict[Shape, list[OwnedRows]]] = {}
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


def _in_units(
    rows: Collection[WeightRow], layout: FsdpDtensor, topology: Topology
) -> Iterator[tuple[str, Shape, OwnedRows]]:
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


def _shards(parameters: Sequence[_Parameter], ranks: int, owner: Owner) -> Iterator[tuple[str, Shape, OwnedRows]]:
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
                    yield name, (), OwnedRows(copy * rows + row, (*owner, shard, copy))
            start = end


def _in_stages(
    rows: Collection[WeightRow], layout: TorchDist, topology: Topology
) -> Iterator[tuple[str, Shape, OwnedRows]]:
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
                yield name, tuple(number for number, _ in stacked), OwnedRows(part * share, owner)


def _expert_group(row: WeightRow, dimensions: Dimensions, topology: Topology) -> int:
    """Index of the expert-parallel rank that has an expert."""
    return row.expert * topology.ep // dimensions["experts"] if "experts" in row.indices else 0

"""Find where each checkpoint format stores the elements of a weight, and which training ranks read them.

A `TensorLayout` lists the tensors of a format, and the slices of them that make up a Megatron parameter. All layouts
list the elements of a parameter in its row-major order.

A written checkpoint can be loaded with any parallel layout. But a loader reads complete chunks, even if its rank needs
only a part of a chunk. So `Topology` splits tensors into small chunks that end where the shards of training ranks end.
Otherwise a rank reads more data than it needs; the loaded values are the same.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from qwen3vl_bridge.checkpoint.formats.tensors import Shape, TensorSpec
from qwen3vl_bridge.config.divisibility import indivisible_sizes
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.weights.rows import (
    NAMED_IF_MIXED,
    Dimensions,
    PackedExpert,
    TensorSlice,
    WeightRow,
    local_name,
    stacked_name,
    stored_sizes,
)

# Layer specs. Their parameter names differ where one fuses a norm with a linear layer, or groups experts.
TRANSFORMER_ENGINE = "transformer_engine"
LOCAL = "local"


@dataclass(frozen=True)
class TensorLayout:
    """Base class: where a checkpoint format stores the Megatron parameters of a model.

    Methods take a `row`, an entry of the expanded weight table. It describes one Megatron parameter.
    """

    dimensions: Dimensions
    # Whether tensors of the vocabulary may have padding rows. `dimensions["vocab"]` then includes them.
    pads_vocabulary: ClassVar[bool] = True

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """Return a dict from name to shape of the tensors that store `row`. They may also store other parameters."""
        raise NotImplementedError

    def slices(self, row: WeightRow) -> Iterator[TensorSlice]:
        """Yield the slices of stored tensors that make up the Megatron parameter of `row`, in order."""
        for name, shape in self.tensors(row).items():
            yield TensorSlice(name, 0, math.prod(shape))

    def leading(self, row: WeightRow) -> int:
        """Return how many leading dimensions of the tensors that store `row` index layers or experts."""
        del row
        return 0


@dataclass(frozen=True)
class HuggingFace(TensorLayout):
    """Layout of a Hugging Face model: safetensors with the names and shapes of transformers."""

    pads_vocabulary: ClassVar[bool] = False

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """Return a dict from transformers' tensor names to shapes for `row`."""
        return dict(zip(row.hf, row.hf_shapes(self.dimensions), strict=True))

    def leading(self, row: WeightRow) -> int:
        """Return 1 if the first dimension of the tensor that stores `row` indexes experts, else 0."""
        return int(isinstance(row, PackedExpert))

    def slices(self, row: WeightRow) -> Iterator[TensorSlice]:
        """Yield the slices of Hugging Face tensors that make up the Megatron parameter of `row`, in order."""
        return row.hf_slices(self.dimensions)


@dataclass(frozen=True)
class FsdpDtensor(TensorLayout):
    """Layout of a Megatron-FSDP checkpoint: one tensor per parameter, gate and up projections separate."""

    naming: str = TRANSFORMER_ENGINE

    def __post_init__(self) -> None:
        if self.naming not in (TRANSFORMER_ENGINE, LOCAL):
            raise CheckpointError(f"naming is {self.naming!r}, expected {TRANSFORMER_ENGINE!r} or {LOCAL!r}")

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """Return a dict from name to shape of the tensors that store `row`: one for each projection."""
        height, *width = row.megatron_shape(self.dimensions)
        names = (local_name(name) if self.naming == LOCAL else name for name in row.stored_names)
        heights = stored_sizes(row, height, self.dimensions)
        return {name: (size, *width) for name, size in zip(names, heights, strict=True)}


@dataclass(frozen=True)
class TorchDist(TensorLayout):
    """Layout of megatron-core's torch_dist format: one tensor stacks the same parameter of all layers and experts."""

    named: frozenset[str] = frozenset()  # indices that are not stacked but stay in the names of tensors
    local: bool = False  # whether parameters have the names of megatron-core's own local layer spec

    @classmethod
    def for_model(cls, dimensions: Dimensions) -> TorchDist:
        """Return the layout in which megatron-core saves a model. Layers of different types are not stacked."""
        indices = dimensions.indices
        mixed = (bool(indices["dense_layers"]) and bool(indices["moe_layers"])) or bool(indices.get("linear_layers"))
        return cls(dimensions, frozenset(NAMED_IF_MIXED) if mixed else frozenset())

    @classmethod
    def from_names(cls, rows: Collection[WeightRow], dimensions: Dimensions, names: Collection[str]) -> TorchDist:
        """Return the layout of a checkpoint that has the tensor names `names`.

        megatron-core stacks the layers of a component in one tensor, or stores one tensor per layer with its index in
        the name. The names show which.
        """
        stacks = (frozenset(NAMED_IF_MIXED), frozenset({"vision_layers"}), frozenset({"deepstack_mergers"}))
        named: frozenset[str] = frozenset()
        for stack in stacks:
            first = next((row for row in rows if stack.intersection(row.indices)), None)
            if first is not None and stacked_name(first, dimensions, stack)[0] in names:
                named |= stack
        layouts = [cls(dimensions, named, local) for local in (False, True)]
        return max(layouts, key=lambda layout: sum(layout.name(row)[0] in names for row in rows))

    def name(self, row: WeightRow) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return the name of the tensor that stores `row`, and (index, size) for each of its stacked dimensions."""
        return stacked_name(row, self.dimensions, self.named, local=self.local)

    def tensors(self, row: WeightRow) -> dict[str, Shape]:
        """Return a dict from name to shape of the tensors that store `row`: one for each of its sections."""
        name, stacked = self.name(row)
        height, *width = row.megatron_shape(self.dimensions)
        counts = tuple(count for _, count in stacked)
        return {name + suffix: (*counts, section, *width) for suffix, section in self._sections(row, height)}

    def _sections(self, row: WeightRow, height: int) -> list[tuple[str, int]]:
        """Return (suffix of the tensor name, size along dimension 0) for each section of a parameter.

        `height` is the size of the parameter along dimension 0.
        """
        return [(f".{name}", self.dimensions[size]) for name, size in row.sections] or [("", height)]

    def leading(self, row: WeightRow) -> int:
        """Return how many leading dimensions of the tensors that store `row` are stacked layers or experts."""
        return len(self.name(row)[1])

    def slices(self, row: WeightRow) -> Iterator[TensorSlice]:
        """Yield the slices of the stacked tensors that make up the Megatron parameter of `row`, in order."""
        name, stacked = self.name(row)
        index = 0
        for number, count in stacked:
            index = index * count + number
        height, *width = row.megatron_shape(self.dimensions)
        for suffix, section in self._sections(row, height):
            size = section * math.prod(width)
            yield TensorSlice(name + suffix, index * size, size)


# In a small model each rank has little of a layer. A separate item for it would take longer to find than to read.
_MIN_CHUNK_BYTES = 1 << 20

# Identifies a rank or a group of ranks. Equal owners read the same rows.
Owner = tuple[int, ...]


class OwnedRows(NamedTuple):
    """Consecutive rows (indices in dimension 0) of a tensor that the same ranks read.

    They end where the next `OwnedRows` begins.
    """

    first: int  # index of the first row
    owner: Owner


# tensor name -> indices in the leading dimensions -> all rows of the tensor there, in order
RowOwners = Mapping[str, Mapping[Shape, Sequence[OwnedRows]]]


@dataclass(frozen=True)
class Topology:
    """The parallel layout of a training run, and the maximum size of a chunk.

    Attributes:
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size.
        etp: expert-tensor-parallel size; None for `tp`.
        world_size: number of training processes; None for the minimum that the other sizes allow.
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
        """Return the number of tensor-parallel ranks that share an expert."""
        return self.tp if self.etp is None else self.etp

    @property
    def ranks(self) -> int:
        """Return the number of training processes."""
        return math.lcm(*self._divisors().values()) if self.world_size is None else self.world_size

    def _divisors(self) -> dict[str, int]:
        """Return products of parallel sizes by formula, such as "tp * pp * cp".

        Each product must divide the number of processes.
        """
        products = {"tp * pp * cp": self.tp * self.pp * self.cp}
        if self.ep > 1 or self.etp is not None:
            products["etp * ep * pp"] = self.expert_tp * self.ep * self.pp
        return products

    def check(self, dimensions: Dimensions, *, stages: bool) -> None:
        """Check that a model can be trained with this parallel layout.

        Args:
            dimensions: dimensions of the model; "vocab" includes padding.
            stages: whether the format has pipeline stages.

        Raises:
            CheckpointError: a parallel size does not divide the dimension that it shards.
        """
        if self.pp > 1 and not stages:
            raise CheckpointError(f"--pp is {self.pp}, expected 1: an fsdp_dtensor checkpoint has no pipeline stages")
        if not dimensions.indices["moe_layers"] and (self.ep > 1 or (self.etp or 1) > 1):
            name, size = ("ep", self.ep) if self.ep > 1 else ("etp", self.etp)
            raise CheckpointError(f"--{name} is {size}, expected 1: a dense model has no experts to distribute")
        found = indivisible_sizes(dimensions, tp=self.tp, cp=self.cp, ep=self.ep, etp=self.expert_tp)
        for setting, size, parallelism, ranks, either in found:
            follows_tp = parallelism == "etp" and self.etp is None
            option = "tp, which --etp follows," if follows_tp else parallelism.split(" of ")[0]
            divisor = "multiple or divisor" if either else "divisor"
            raise CheckpointError(f"--{option} is {ranks}, expected a {divisor} of {setting}, which is {size}")
        layers = len(dimensions.indices["text_layers"])
        if layers % self.pp:
            raise CheckpointError(f"--pp is {self.pp}, expected a divisor of the {layers} text layers")
        for name, product in self._divisors().items():
            if self.ranks % product:
                raise CheckpointError(
                    f"--world-size is {self.world_size}, expected a multiple of {name}, which is {product}"
                )

    def split_into_chunks(
        self, spec: TensorSpec, leading: int = 0, owned: Mapping[Shape, Sequence[OwnedRows]] | None = None
    ) -> Iterator[tuple[Owner, Shape, Shape]]:
        """Yield the chunks of a tensor. The elements of each chunk are consecutive in memory.

        Args:
            spec: the tensor.
            leading: number of leading dimensions that index layers or experts. Each index gets its own chunks.
            owned: the rows that ranks read, by the indices in the leading dimensions; None if one rank reads all.

        Yields:
            (owner of the first row of a chunk, offsets of the chunk, sizes of the chunk), in order.
        """
        counts, shape = spec.shape[:leading], spec.shape[leading:]
        height, nbytes = shape[0] if shape else 1, spec.nbytes // max(math.prod(counts), 1)
        least = min(_MIN_CHUNK_BYTES, self.chunk_bytes) * height / max(nbytes, 1)  # in rows of the tensor, as `most`
        most = max(self.chunk_bytes * height // max(nbytes, 1), 1)
        for index in itertools.product(*map(range, counts)):
            parts = (owned or {}).get(index, (OwnedRows(0, ()),))
            first, owner = 0, parts[0].owner
            for part in (*parts[1:], OwnedRows(height, ())):
                # Chunks of few rows are joined with the next part.
                if part.first < height and (part.first - first < least or height - part.first < least):
                    continue
                number = math.ceil((part.first - first) / most)
                step = math.ceil((part.first - first) / max(number, 1))
                for start in range(first, part.first, max(step, 1)):
                    count = min(step, part.first - start)
                    offsets = (start, *(0 for _ in shape[1:])) if shape else ()
                    sizes = (count, *shape[1:]) if shape else ()
                    yield owner, (*index, *offsets), (*(1 for _ in counts), *sizes)
                first, owner = part.first, part.owner


# Tensor parallelism shards these by rows and columns. All other parameters are assumed to be complete on every rank.
_SHARDED_BY_ROWS = re.compile(
    r"\.(linear_(qkv|fc1)\.(weight|bias)|(word_embeddings|output_layer|in_proj|conv1d)\.weight)"
)
_SHARDED_BY_COLUMNS = re.compile(r"\.(linear_(proj|fc2)|out_proj)\.weight")
_TEXT_LAYERS = ("text_layers", "dense_layers", "moe_layers", "linear_layers", "full_layers", "ple_layers")
_LAST_STAGE = ("language_model.decoder.final_layernorm.", "language_model.output_layer.", "language_model.mtp.")


def find_row_owners(rows: Collection[WeightRow], layout: FsdpDtensor | TorchDist, topology: Topology) -> RowOwners:
    """Return the ranks that read each row of each tensor; an empty mapping if one rank reads complete tensors.

    Args:
        rows: the expanded weight table.
        layout: layout of the checkpoint.
        topology: parallel layout of the training run.
    """
    # Ranks of torch_dist read gate and up projection separately, even a single rank.
    if topology.ranks == 1 and isinstance(layout, FsdpDtensor):
        return {}
    found: dict[str, dict[Shape, list[OwnedRows]]] = {}
    assign = _assign_fsdp_rows if isinstance(layout, FsdpDtensor) else _assign_stage_rows
    for name, index, part in assign(rows, layout, topology):  # pyright: ignore[reportArgumentType]
        found.setdefault(name, {}).setdefault(index, []).append(part)
    for by_index in found.values():
        for parts in by_index.values():
            parts.sort()
    return found


class _Parameter(NamedTuple):
    """A parameter of one tensor-parallel rank in Megatron-FSDP."""

    tensors: tuple[tuple[str, int], ...]  # names of the tensors that store it, and height of the rank's shard of each
    columns: int
    shards: int  # number of tensor-parallel ranks with different rows

    @property
    def name(self) -> str:
        return self.tensors[0][0]

    @property
    def numel(self) -> int:
        return sum(height for _, height in self.tensors) * self.columns


def _assign_fsdp_rows(
    rows: Collection[WeightRow], layout: FsdpDtensor, topology: Topology
) -> Iterator[tuple[str, Shape, OwnedRows]]:
    """Yield (tensor name, indices in its leading dimensions, `OwnedRows`) for a run with Megatron-FSDP.

    A unit of Megatron-FSDP is a layer without its experts, the experts of a layer, or all parameters outside of layers.
    Megatron-FSDP concatenates the parameters of a unit, the widest first, and cuts them into equal shards. Shards end
    where rows of parameters end. Source: megatron-core 0.19, `_get_parameter_groups` and
    `build_data_parallel_buffer_index` of Megatron-FSDP's `param_and_grad_buffer.py`.
    """
    units: dict[tuple[str, int, bool, int], list[_Parameter]] = {}
    for row in rows:
        of_experts, tensors = "experts" in row.indices, layout.tensors(row)
        tp, shape = topology.expert_tp if of_experts else topology.tp, next(iter(tensors.values()))
        tp = 1 if row.replicated else tp
        shards = tp if _SHARDED_BY_ROWS.search(row.megatron) else 1
        columns = math.prod(shape[1:]) // (tp if _SHARDED_BY_COLUMNS.search(row.megatron) else 1)
        in_layer = row.indices[:1] and row.indices[0].endswith("layers")
        tower, layer = (row.megatron.partition(".")[0], row.position[0]) if in_layer else ("", 0)
        key = (tower, layer, of_experts, _expert_group(row, layout.dimensions, topology))
        parts = tuple((name, shape[0] // shards) for name, shape in tensors.items())
        units.setdefault(key, []).append(_Parameter(parts, columns, shards))
    for (_, _, of_experts, group), parameters in units.items():
        ranks = topology.ranks // (topology.ep * topology.expert_tp if of_experts else topology.tp)
        # Equally wide parameters are in the module's order: attention's output layer first, the last merger last.
        ordered = sorted(parameters, key=lambda p: (-p.columns, "linear_proj" not in p.name, ".merger." in p.name))
        step = 1
        for parameter in ordered:
            step = math.lcm(step, parameter.columns) if parameter.numel >= step else step
        starts, end = {}, 0
        for small in (False, True):
            for parameter in ordered:
                if (parameter.numel < step) == small:
                    starts[parameter.name] = end
                    end += parameter.numel if small else math.ceil(parameter.numel / step) * step
        shard_size = math.ceil(end / (ranks * step)) * step
        for parameter in ordered:
            start = starts[parameter.name]
            for name, height in parameter.tensors:
                end = start + height * parameter.columns
                for shard in range(start // shard_size, (end - 1) // shard_size + 1):
                    first_row = max(shard * shard_size - start, 0) // parameter.columns
                    for tp_rank in range(parameter.shards):
                        owner = (int(of_experts), group, shard, tp_rank)
                        yield name, (), OwnedRows(tp_rank * height + first_row, owner)
                start = end


def _assign_stage_rows(
    rows: Collection[WeightRow], layout: TorchDist, topology: Topology
) -> Iterator[tuple[str, Shape, OwnedRows]]:
    """Yield (tensor name, indices in its leading dimensions, `OwnedRows`) for a run with pipeline stages.

    A stage has consecutive layers. The first stage also has the vision tower.
    """
    layers = len(layout.dimensions.indices["text_layers"]) // topology.pp
    for row in rows:
        (_, stacked), tensors, of_experts = layout.name(row), layout.tensors(row), "experts" in row.indices
        stage = row.position[0] // layers if row.indices[:1] and row.indices[0] in _TEXT_LAYERS else 0
        stage = topology.pp - 1 if row.megatron.startswith(_LAST_STAGE) else stage
        group = _expert_group(row, layout.dimensions, topology)
        # Gate and up projection are concatenated, and each rank has its rows of both.
        tp = 1 if row.replicated else topology.expert_tp if of_experts else topology.tp
        halves, shards = len(row.stored_names) // len(tensors), tp if _SHARDED_BY_ROWS.search(row.megatron) else 1
        for name, shape in tensors.items():
            height = shape[len(stacked)] // (halves * shards)
            for part in range(halves * shards):
                owner = (stage, int(of_experts), group, part % shards)
                yield name, tuple(number for number, _ in stacked), OwnedRows(part * height, owner)


def _expert_group(row: WeightRow, dimensions: Dimensions, topology: Topology) -> int:
    """Return the index of the group of ranks that reads an expert or a hash head. Other weight-table rows have 0.

    Experts are divided over expert-parallel ranks. The hash heads of an n-gram table are divided over expert-parallel
    and expert-tensor-parallel ranks. If there are more of these ranks than heads, the ranks that share a head are a
    group, and the index is the number of the head.
    """
    if "ngram_heads" in row.indices:
        heads = len(dimensions.indices["ngram_heads"])
        return row.position[row.indices.index("ngram_heads")] * min(topology.ep * topology.expert_tp, heads) // heads
    return row.expert * topology.ep // dimensions["experts"] if "experts" in row.indices else 0

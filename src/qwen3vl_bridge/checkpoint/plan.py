"""What a conversion has to do, worked out from headers alone.

What lives here: the comparison of what is there with what the weight table expects, and the work items: each target
tensor as a concatenation of runs of source tensors. What may not: opening files, torch, names of parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.errors import CheckpointError
from qwen3vl_bridge.checkpoint.proof import check_same, check_weights_dtype, prove
from qwen3vl_bridge.checkpoint.spans import LOCAL, TRANSFORMER_ENGINE, Span, spans, stored_shapes
from qwen3vl_bridge.checkpoint.tensors import Run, Shape, TensorSpec
from qwen3vl_bridge.dimensions import Dimensions
from qwen3vl_bridge.mappings import local_name
from qwen3vl_bridge.weight_rows import Row, expand


@dataclass(frozen=True)
class Task:
    """One target tensor: its elements are the runs' elements in order, cast to its dtype where theirs differs."""

    target: TensorSpec
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Attributes:
        tasks: the work, one item per target tensor; any process may do any of it.
        naming: layer spec whose names the Megatron side uses.
        computed: names of the targets that are cast; the others are copies.
    """

    tasks: tuple[Task, ...]
    naming: str
    computed: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Bytes of all targets."""
        return sum(task.target.nbytes for task in self.tasks)

    @property
    def numel(self) -> int:
        """Elements of all targets."""
        return sum(task.target.numel for task in self.tasks)

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the targets, sorted."""
        return sorted({task.target.dtype for task in self.tasks})


@dataclass(frozen=True)
class Table:
    """The weight table for one model: every tensor of both sides, and where the elements are.

    Attributes:
        hf: shape of each Hugging Face tensor.
        stored: shape of each tensor of an fsdp_dtensor checkpoint.
        spans: all elements, in the order of the table and the Megatron side.
        padded: tensors of both sides whose first dimension is the vocabulary.
    """

    hf: dict[str, Shape]
    stored: dict[str, Shape]
    spans: tuple[Span, ...]
    padded: frozenset[str]


def make_table(rows: tuple[Row, ...], dimensions: Dimensions, naming: str = TRANSFORMER_ENGINE) -> Table:
    """Expand the weight table for a model.

    Args:
        rows: rows of the table, with `*`.
        dimensions: from `dimensions_of`.
        naming: "transformer_engine" or "local".

    Raises:
        CheckpointError: it is neither.
    """
    if naming not in (TRANSFORMER_ENGINE, LOCAL):
        raise CheckpointError(f"naming is {naming!r}, expected {TRANSFORMER_ENGINE!r} or {LOCAL!r}")
    hf: dict[str, Shape] = {}
    stored: dict[str, Shape] = {}
    everything: list[Span] = []
    padded: set[str] = set()
    for row in expand(rows, dimensions):
        here = stored_shapes(row, dimensions, naming)
        hf.update(zip(row.hf, row.numbers(dimensions), strict=True))
        stored.update(here)
        everything += spans(row, dimensions, naming)
        if row.shapes[0][0] == "vocab":
            padded.update(row.hf, here)
    return Table(hf, stored, tuple(everything), frozenset(padded))


def naming_of(rows: tuple[Row, ...], dimensions: Dimensions, names: Collection[str]) -> str:
    """Layer spec whose spelling some Megatron parameter names have: where both spell one alike, Transformer Engine."""
    for row in expand(rows, dimensions):
        if row.megatron not in names and local_name(row.megatron) in names:
            return LOCAL
    return TRANSFORMER_ENGINE


def _grouped(pairs: Iterable[tuple[str, int, Run]]) -> Iterator[tuple[str, tuple[Run, ...]]]:
    """Runs by target, in the order of the targets' elements, neighbours joined."""
    targets: dict[str, list[tuple[int, Run]]] = {}
    for target, start, run in pairs:
        targets.setdefault(target, []).append((start, run))
    for target, runs in targets.items():
        runs.sort()
        joined: list[Run] = []
        for _, run in runs:
            if joined and joined[-1].source == run.source and joined[-1].start + joined[-1].length == run.start:
                joined[-1] = joined[-1]._replace(length=joined[-1].length + run.length)
            else:
                joined.append(run)
        yield target, tuple(joined)


def plan_import(
    rows: tuple[Row, ...],
    dimensions: Dimensions,
    found: Mapping[str, TensorSpec],
    *,
    where: str,
    dtype: str | None = None,
    naming: str = TRANSFORMER_ENGINE,
) -> Plan:
    """Hugging Face tensors to those of an fsdp_dtensor checkpoint.

    Args:
        rows: the weight table.
        dimensions: from `dimensions_of`.
        found: what the Hugging Face folder holds.
        where: that folder, for errors.
        dtype: what to store the weights as; None to leave them as they are.
        naming: layer spec whose names to use.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
    """
    table = make_table(rows, dimensions, naming)
    check_same(found, table.hf, where)
    runs = _grouped((span.stored, span.stored_start, Run(span.hf, span.hf_start, span.length)) for span in table.spans)
    return _finish(runs, found, table.stored, where, dtype, naming)


def plan_export(
    rows: tuple[Row, ...],
    dimensions: Dimensions,
    found: Mapping[str, TensorSpec],
    *,
    where: str,
    dtype: str | None = None,
) -> Plan:
    """Tensors of an fsdp_dtensor checkpoint to Hugging Face ones. Rows beyond the vocabulary are padding and go.

    Args:
        rows: the weight table.
        dimensions: from `dimensions_of`.
        found: the model's tensors in the checkpoint, by Megatron parameter name.
        where: the checkpoint, for errors.
        dtype: what to write the weights as; None to leave them as they are.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
    """
    naming = naming_of(rows, dimensions, found)
    table = make_table(rows, dimensions, naming)
    check_same(found, table.stored, where, may_be_longer=table.padded)
    runs = _grouped((span.hf, span.hf_start, Run(span.stored, span.stored_start, span.length)) for span in table.spans)
    return _finish(runs, found, table.hf, where, dtype, naming, padded=table.padded)


def _finish(
    grouped: Iterator[tuple[str, tuple[Run, ...]]],
    found: Mapping[str, TensorSpec],
    shapes: Mapping[str, Shape],
    where: str,
    dtype: str | None,
    naming: str,
    padded: frozenset[str] = frozenset(),
) -> Plan:
    tasks, computed = [], set()
    for name, runs in grouped:
        sources = [found[run.source] for run in runs]
        target_dtype = check_weights_dtype(name, sources, dtype, where)
        tasks.append(Task(TensorSpec(name, target_dtype, shapes[name]), runs))
        if any(source.dtype != target_dtype for source in sources):
            computed.add(name)
    prove(((task.target, task.runs) for task in tasks), found, shapes, padded)
    return Plan(tuple(tasks), naming, frozenset(computed))

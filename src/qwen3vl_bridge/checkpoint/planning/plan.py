"""What a conversion has to do, worked out from headers alone.

What lives here: the comparison of what is there with what the weight table expects, and the work items: each target
tensor as pieces of source tensors. What may not: opening files, torch, names of parameters, formats
(`checkpoint/formats/layouts.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE, Place, Side
from qwen3vl_bridge.checkpoint.formats.slices import Piece, Pieces, Run, Transposed, Zeros, joined
from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape, TensorSource, TensorSpec
from qwen3vl_bridge.checkpoint.planning.proof import check_same, check_weights_dtype, prove
from qwen3vl_bridge.models.qwen3_vl.table import local_name
from qwen3vl_bridge.weights.rows import Row


@dataclass(frozen=True, slots=True)
class Task:
    """One target tensor.

    Attributes:
        target: what it is.
        pieces: its elements, in order; cast to its dtype where theirs differs.
        leading: how many of its first dimensions count layers or experts.
    """

    target: TensorSpec
    pieces: Pieces
    leading: int = 0


@dataclass(frozen=True)
class Plan:
    """A conversion.

    Attributes:
        tasks: the work, one item per target tensor; any process may do any part of it.
        cast: names of the targets whose dtype is not that of their sources.
        transposed: names of the targets made of transposed matrices. All others are copies.
    """

    tasks: tuple[Task, ...]
    cast: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()

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

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """The targets by name."""
        return {task.target.name: task.target for task in self.tasks}


def naming_of(rows: Iterable[Row], names: Collection[str]) -> str:
    """Layer spec whose spelling some Megatron parameter names have: where both spell one alike, Transformer Engine.

    Args:
        rows: expanded rows.
        names: what a checkpoint holds.
    """
    for row in rows:
        if row.stored[0] not in names and local_name(row.stored[0]) in names:
            return LOCAL
    return TRANSFORMER_ENGINE


def tensors_of(rows: Iterable[Row], side: Side) -> dict[str, Shape]:
    """Every tensor a side has for a model: name -> shape.

    Args:
        rows: expanded rows.
        side: the format.
    """
    return {name: shape for row in rows for name, shape in side.tensors(row).items()}


def leave_unexpected(source: TensorSource, rows: Iterable[Row], side: Side) -> list[str]:
    """Forget the tensors that a model does not call for.

    Args:
        source: what is there; only what is called for stays.
        rows: the weight table, expanded for the model.
        side: format of what is there.

    Returns:
        A line of text for each.
    """
    expected = tensors_of(rows, side)
    unexpected = [spec for name, spec in source.specs.items() if name not in expected]
    for spec in unexpected:
        source.drop(spec.name)
    return [f"{spec.name} {spec.describe()} is no tensor of this model; it was left aside" for spec in unexpected]


def make_plan(
    rows: Collection[Row],
    source: Side,
    target: Side,
    found: Mapping[str, TensorSpec],
    *,
    where: str,
    dtype: str | None = None,
) -> Plan:
    """Plan the way from one side to the other.

    Args:
        rows: the weight table, expanded for the model.
        source: format of what is there. A Megatron one's tensors of the vocabulary may have more rows, which are left
            out; what is in them, `check_vocab_padding` says.
        target: format of what is to be. A Megatron one's tensors of the vocabulary may have more rows, which become
            zeros.
        found: what is there.
        where: the folder, for errors.
        dtype: what to store the weights as; None to leave them as they are.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
    """
    vocabulary = [row for row in rows if row.of_vocabulary]
    padding = (side for side in (source, target) if side.pads_vocabulary)
    padded = {name for side in padding for row in vocabulary for name in side.tensors(row)}
    check_same(found, tensors_of(rows, source), where, may_be_longer=padded)
    shapes = tensors_of(rows, target)
    leading = {name: target.leading(row) for row in rows for name in target.tensors(row)}
    tasks, cast, transposed = [], set(), set()
    for name, pieces in _grouped(_joined_sides(rows, source, target)):
        sources = [found[run.source] for run in _runs(pieces)]
        spec = TensorSpec(name, check_weights_dtype(name, sources, dtype, where), shapes[name])
        tasks.append(Task(spec, Pieces(pieces), leading[name]))
        if any(source.dtype != spec.dtype for source in sources):
            cast.add(name)
        if any(isinstance(piece, Transposed) for piece in pieces):
            transposed.add(name)
    prove(((task.target, task.pieces) for task in tasks), found, shapes, padded)
    return Plan(tuple(tasks), frozenset(cast), frozenset(transposed))


def _runs(pieces: Iterable[Piece]) -> Iterator[Run]:
    for piece in pieces:
        if isinstance(piece, Run):
            yield piece
        elif isinstance(piece, Transposed):
            yield from piece.runs


def _joined_sides(rows: Iterable[Row], source: Side, target: Side) -> Iterator[tuple[str, int, Piece]]:
    """All elements: which target tensor, from which of its elements on, what is there."""
    woven: dict[str, dict[int, tuple[Piece, ...]]] = {}
    for row in rows:
        pieces = Pieces(_read(place) for place in source.places(row))
        position = 0
        for place in target.places(row):
            here = min(place.length, pieces.length - position)
            part = tuple(joined(pieces.cut(position, here)))
            position += place.length
            if place.stride > 1:
                woven.setdefault(place.tensor, {})[place.start] = part
                continue
            if place.columns:
                part = _turned(part, place.columns)
            if here < place.length:
                part += (Zeros(place.length - here),)
            start = place.start
            for piece in part:
                yield place.tensor, start, piece
                start += piece.length
    for tensor, strands in woven.items():
        # One below the other they are a matrix, and lie transposed.
        runs = tuple(run for _, strand in sorted(strands.items()) for run in strand)
        (matrix,) = _turned(runs, sum(run.length for run in runs) // len(strands))
        yield tensor, 0, matrix


def _read(place: Place) -> Piece:
    """What lies at a place, in the order of the Megatron parameter."""
    if place.stride > 1:
        raise AssertionError(f"{place.tensor}: every {place.stride}th element cannot be read, only written")
    run = Run(place.tensor, place.start, place.length)
    if not place.columns:
        return run
    # There it is the transpose of what it is to be, so it has as many columns as that has rows.
    return Transposed((run,), place.length // place.columns, 0, place.length)


def _turned(pieces: tuple[Piece, ...], columns: int) -> tuple[Piece, ...]:
    """The transpose of a matrix of so many columns."""
    first = pieces[0]
    if isinstance(first, Transposed) and first.rows == columns and first.length == first.numel and len(pieces) == 1:
        return first.runs  # both sides have it so
    runs = tuple(piece for piece in pieces if isinstance(piece, Run))
    if len(runs) != len(pieces):
        raise AssertionError("a matrix to be transposed lies transposed, or is padded")
    return (Transposed(runs, columns, 0, sum(run.length for run in runs)),)


def _grouped(pieces: Iterable[tuple[str, int, Piece]]) -> Iterator[tuple[str, tuple[Piece, ...]]]:
    """Pieces by target, in the order of the targets' elements."""
    targets: dict[str, list[tuple[int, Piece]]] = {}
    for target, start, piece in pieces:
        targets.setdefault(target, []).append((start, piece))
    for target, parts in targets.items():
        parts.sort(key=lambda part: part[0])
        yield target, tuple(joined(piece for _, piece in parts))

"""The plan of a conversion, made from only headers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE, ParamSlice, TensorLayout
from qwen3vl_bridge.checkpoint.formats.planned_files import Task
from qwen3vl_bridge.checkpoint.formats.slices import Segment, Segments, Slice, TransposedSlice, Zeros, joined
from qwen3vl_bridge.checkpoint.formats.tensor_specs import Shape, TensorSource, TensorSpec
from qwen3vl_bridge.checkpoint.planning.proof import check_same, check_weights_dtype, prove
from qwen3vl_bridge.weights.rows import Row, local_name


@dataclass(frozen=True)
class Plan:
    """A planned conversion.

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
    """Layer spec of some Megatron parameter names; Transformer Engine's if both specs have the same names.

    Args:
        rows: expanded rows.
        names: those of a checkpoint.
    """
    for row in rows:
        if row.stored[0] not in names and local_name(row.stored[0]) in names:
            return LOCAL
    return TRANSFORMER_ENGINE


def tensors_of(rows: Iterable[Row], layout: TensorLayout) -> dict[str, Shape]:
    """Every tensor that a layout has for a model: name -> shape.

    Args:
        rows: expanded rows.
        layout: the format.
    """
    return {name: shape for row in rows for name, shape in layout.tensors(row).items()}


def leave_unexpected(source: TensorSource, rows: Iterable[Row], layout: TensorLayout) -> list[str]:
    """Remove the tensors that a model does not have.

    Args:
        source: existing tensors; only those of the model are kept.
        rows: the weight table, expanded for the model.
        layout: the source's format.

    Returns:
        A line of text for each.
    """
    expected = tensors_of(rows, layout)
    unexpected = [spec for name, spec in source.specs.items() if name not in expected]
    for spec in unexpected:
        source.drop(spec.name)
    return [f"{spec.name} {spec.describe()} is not a tensor of this model; it was ignored" for spec in unexpected]


def make_plan(
    rows: Collection[Row],
    source: TensorLayout,
    target: TensorLayout,
    found: Mapping[str, TensorSpec],
    *,
    where: str,
    dtype: str | None = None,
    float32_as: str | None = None,
) -> Plan:
    """Plan the conversion from one layout to another.

    Args:
        rows: the weight table, expanded for the model.
        source: format of the source. A Megatron one's tensors of the vocabulary may have more rows, which are left out;
            `check_vocab_padding` checks their contents.
        target: format of the target. A Megatron one's tensors of the vocabulary may have more rows, which become zeros.
        found: the source's tensors.
        where: the folder, for errors.
        dtype: dtype of the result; None to keep their dtypes.
        float32_as: dtype of the rows with `float32` in the result; None for the same as of others.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
    """
    vocabulary = [row for row in rows if row.of_vocabulary]
    padding = (layout for layout in (source, target) if layout.pads_vocabulary)
    padded = {name for layout in padding for row in vocabulary for name in layout.tensors(row)}
    check_same(found, tensors_of(rows, source), where, may_be_longer=padded)
    shapes = tensors_of(rows, target)
    leading = {name: target.leading(row) for row in rows for name in target.tensors(row)}
    in_float32 = {name for row in rows if row.float32 for name in target.tensors(row)}
    tasks, cast, transposed = [], set(), set()
    for name, segments in _grouped(_joined_layouts(rows, source, target)):
        sources = [found[one.source] for one in _slices(segments)]
        wanted = (float32_as or dtype) if name in in_float32 else dtype
        spec = TensorSpec(name, check_weights_dtype(name, sources, wanted, where), shapes[name])
        tasks.append(Task(spec, Segments(segments), leading[name]))
        if any(source.dtype != spec.dtype for source in sources):
            cast.add(name)
        if any(isinstance(segment, TransposedSlice) for segment in segments):
            transposed.add(name)
    prove(((task.target, task.segments) for task in tasks), found, shapes, padded)
    return Plan(tuple(tasks), frozenset(cast), frozenset(transposed))


def _slices(segments: Iterable[Segment]) -> Iterator[Slice]:
    for segment in segments:
        if isinstance(segment, Slice):
            yield segment
        elif isinstance(segment, TransposedSlice):
            yield from segment.slices


def _joined_layouts(
    rows: Iterable[Row], source: TensorLayout, target: TensorLayout
) -> Iterator[tuple[str, int, Segment]]:
    """All elements: target tensor, offset in it, and source."""
    woven: dict[str, dict[int, tuple[Segment, ...]]] = {}
    for row in rows:
        segments = Segments(_read(param) for param in source.slices(row))
        position = 0
        for param in target.slices(row):
            here = min(param.length, segments.length - position)
            part = tuple(joined(segments.cut(position, here)))
            position += param.length
            if param.stride > 1:
                woven.setdefault(param.tensor, {})[param.start] = part
                continue
            if param.columns:
                part = _turned(part, param.columns)
            if param.plus:
                part = tuple(_more(segment, param.plus) for segment in part)
            if here < param.length:
                part += (Zeros(param.length - here),)
            start = param.start
            for segment in part:
                yield param.tensor, start, segment
                start += segment.length
    for tensor, strands in woven.items():
        # Concatenated they are a matrix, which is stored transposed.
        slices = tuple(one for _, strand in sorted(strands.items()) for one in strand)
        (matrix,) = _turned(slices, sum(one.length for one in slices) // len(strands))
        yield tensor, 0, matrix


def _read(param: ParamSlice) -> Segment:
    """The elements at a position, in the order of the Megatron parameter."""
    if param.stride > 1:
        raise AssertionError(f"{param.tensor}: every {param.stride}th element cannot be read, only written")
    one = Slice(param.tensor, param.start, param.length, -param.plus)
    if not param.columns:
        return one
    # The source is the transpose of the target, so its columns are the target's rows.
    return TransposedSlice((one,), param.length // param.columns, 0, param.length)


def _more(segment: Segment, plus: int) -> Slice:
    if not isinstance(segment, Slice):
        raise AssertionError("a number can be added only to slices")
    return segment._replace(plus=segment.plus + plus)


def _turned(segments: tuple[Segment, ...], columns: int) -> tuple[Segment, ...]:
    """The transpose of a matrix with this many columns."""
    first = segments[0]
    if (
        isinstance(first, TransposedSlice)
        and first.rows == columns
        and first.length == first.numel
        and len(segments) == 1
    ):
        return first.slices  # both sides have this order
    slices = tuple(segment for segment in segments if isinstance(segment, Slice))
    if len(slices) != len(segments):
        raise AssertionError("a matrix to be transposed lies transposed, or is padded")
    return (TransposedSlice(slices, columns, 0, sum(one.length for one in slices)),)


def _grouped(segments: Iterable[tuple[str, int, Segment]]) -> Iterator[tuple[str, tuple[Segment, ...]]]:
    """Segments by target, in the order of the targets' elements."""
    targets: dict[str, list[tuple[int, Segment]]] = {}
    for target, start, segment in segments:
        targets.setdefault(target, []).append((start, segment))
    for target, parts in targets.items():
        parts.sort(key=lambda part: part[0])
        yield target, tuple(joined(segment for _, segment in parts))

"""The plan of a conversion and the proof that it is complete, made from only headers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE, TensorLayout
from qwen3vl_bridge.checkpoint.formats.planned_files import Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    WEIGHT_DTYPES,
    Segment,
    SegmentReader,
    Segments,
    Shape,
    Slice,
    TensorSource,
    TensorSpec,
    TransposedSlice,
    Zeros,
    joined,
)
from qwen3vl_bridge.io.files import CheckpointError
from qwen3vl_bridge.weights.rows import ParamSlice, WeightRow, local_name

# Number of tensors of each kind that a message lists.
_LISTED = 20


@dataclass(frozen=True)
class Plan:
    """A planned conversion."""

    tasks: tuple[Task, ...]  # one per target tensor; any process may do any part of them
    cast: frozenset[str] = frozenset()  # names of the targets whose dtype is not that of their sources
    transposed: frozenset[str] = frozenset()  # names of those made of transposed matrices; all others are copies

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


def naming_of(rows: Iterable[WeightRow], names: Collection[str]) -> str:
    """Layer spec of a checkpoint's parameter names; Transformer Engine's if both specs have the same names."""
    for row in rows:
        if row.stored[0] not in names and local_name(row.stored[0]) in names:
            return LOCAL
    return TRANSFORMER_ENGINE


def tensors_of(rows: Iterable[WeightRow], layout: TensorLayout) -> dict[str, Shape]:
    """Every tensor that a layout has for a model of expanded rows: name -> shape."""
    return {name: shape for row in rows for name, shape in layout.tensors(row).items()}


def drop_unexpected(source: TensorSource, rows: Iterable[WeightRow], layout: TensorLayout) -> list[str]:
    """Remove the tensors that a model does not have from a source; returns a line of text for each."""
    expected = tensors_of(rows, layout)
    unexpected = [spec for name, spec in source.specs.items() if name not in expected]
    for spec in unexpected:
        del source.specs[spec.name]
    return [f"{spec.name} {spec.describe()} is not a tensor of this model; it was ignored" for spec in unexpected]


def make_plan(
    rows: Collection[WeightRow],
    source: TensorLayout,
    target: TensorLayout,
    found: Mapping[str, TensorSpec],
    *,
    where: str,
    dtype: str | None = None,
    float32_as: str | None = None,
) -> Plan:
    """Plan the conversion of the `found` tensors of an expanded weight table from one layout to another.

    A Megatron source's tensors of the vocabulary may have more rows, which are left out; `check_vocab_padding` checks
    their contents. A Megatron target's may have more too, which become zeros.

    Args:
        rows, source, target, found: the table, both formats, and the source's tensors.
        where: the folder, for errors.
        dtype: dtype of the result; None to keep their dtypes.
        float32_as: dtype of the rows with `float32` in the result; None for the same as of others.

    Raises:
        CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
    """
    vocabulary = [row for row in rows if row.of_vocabulary]
    padding = (layout for layout in (source, target) if layout.pads_vocabulary)
    padded = {name for layout in padding for row in vocabulary for name in layout.tensors(row)}
    problem = f"{where} does not have the tensors that its config.json requires"
    check_tensors(found, tensors_of(rows, source), problem, may_be_longer=padded)
    shapes = tensors_of(rows, target)
    leading = {name: target.leading(row) for row in rows for name in target.tensors(row)}
    in_float32 = {name for row in rows if row.float32 for name in target.tensors(row)}
    contents: dict[str, list[tuple[int, Segment]]] = {}
    for name, start, segment in _segments(rows, source, target):
        contents.setdefault(name, []).append((start, segment))
    tasks, cast, transposed = [], set(), set()
    for name, parts in contents.items():
        parts.sort(key=lambda part: part[0])
        segments = tuple(joined(segment for _, segment in parts))
        sources = [found[piece.source] for piece in _slices(segments)]
        wanted = (float32_as or dtype) if name in in_float32 else dtype
        spec = TensorSpec(name, _target_dtype(name, sources, wanted, where), shapes[name])
        tasks.append(Task(spec, Segments(segments), leading[name]))
        if any(source.scales or source.dtype != spec.dtype for source in sources):
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


def _segments(
    rows: Iterable[WeightRow], source: TensorLayout, target: TensorLayout
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
                part = _transposed(part, param.columns)
            if param.plus:
                if not all(isinstance(segment, Slice) for segment in part):
                    raise AssertionError("a number can be added only to slices")
                part = tuple(piece._replace(plus=piece.plus + param.plus) for piece in _slices(part))
            if here < param.length:
                part += (Zeros(param.length - here),)
            start = param.start
            for segment in part:
                yield param.tensor, start, segment
                start += segment.length
    for tensor, strands in woven.items():
        # Concatenated they are a matrix, which is stored transposed.
        slices = tuple(piece for _, strand in sorted(strands.items()) for piece in strand)
        (matrix,) = _transposed(slices, sum(piece.length for piece in slices) // len(strands))
        yield tensor, 0, matrix


def _read(param: ParamSlice) -> Segment:
    """The elements at a position, in the order of the Megatron parameter."""
    if param.stride > 1:
        raise AssertionError(f"{param.tensor}: every {param.stride}th element cannot be read, only written")
    piece = Slice(param.tensor, param.start, param.length, -param.plus)
    if not param.columns:
        return piece
    # The source is the transpose of the target, so its columns are the target's rows.
    return TransposedSlice((piece,), param.length // param.columns, 0, param.length)


def _transposed(segments: tuple[Segment, ...], columns: int) -> tuple[Segment, ...]:
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
    return (TransposedSlice(slices, columns, 0, sum(piece.length for piece in slices)),)


def check_tensors(
    found: Mapping[str, TensorSpec], expected: Mapping[str, Shape], problem: str, may_be_longer: Collection[str]
) -> None:
    """Raise a CheckpointError that lists missing, unexpected and misshapen tensors; some may have more rows."""
    if any("_quantizer." in name for name in found):
        raise CheckpointError(
            f"{problem}: ModelOpt quantised it, and its scales would be lost. Train it with "
            "model.restore_modelopt_state=True, or write it with ModelOpt (docs/modelopt.md)"
        )
    unexpected = [spec for name, spec in found.items() if name not in expected]
    kinds: dict[str, list[str]] = {"missing": [], "unexpected": [], "misshapen": []}
    kinds["unexpected"] += (f"{spec.name}: found {spec.describe()}, expected no such tensor" for spec in unexpected)
    for name, shape in expected.items():
        if name not in found:
            kinds["missing"].append(f"{name}: found nothing, expected {list(shape)}")
            continue
        actual = found[name].shape
        longer = name in may_be_longer and actual[1:] == shape[1:] and actual[:1] > shape[:1]
        if actual != shape and not longer:
            kinds["misshapen"].append(f"{name}: found {list(actual)}, expected {list(shape)}")
    if not any(kinds.values()):
        return
    counts = ", ".join(f"{len(entries)} {kind}" for kind, entries in kinds.items() if entries)
    lines = [f"{problem}: {counts}"]
    for kind, entries in kinds.items():
        lines += [f"  {kind}: {entry}" for entry in entries[:_LISTED]]
        if len(entries) > _LISTED:
            lines.append(f"  {kind}: ... and {len(entries) - _LISTED} more")
    raise CheckpointError("\n".join(lines))


def _target_dtype(name: str, sources: Sequence[TensorSpec], dtype: str | None, where: str) -> str:
    """The dtype of a target tensor: the requested one, or that of its sources; all must be floating-point dtypes."""
    for source in sources:
        if source.dtype not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{where}, tensor {source.name}: found dtype {source.dtype}, expected {', '.join(WEIGHT_DTYPES)}"
            )
    if dtype is not None:
        if dtype not in WEIGHT_DTYPES:
            raise CheckpointError(f"torch_dtype is {dtype!r}, expected one of {', '.join(WEIGHT_DTYPES)}")
        return dtype
    if len({source.dtype for source in sources}) > 1:
        found = {source.dtype: source for source in sources}  # one of each dtype is enough
        parts = ", ".join(sorted(f"{source.name} {source.dtype}" for source in found.values()))
        raise CheckpointError(
            f"{where}: {name} is built from {parts}, expected one dtype; choose it with --torch-dtype"
        )
    return sources[0].dtype


def prove(
    tasks: Iterable[tuple[TensorSpec, Iterable[Segment]]],
    sources: Mapping[str, TensorSpec],
    targets: Mapping[str, Shape],
    padded: Collection[str] = (),
) -> None:
    """Check that a plan reads every source element once and produces every target element once.

    Sources in `padded` may have elements after the last one read, and targets in it may have zeros. It guards against
    bugs in the weight table or the planner, not against invalid input: it raises an AssertionError.
    """
    read: dict[str, list[tuple[int, int]]] = {name: [] for name in sources}
    matrices: dict[TransposedSlice, list[tuple[int, int]]] = {}
    produced: set[str] = set()
    for target, segments in tasks:
        if target.name in produced or target.shape != targets[target.name]:
            raise AssertionError(f"{target.name} is planned twice or in another shape than {targets[target.name]}")
        produced.add(target.name)
        planned = 0
        for segment in segments:
            planned += segment.length
            if isinstance(segment, Slice):
                read[segment.source].append((segment.start, segment.start + segment.length))
            elif isinstance(segment, TransposedSlice):
                whole = segment._replace(start=0, length=segment.numel)
                matrices.setdefault(whole, []).append((segment.start, segment.start + segment.length))
            elif target.name not in padded:
                raise AssertionError(f"{target.name}: zeros are planned for it")
        if planned != target.numel:
            raise AssertionError(f"{target.name}: {planned} elements planned of {target.numel}")
    if produced != set(targets):
        raise AssertionError(f"nothing planned for {sorted(set(targets) - produced)}")
    for matrix, ranges in matrices.items():
        if _read_once(ranges, matrix.slices[0].source) != matrix.numel or matrix.numel % matrix.columns:
            raise AssertionError(f"{matrix.slices[0].source}: a matrix is not read as a whole")
        for piece in matrix.slices:
            read[piece.source].append((piece.start, piece.start + piece.length))
    for name, ranges in read.items():
        position = _read_once(ranges, name)
        if position != sources[name].numel and not (name in padded and position < sources[name].numel):
            raise AssertionError(f"{name}: {position} elements read of {sources[name].numel}")


def _read_once(ranges: list[tuple[int, int]], name: str) -> int:
    """Number of elements, from the first one on, that ranges cover."""
    position = 0
    for start, end in sorted(ranges):
        if start != position:
            raise AssertionError(f"{name}: element {min(start, position)} read not exactly once")
        position = end
    return position


def check_vocab_padding(
    source: TensorSource, rows: Iterable[WeightRow], layout: TensorLayout, vocabulary: int, *, where: Path, drop: bool
) -> list[str]:
    """Check that rows of a Megatron checkpoint beyond the model's vocabulary are zero, by reading them.

    A Megatron model may have them so that tensor-parallel ranks have equal parts (`should_pad_vocab`). An import writes
    zeros. Training changes them: megatron-core's cross entropy sums over all rows of the output layer, without a mask
    for padding (`tensor_parallel/cross_entropy.py`), and a tied embedding is that layer.

    With `drop` those that are not zero may be left out too; otherwise they are a CheckpointError. Returns a line of
    text for each tensor, of the shapes that `make_plan` expects, that has more than `vocabulary` rows.
    """
    notes = []
    names = [name for row in rows if row.of_vocabulary for name in layout.tensors(row)]
    for spec in (source.specs[name] for name in names):
        count = spec.shape[0] - vocabulary
        if count <= 0:
            continue
        nonzero = _nonzero_rows(source, spec, vocabulary)
        beyond = f"{spec.name} has {count} rows beyond the vocabulary"
        if nonzero and not drop:
            raise CheckpointError(
                f"{where}: {beyond} of {vocabulary}, of which {len(nonzero)} are not zero, the first is row "
                f"{nonzero[0]}; expected zeros. If they pad the vocabulary (should_pad_vocab), training changed them "
                "because the softmax includes them: drop them with --drop-vocab-padding. If they are tokens, "
                "text_config.vocab_size in config.json is too small"
            )
        dropped = f"{len(nonzero)} of them not zero, dropped by --drop-vocab-padding"
        notes.append(f"{beyond}; {dropped if nonzero else 'they are padding and were dropped'}")
    return notes


def _nonzero_rows(source: TensorSource, spec: TensorSpec, first: int) -> list[int]:
    """Rows, from a given one on, that contain anything other than zeros."""
    import numpy as np

    width, size = spec.numel // spec.shape[0], ITEMSIZE[spec.dtype]
    found: set[int] = set()
    position = first * width
    with SegmentReader(source) as reader:
        for block in reader.blocks([Slice(spec.name, position, spec.numel - position)], spec.dtype):
            values = np.frombuffer(block, f"<u{size}") & np.array(2 ** (8 * size - 1) - 1, f"<u{size}")  # no sign
            found.update(np.unique((position + np.flatnonzero(values)) // width).tolist())
            position += len(values)
    return sorted(found)

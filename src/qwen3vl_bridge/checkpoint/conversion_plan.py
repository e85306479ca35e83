"""Plan a conversion from headers alone, and prove that the plan is complete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qwen3vl_bridge.checkpoint.formats.layouts import LOCAL, TRANSFORMER_ENGINE, TensorLayout
from qwen3vl_bridge.checkpoint.formats.output_files import Ranks, Task
from qwen3vl_bridge.checkpoint.formats.tensors import (
    ITEMSIZE,
    WEIGHT_DTYPES,
    Shape,
    Slice,
    SliceList,
    SliceReader,
    TensorSource,
    TensorSpec,
    TransposedSlice,
    ZeroSlice,
    merge_adjacent,
)
from qwen3vl_bridge.core.files import CheckpointError
from qwen3vl_bridge.weights.rows import TensorSlice, WeightRow, local_name

# Number of tensors of each kind that an error lists.
_MAX_LISTED = 20


@dataclass(frozen=True)
class Plan:
    """The tensors that a conversion writes, and the slices of the source that they consist of."""

    tasks: tuple[Task, ...]  # one for each target tensor
    cast: frozenset[str] = frozenset()  # names of targets with another dtype than their sources
    transposed: frozenset[str] = frozenset()  # names of targets with transposed matrices; all others are copies

    @property
    def nbytes(self) -> int:
        """Return the total size of the target tensors in bytes."""
        return sum(task.target.nbytes for task in self.tasks)

    @property
    def numel(self) -> int:
        """Return the total number of elements of the target tensors."""
        return sum(task.target.numel for task in self.tasks)

    @property
    def dtypes(self) -> list[str]:
        """Return the dtypes of the target tensors, sorted by name."""
        return sorted({task.target.dtype for task in self.tasks})

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Return a dict from the name of each target tensor to its spec."""
        return {task.target.name: task.target for task in self.tasks}

    def assign_tasks(self, ranks: Ranks) -> list[Task]:
        """Return the tasks that the current process runs. Each process gets about the same number of bytes."""
        return ranks.assign(self.tasks, [task.target.nbytes for task in self.tasks])


def find_naming(rows: Iterable[WeightRow], names: Collection[str]) -> str:
    """Return the layer spec of a model with the parameter names `names`: "transformer_engine" or "local".

    If the names of both layer specs are equal, return "transformer_engine".
    """
    for row in rows:
        if row.stored_names[0] not in names and local_name(row.stored_names[0]) in names:
            return LOCAL
    return TRANSFORMER_ENGINE


def tensors_of(rows: Iterable[WeightRow], layout: TensorLayout) -> dict[str, Shape]:
    """Return a dict from name to shape of the tensors that store the expanded weight table `rows` in `layout`."""
    return {name: shape for row in rows for name, shape in layout.tensors(row).items()}


def drop_unexpected(source: TensorSource, rows: Iterable[WeightRow], layout: TensorLayout) -> list[str]:
    """Remove tensors that are not in the expanded weight table `rows` from `source.specs`; return a note for each."""
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
    """Return a plan to convert tensors from one checkpoint format (`TensorLayout`) to another.

    Vocabulary padding of a Megatron source is left out; `check_vocab_padding` checks its contents. Vocabulary padding
    of a Megatron target becomes zeros.

    Args:
        rows: the expanded weight table, with one entry for each Megatron parameter.
        source, target: the formats to convert from and to.
        found: specs of the source's tensors, by name.
        where: the source's folder, for errors.
        dtype: dtype of the result; None to keep the dtypes.
        float32_as: dtype of the result for parameters that Megatron keeps in float32; None for `dtype`.

    Raises:
        CheckpointError: tensors are missing, unexpected or have other shapes. The message lists them.
    """
    vocabulary = [row for row in rows if row.is_vocabulary]
    padded_layouts = (layout for layout in (source, target) if layout.pads_vocabulary)
    padded = {name for layout in padded_layouts for row in vocabulary for name in layout.tensors(row)}
    problem = f"{where} does not have the tensors that its config.json requires"
    check_tensors(found, tensors_of(rows, source), problem, may_be_longer=padded)
    shapes = tensors_of(rows, target)
    leading = {name: target.leading(row) for row in rows for name in target.tensors(row)}
    in_float32 = {name for row in rows if row.float32 for name in target.tensors(row)}
    contents: dict[str, list[tuple[int, Slice]]] = {}
    for name, start, part in _map_slices(rows, source, target):
        contents.setdefault(name, []).append((start, part))
    tasks, cast, transposed = [], set(), set()
    for name, parts in contents.items():
        parts.sort(key=lambda entry: entry[0])
        slices = tuple(merge_adjacent(part for _, part in parts))
        sources = [found[part.tensor] for part in _stored_slices(slices)]
        wanted = (float32_as or dtype) if name in in_float32 else dtype
        spec = TensorSpec(name, _choose_dtype(name, sources, wanted, where), shapes[name])
        tasks.append(Task(spec, SliceList(slices), leading[name]))
        if any(source.scales or source.dtype != spec.dtype for source in sources):
            cast.add(name)
        if any(isinstance(part, TransposedSlice) for part in slices):
            transposed.add(name)
    prove(((task.target, task.slices) for task in tasks), found, shapes, padded)
    return Plan(tuple(tasks), frozenset(cast), frozenset(transposed))


def _stored_slices(slices: Iterable[Slice]) -> Iterator[TensorSlice]:
    for part in slices:
        if isinstance(part, TensorSlice):
            yield part
        elif isinstance(part, TransposedSlice):
            yield from part.slices


def _map_slices(
    rows: Iterable[WeightRow], source: TensorLayout, target: TensorLayout
) -> Iterator[tuple[str, int, Slice]]:
    """Yield (target tensor, position in it, slice of the source to write there) for all elements of the target."""
    interleaved: dict[str, dict[int, tuple[Slice, ...]]] = {}
    for row in rows:
        # The source and the target list the elements of a Megatron parameter in the same order.
        elements = SliceList(_read_slice(part) for part in source.slices(row))
        position = 0
        for wanted in target.slices(row):
            available = min(wanted.length, elements.length - position)
            parts = tuple(merge_adjacent(elements.select(position, available)))
            position += wanted.length
            if wanted.stride > 1:
                interleaved.setdefault(wanted.tensor, {})[wanted.start] = parts
                continue
            if wanted.columns:
                parts = _transpose(parts, wanted.columns)
            if wanted.stored_offset:
                if not all(isinstance(part, TensorSlice) for part in parts):
                    raise AssertionError("the plan adds a number to a slice that is not read from a stored tensor")
                parts = tuple(part._replace(added=part.added + wanted.stored_offset) for part in _stored_slices(parts))
            if available < wanted.length:
                parts += (ZeroSlice(wanted.length - available),)
            start = wanted.start
            for part in parts:
                yield wanted.tensor, start, part
                start += part.length
    for tensor, columns in interleaved.items():
        # Concatenated, the columns are the transpose of the target matrix.
        slices = tuple(part for _, column in sorted(columns.items()) for part in column)
        (matrix,) = _transpose(slices, sum(part.length for part in slices) // len(columns))
        yield tensor, 0, matrix


def _read_slice(part: TensorSlice) -> Slice:
    """Convert a slice that `TensorLayout.slices` of the source has returned to one that can be read.

    The result has the elements of `part` in the order of the Megatron parameter.
    """
    if part.stride > 1:
        raise AssertionError(
            f"{part.tensor}: the plan reads every {part.stride}th element, but only the target may have a stride"
        )
    stored = TensorSlice(part.tensor, part.start, part.length, added=-part.stored_offset)
    if not part.columns:
        return stored
    # The source is the transpose of the target, so its columns are the target's rows.
    return TransposedSlice((stored,), part.length // part.columns, 0, part.length)


def _transpose(slices: tuple[Slice, ...], columns: int) -> tuple[Slice, ...]:
    """Return slices that read the transpose of the matrix in `slices`, which has `columns` columns."""
    first = slices[0]
    if (
        isinstance(first, TransposedSlice)
        and first.rows == columns
        and first.length == first.numel
        and len(slices) == 1
    ):
        return first.slices  # both sides store the matrix in this order
    stored = tuple(part for part in slices if isinstance(part, TensorSlice))
    if len(stored) != len(slices):
        names = sorted({part.tensor for part in stored})
        raise AssertionError(f"{names}: the plan transposes a matrix that is padded or is transposed already")
    return (TransposedSlice(stored, columns, 0, sum(part.length for part in stored)),)


def check_tensors(
    found: Mapping[str, TensorSpec], expected: Mapping[str, Shape], problem: str, may_be_longer: Collection[str]
) -> None:
    """Raise CheckpointError if tensors are missing, unexpected, or have other shapes. The message lists them.

    Args:
        found: specs of the tensors in the checkpoint, by name.
        expected: shapes of the tensors of the model, by name.
        problem: first words of the message.
        may_be_longer: names of tensors that may have more rows than expected, because the vocabulary is padded.
    """
    if any("_quantizer." in name for name in found):
        raise CheckpointError(
            f"{problem}: ModelOpt quantized it, and a conversion would lose its scales. Train it with "
            "model.restore_modelopt_state=True, or export it with ModelOpt (docs/modelopt.md)"
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
        lines += [f"  {kind}: {entry}" for entry in entries[:_MAX_LISTED]]
        if len(entries) > _MAX_LISTED:
            lines.append(f"  {kind}: ... and {len(entries) - _MAX_LISTED} more")
    raise CheckpointError("\n".join(lines))


def _choose_dtype(name: str, sources: Sequence[TensorSpec], dtype: str | None, where: str) -> str:
    """Return the dtype of a target tensor: `dtype` if it is set, otherwise the dtype of the source tensors."""
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
        examples = {source.dtype: source for source in sources}
        described = ", ".join(sorted(f"{source.name} {source.dtype}" for source in examples.values()))
        raise CheckpointError(
            f"{where}: {name} is built from {described}, expected one dtype; choose it with --torch-dtype"
        )
    return sources[0].dtype


def prove(
    tasks: Iterable[tuple[TensorSpec, Iterable[Slice]]],
    sources: Mapping[str, TensorSpec],
    targets: Mapping[str, Shape],
    padded: Collection[str] = (),
) -> None:
    """Check that a plan reads every source element once and produces every target element once.

    Args:
        tasks: each target tensor, and the slices of the source that contain its elements.
        sources, targets: all tensors of the source (name -> spec) and of the target (name -> shape).
        padded: names of source tensors that may end with unread elements, and of target tensors that may have zeros.

    Raises:
        AssertionError: the weight table or the planner has a bug. Invalid input cannot cause this.
    """
    read: dict[str, list[tuple[int, int]]] = {name: [] for name in sources}
    matrices: dict[TransposedSlice, list[tuple[int, int]]] = {}
    produced: set[str] = set()
    for target, slices in tasks:
        if target.name in produced or target.shape != targets[target.name]:
            raise AssertionError(f"{target.name} is planned twice or in another shape than {targets[target.name]}")
        produced.add(target.name)
        planned = 0
        for part in slices:
            planned += part.length
            if isinstance(part, TensorSlice):
                read[part.tensor].append((part.start, part.start + part.length))
            elif isinstance(part, TransposedSlice):
                matrix = part._replace(start=0, length=part.numel)
                matrices.setdefault(matrix, []).append((part.start, part.start + part.length))
            elif target.name not in padded:
                raise AssertionError(f"{target.name}: the plan adds zeros, which only vocabulary padding may have")
        if planned != target.numel:
            raise AssertionError(f"{target.name}: the plan produces {planned} of {target.numel} elements")
    if produced != set(targets):
        raise AssertionError(f"the plan produces no elements of {sorted(set(targets) - produced)}")
    for matrix, ranges in matrices.items():
        if _count_read_once(ranges, matrix.slices[0].tensor) != matrix.numel or matrix.numel % matrix.columns:
            raise AssertionError(f"{matrix.slices[0].tensor}: the plan transposes a matrix that is not read completely")
        for part in matrix.slices:
            read[part.tensor].append((part.start, part.start + part.length))
    for name, ranges in read.items():
        count = _count_read_once(ranges, name)
        if count != sources[name].numel and not (name in padded and count < sources[name].numel):
            raise AssertionError(f"{name}: the plan reads {count} of {sources[name].numel} elements")


def _count_read_once(ranges: list[tuple[int, int]], name: str) -> int:
    """Return the end of the last range. Raise AssertionError unless ranges follow without gap or overlap from 0 on."""
    position = 0
    for start, end in sorted(ranges):
        if start != position:
            raise AssertionError(f"{name}: element {min(start, position)} is not read exactly once")
        position = end
    return position


def check_vocab_padding(
    source: TensorSource, rows: Iterable[WeightRow], layout: TensorLayout, vocabulary: int, *, where: Path, drop: bool
) -> list[str]:
    """Check that the padding rows of the vocabulary in a Megatron checkpoint are zero.

    A Megatron model has such rows to give all tensor-parallel ranks equal shards (`should_pad_vocab`). An import writes
    zeros. Training changes them: megatron-core's cross entropy sums over all rows of the output layer, without a mask
    for padding (`tensor_parallel/cross_entropy.py`), and a tied embedding is the output layer.

    Args:
        source: the checkpoint's tensors, in the shapes that `make_plan` accepts.
        rows, layout: the expanded weight table, and the layout of the checkpoint.
        vocabulary: number of tokens of the model. Rows from this index on are padding.
        where: the checkpoint's folder, for errors.
        drop: whether rows that are not zero may be left out.

    Returns:
        One line of text for each tensor with more than `vocabulary` rows.

    Raises:
        CheckpointError: rows are not zero, and `drop` is False.
    """
    import numpy as np

    notes = []
    names = [name for row in rows if row.is_vocabulary for name in layout.tensors(row)]
    for spec in (source.specs[name] for name in names):
        count = spec.shape[0] - vocabulary
        if count <= 0:
            continue
        width, size = spec.numel // spec.shape[0], ITEMSIZE[spec.dtype]
        nonzero: set[int] = set()
        position = vocabulary * width
        with SliceReader(source) as reader:
            padding = TensorSlice(spec.name, position, spec.numel - position)
            for block in reader.read_blocks([padding], spec.dtype):
                # All bits except the sign: -0.0 is zero.
                values = np.frombuffer(block, f"<u{size}") & np.array(2 ** (8 * size - 1) - 1, f"<u{size}")
                nonzero.update(np.unique((position + np.flatnonzero(values)) // width).tolist())
                position += len(values)
        beyond = f"{spec.name} has {count} rows beyond the vocabulary"
        if nonzero and not drop:
            raise CheckpointError(
                f"{where}: {beyond} of {vocabulary}, of which {len(nonzero)} are not zero, the first is row "
                f"{min(nonzero)}; expected zeros. If they pad the vocabulary (should_pad_vocab), training changed them "
                "because the softmax includes them: drop them with --drop-vocab-padding. If they are tokens, "
                "text_config.vocab_size in config.json is too small"
            )
        dropped = f"{len(nonzero)} of them not zero, dropped by --drop-vocab-padding"
        notes.append(f"{beyond}; {dropped if nonzero else 'they are padding and were dropped'}")
    return notes

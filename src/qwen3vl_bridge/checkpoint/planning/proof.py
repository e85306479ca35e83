"""Proof that a conversion is complete, before a byte is written."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from qwen3vl_bridge.checkpoint.formats.slices import Segment, Slice, TransposedSlice
from qwen3vl_bridge.checkpoint.formats.tensor_specs import WEIGHT_DTYPES, Shape, TensorSpec
from qwen3vl_bridge.io.errors import CheckpointError

_LISTED = 20


def check_same(
    found: Mapping[str, TensorSpec],
    expected: Mapping[str, Shape],
    where: str,
    may_be_longer: Collection[str] = (),
) -> None:
    """Compare the existing tensors with the expected ones.

    Args:
        found: existing tensors.
        expected: expected shapes.
        where: whose tensors they are, for the error.
        may_be_longer: names of tensors whose first dimension may exceed the expected one.

    Raises:
        CheckpointError: they differ; it lists the missing, unexpected and misshapen tensors.
    """
    missing = [f"{name}: found nothing, expected {list(expected[name])}" for name in expected if name not in found]
    unexpected = [
        f"{name}: found {spec.describe()}, expected no such tensor"
        for name, spec in found.items()
        if name not in expected
    ]
    misshapen = [
        f"{name}: found {list(found[name].shape)}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in found and not _fits(found[name].shape, shape, longer=name in may_be_longer)
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "misshapen": misshapen}
    if any(kinds.values()):
        counts = ", ".join(f"{len(lines)} {kind}" for kind, lines in kinds.items() if lines)
        raise CheckpointError(
            f"{where} does not have the tensors that its config.json requires: {counts}{_listing(kinds)}"
        )


def _fits(found: Shape, expected: Shape, *, longer: bool) -> bool:
    if longer and len(found) == len(expected):
        return found[0] >= expected[0] and found[1:] == expected[1:]
    return found == expected


def _listing(kinds: Mapping[str, Sequence[str]]) -> str:
    lines = []
    for kind, entries in kinds.items():
        lines += [f"\n  {kind}: {entry}" for entry in entries[:_LISTED]]
        if len(entries) > _LISTED:
            lines.append(f"\n  {kind}: ... and {len(entries) - _LISTED} more")
    return "".join(lines)


def check_weights_dtype(name: str, sources: Sequence[TensorSpec], dtype: str | None, where: str) -> str:
    """The dtype of a target tensor.

    Args:
        name: the target.
        sources: the tensors it is made of.
        dtype: requested dtype; None for that of the sources.
        where: whose tensors the sources are, for the error.

    Raises:
        CheckpointError: a source or `dtype` is not a floating-point dtype, or sources differ and `dtype` is None.
    """
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

    This guards against bugs in the weight table or the planner, not against invalid input.

    Args:
        tasks: target and segments of each work item.
        sources: the source tensors.
        targets: shapes of the target tensors.
        padded: names of source tensors that may have elements after the last one read, and of targets that may have
            zeros.

    Raises:
        AssertionError: the plan is wrong.
    """
    read: dict[str, list[tuple[int, int]]] = {name: [] for name in sources}
    turned: dict[TransposedSlice, list[tuple[int, int]]] = {}
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
                turned.setdefault(whole, []).append((segment.start, segment.start + segment.length))
            elif target.name not in padded:
                raise AssertionError(f"{target.name}: zeros are planned for it")
        if planned != target.numel:
            raise AssertionError(f"{target.name}: {planned} elements planned of {target.numel}")
    if produced != set(targets):
        raise AssertionError(f"nothing planned for {sorted(set(targets) - produced)}")
    for matrix, ranges in turned.items():
        if _read_once(ranges, matrix.slices[0].source) != matrix.numel or matrix.numel % matrix.columns:
            raise AssertionError(f"{matrix.slices[0].source}: a matrix is not read as a whole")
        for one in matrix.slices:
            read[one.source].append((one.start, one.start + one.length))
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

"""Reads the headers of a model's safetensors files; the weights themselves are not read."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.folder_contents import contents_of
from qwen3vl_bridge.checkpoint.formats.slices import Slice
from qwen3vl_bridge.checkpoint.formats.tensor_specs import DTYPE_OF_SAFETENSORS, ITEMSIZE, Extent, TensorSpec
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.json_files import read_object
from qwen3vl_bridge.io.parsing import parse_json
from qwen3vl_bridge.io.paths import file_size, resolve_within

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# safetensors itself refuses longer headers, and deeper ones. It counts in 64 bits.
_MAX_HEADER, _MAX_DEPTH, _U64 = 100_000_000, 127, 1 << 64


@dataclass(frozen=True)
class _Stored:
    spec: TensorSpec
    path: Path
    offset: int


class HFWeights:
    """The tensors of a Hugging Face model's folder.

    Attributes:
        folder: the folder.
        specs: every tensor by name.
    """

    def __init__(self, folder: Path, file: str | None = None) -> None:
        """Read and check every header.

        Args:
            folder: the folder.
            file: its single file with all tensors; None for those of a model.

        Raises:
            CheckpointError: files are missing, truncated, contradict each other or their headers are wrong.
        """
        self.folder = folder
        found = _read_folder(folder) if file is None else read_header(folder / file)
        self._stored = {stored.spec.name: stored for stored in found}
        self.specs: Mapping[str, TensorSpec] = {name: stored.spec for name, stored in self._stored.items()}

    def extents(self, wanted: Slice) -> Iterator[Extent]:
        """Byte ranges of the elements of a run."""
        stored = self._stored[wanted.source]
        size = ITEMSIZE[stored.spec.dtype]
        yield Extent(stored.path, stored.offset + wanted.start * size, wanted.length * size)

    @property
    def files(self) -> list[Path]:
        """The files that contain the tensors."""
        return sorted({stored.path for stored in self._stored.values()})

    def check(self, names: Iterable[str]) -> None:
        """Does nothing: all was checked when the headers were read."""

    def drop(self, name: str) -> None:
        """Remove a tensor from the source."""
        self._stored.pop(name)
        self.specs = {key: spec for key, spec in self.specs.items() if key != name}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in self.specs.values())


def has_weights(folder: Path) -> bool:
    """Whether a folder looks like one with a model's weights."""
    return (folder / SINGLE).exists() or (folder / INDEX).exists()


def _read_folder(folder: Path) -> list[_Stored]:
    # A single file has precedence over an index, as in transformers.
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_shards(folder)
    raise CheckpointError(f"{folder} has no weights, expected {SINGLE} or {INDEX}; {contents_of(folder)}")


def _read_shards(folder: Path) -> list[_Stored]:
    index = folder / INDEX
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, expected {{tensor: file}}")
    files: dict[Path, set[str]] = {}
    for name, relative in weight_map.items():
        files.setdefault(resolve_within(folder, relative, f"{index}, tensor {name}"), set()).add(name)
    tensors = []
    for path, names in sorted(files.items()):
        shard = read_header(path, named_by=index.name)
        held = {stored.spec.name for stored in shard}
        for kind, different in (("lacks", names - held), ("also holds", held - names)):
            if different:
                some = ", ".join(sorted(different)[:5]) + (" ..." if len(different) > 5 else "")
                raise CheckpointError(f"{path} {kind} {len(different)} tensors against {index.name}: {some}")
        tensors += shard
    return tensors


def read_header(path: Path, named_by: str = "its folder") -> list[_Stored]:
    """Read the header of one safetensors file and check it against the file.

    Args:
        path: the file.
        named_by: the file that names it, for the error.

    Returns:
        Its tensors in the order of their bytes.

    Raises:
        CheckpointError: the file is missing, truncated, or its header is wrong.
    """
    size = file_size(path, named_by)
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                found = f"a header of {length} bytes in a file of {size}"
                raise CheckpointError(f"{path}: found {found}, expected a whole safetensors file")
            header = _parsed(file.read(length), f"{path}: its header")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    _check_metadata(header.pop("__metadata__", None), path)
    data = 8 + length
    return _check_layout(path, [_entry(path, name, entry, data) for name, entry in header.items()], size, data)


def _parsed(text: bytes, what: str) -> dict[str, Any]:
    """Parse a header like safetensors' own parser, which is stricter in some respects than Python's."""
    try:
        header = parse_json(text, max_depth=_MAX_DEPTH, parse_int=_integer)
        if b"\\u" in text:  # may contain half a surrogate pair, which is not valid text
            json.dumps(header, ensure_ascii=False).encode()
    except ValueError as error:
        raise CheckpointError(f"{what} cannot be read as JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{what} is a JSON {type(header).__name__}, expected an object")
    return header


def _integer(digits: str) -> int | float:
    """A number without a fraction. safetensors reads minus zero, and numbers with too many digits, as fractions."""
    value = int(digits)
    return float(digits) if digits == "-0" or not -_U64 < value < _U64 else value


def _check_metadata(metadata: Any, path: Path) -> None:
    texts = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    if metadata is not None and not texts:
        raise CheckpointError(f"{path}: __metadata__ is {str(metadata)[:80]}, expected an object of texts")


def _entry(path: Path, name: str, entry: Any, data: int) -> tuple[_Stored, int]:
    """One tensor of a header and the end of its bytes, both counted from the start of the file."""
    where = f"{path}, tensor {name}"
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise CheckpointError(f"{where}: header entry {str(entry)[:80]}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_OF_SAFETENSORS:
        raise CheckpointError(f"{where}: dtype {str(dtype)[:80]}, expected one of {', '.join(DTYPE_OF_SAFETENSORS)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{where}: shape {str(shape)[:80]}, offsets {str(offsets)[:80]}, expected numbers")
    if len(offsets) != 2:
        raise CheckpointError(f"{where}: {len(offsets)} offsets, expected 2")
    if any(count >= _U64 for count in itertools.accumulate(shape, mul)):
        raise CheckpointError(f"{where}: shape {str(shape)[:80]} has more elements than can be counted")
    spec = TensorSpec(name, DTYPE_OF_SAFETENSORS[dtype], tuple(shape))
    if offsets[1] - offsets[0] != spec.nbytes:
        found = f"data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes"
        raise CheckpointError(f"{where}: {found}, expected {spec.nbytes} for {dtype} {shape}")
    return _Stored(spec, path, data + offsets[0]), data + offsets[1]


def _check_layout(path: Path, entries: list[tuple[_Stored, int]], size: int, data: int) -> list[_Stored]:
    entries.sort(key=lambda entry: (entry[0].offset, entry[1]))
    position = data
    for stored, end in entries:
        if stored.offset != position:
            raise CheckpointError(
                f"{path}, tensor {stored.spec.name}: starts at byte {stored.offset}, expected {position}, "
                "where the tensor before it ends"
            )
        position = end
    if position != size:
        raise CheckpointError(f"{path} has {size} bytes, expected {position} by its header")
    return [stored for stored, _ in entries]

"""Sources of conversations: JSON files here, tables and the hub in their own modules, and the choice among them."""

from __future__ import annotations

import codecs
import hashlib
import mmap
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess, MediaRoot, UrlCache, media_access
from qwen3vl_bridge.data.schemas.conversations import Conversation, conversation_of
from qwen3vl_bridge.data.schemas.record_schemas import OURS, Columns, Schema, marked, schema_of
from qwen3vl_bridge.data.sources import HUB
from qwen3vl_bridge.io.parsing import parse_record

# White space, words and whole strings up to the next bracket, an unclosed quotation mark, or the end.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}"]|\Z)', re.DOTALL)
_SAVED = ("state.json", "dataset_dict.json")  # of save_to_disk
_SPLITS = {"train": ("train",), "valid": ("valid", "validation", "val", "test"), "test": ("test",)}


class Conversations(Protocol):
    """Random access to conversations. Picklable for data-loading workers; reads are independent of each other."""

    def __getitem__(self, index: int, /) -> Conversation:
        """Read one conversation; a `DataError` if the record cannot be read, or is not a conversation."""
        ...

    def sample_id(self, index: int, /) -> str:
        """Origin of a conversation, for messages."""
        ...

    def fingerprint(self) -> str:
        """Whatever must be equal for an index to mean the same conversation; `Unreachable` if downloads are missing."""
        ...


class ConversationSource(Conversations, Protocol):
    """A source of known length, unlike a stream; `recorded_as` is its data's name in the download record."""

    recorded_as: str

    def __len__(self) -> int: ...


class _JsonFile(ABC):
    """Records of a JSON file, read on access: only their offsets are stored."""

    _missing: ClassVar[str]

    def __init__(self, path: str | Path, media_root: MediaRoot = None, schema: Schema = OURS) -> None:
        """Find the records; a `DataError` if the file or folder does not exist, or has none, or is truncated.

        `media_root` is the file's own folder by default.
        """
        self.path, self._schema = Path(path), schema
        self._starts, self._ends = array("Q"), array("Q")
        if not self.path.is_file():
            raise DataError(str(self.path), self._missing)
        media = media_access(media_root, self.path.parent)
        self.recorded_as = marked(self._find()[:16], schema)
        self.media = media.of_data(self.recorded_as)

    @abstractmethod
    def _find(self) -> str:
        """Record the offsets; returns a digest of the file."""

    @abstractmethod
    def sample_id(self, index: int) -> str:
        """Origin of a conversation, for messages."""

    def fingerprint(self) -> str:
        """A digest of the file, and the files that were not downloaded."""
        return self.media.mark(self.recorded_as, str(self.path))

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place = self.sample_id(index)
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            text = file.read(self._ends[index] - self._starts[index])
        try:
            record = parse_record(text.decode("utf-8-sig"))
        except UnicodeDecodeError as error:
            raise DataError(place, f"found bytes that are not valid UTF-8 ({error})") from error
        except ValueError as error:  # also for a number with too many digits
            raise DataError(place, f"found no valid JSON ({error}), expected one conversation") from error
        return conversation_of(self._schema.messages_of(record, place), place, self.media)


class JsonLines(_JsonFile):
    """A file with one conversation per line. Blank lines are skipped, but count in line numbers."""

    _missing = "there is no such file, expected JSON lines of conversations"

    def _find(self) -> str:
        self._lines, offset, digest = array("Q"), 0, hashlib.sha256()
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    self._starts.append(offset)
                    self._ends.append(offset + len(line))
                    self._lines.append(number)
                offset += len(line)
                digest.update(line)
        if not self._starts:
            raise DataError(str(self.path), "found no lines, expected one conversation a line")
        return digest.hexdigest()

    def sample_id(self, index: int) -> str:
        """File and line of a conversation."""
        return f"{self.path.name}:{self._lines[index]}"


class JsonList(_JsonFile):
    """A JSON file with one list of records, as in LLaVA."""

    _missing = "there is no such file, or nothing in it; expected a list of conversations"

    def _find(self) -> str:
        if not self.path.stat().st_size:
            raise DataError(str(self.path), self._missing)
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            digest = hashlib.sha256(text).hexdigest()
            self._find_objects(text, len(codecs.BOM_UTF8) if text[:3] == codecs.BOM_UTF8 else 0)
        if not self._starts:
            raise DataError(str(self.path), "found an empty list, expected conversations")
        return digest

    def _find_objects(self, text: mmap.mmap, begin: int) -> None:
        """Record the offsets of the list's objects; their contents are checked when they are read."""
        depth, end = 0, 0  # depth of open brackets; end of the list's opening bracket or the last record
        for match in _TO_BRACKET.finditer(text, begin):
            at, bracket = match.start(1), match[1]
            if depth == 0 and end and (bracket or text[end:].strip()):
                raise self._refused(text[end : end + 40].strip(), "after the list, expected the end of the file")
            if bracket in (b"", b'"'):
                break
            if depth <= 1:
                # Refuse anything other than one list of objects separated by commas.
                gap = text[end or begin : at].strip()
                opening = b"[" if depth == 0 else b"]" if bracket == b"]" else b"{"
                comma = b"," if depth and self._starts and bracket != b"]" else b""
                if bracket != opening or gap != comma:
                    what = "a list" if depth == 0 else "objects with commas between them"
                    raise self._refused((gap + bracket)[:40], f"after {len(self._ends)} records, expected {what}")
            depth += 1 if bracket in b"[{" else -1
            if depth == 2 and bracket == b"{" and len(self._starts) == len(self._ends):
                self._starts.append(at)
            elif depth == 1 and bracket in b"]}" and len(self._starts) > len(self._ends):
                self._ends.append(at + 1)
            if depth <= 1:
                end = at + 1
        if depth or not end:
            raise self._refused(b"the end of the file" if depth else text[:40], "inside the list, expected it whole")

    def _refused(self, found: bytes, problem: str) -> DataError:
        return DataError(str(self.path), f"found {found.decode('utf-8', 'backslashreplace')!r} {problem}")

    def sample_id(self, index: int) -> str:
        """File and index in the list."""
        return f"{self.path.name}[{range(len(self))[index]}]"


def open_source(
    path: str | Path,
    media_root: str | Path | Sequence[str | Path] | None = None,
    *,
    addresses: UrlCache | None = None,
    schema_adapter: str | None = None,
    columns: Columns | None = None,
) -> ConversationSource:
    """The reader for a path.

    Args:
        path: a .jsonl file; a .json file, of lines or with one list; a .parquet file, a folder of them, or a pattern
            such as "data/train-*.parquet"; a folder made by `save_to_disk` of Hugging Face's `datasets`; or
            "hf://owner/name:configuration#split" for a data set of the hub (see `HubName.of`).
        media_root: as for `MediaAccess.of`; by default the file's folder, and none for the hub.
        addresses: the folder of downloaded URLs; None for the user's.
        schema_adapter: name of the records' schema (`schema_of`), or None.
        columns: column names of the data set.
    """
    schema = schema_of(schema_adapter, columns or OURS)
    media = MediaAccess.of(media_root, addresses)
    # Imported here, because pyarrow and its like are slow to import, and JSON does not need them.
    if str(path).startswith(HUB):
        from qwen3vl_bridge.data.sources.hub import HubDataset

        return HubDataset.named(str(path), media_root=media, schema=schema)
    path = Path(path)
    if path.is_dir():
        expect_table(path)
        if _is_saved(path):
            from qwen3vl_bridge.data.sources.hub import HubDataset

            return HubDataset.saved(path, media, schema)
    if path.is_dir() or path.suffix == ".parquet":
        from qwen3vl_bridge.data.sources.tables import Parquet

        return Parquet(path, media, schema)
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(
            str(path), "found no folder and none of the endings .jsonl, .json and .parquet, expected one of them"
        )
    listed = path.suffix == ".json" and path.is_file() and _begins_a_list(path)
    return JsonList(path, media, schema) if listed else JsonLines(path, media, schema)


def _is_saved(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _SAVED)


def expect_table(folder: Path) -> None:
    """Refuse a folder without Parquet files that `save_to_disk` did not write (`DataError`)."""
    if _is_saved(folder) or any(folder.glob("*.parquet")):
        return
    names = sorted((file.suffix not in (".json", ".jsonl"), file.name) for file in folder.iterdir())
    listed = ", ".join(name for _, name in names[:5]) or "nothing"
    file = folder / names[0][1] if names and not names[0][0] else "another .json or .jsonl file"
    raise DataError(
        str(folder),
        f"found {listed} in the folder, expected train.jsonl, Parquet files or what save_to_disk wrote; to use {file}, "
        "give its own path",
    )


def _begins_a_list(path: Path) -> bool:
    with path.open("rb") as file:
        while chunk := file.read(2**16):  # a list is often on a single line, of any length
            if chunk.strip():
                return chunk.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return False


def splits_in(path: str) -> dict[str, str]:
    """The path of each split of `dataset.path`, by the split's name.

    If there is `train.jsonl` (or `.json`, `.parquet`), files such as `train-00000-of-00004.parquet`, or splits written
    by `save_to_disk` of Hugging Face's `datasets`, the other splits are in the same folder; if only `test.jsonl` is
    there, it is also the validation split. Anything else is only training data: a file, a folder of files not named by
    a split, a saved data set without splits, one of the hub.
    """
    folder = Path(path)
    if path.startswith(HUB) or not folder.is_dir():
        return {"train": path}

    def named(name: str) -> Path | None:
        for file in (folder / f"{name}.{kind}" for kind in ("jsonl", "json", "parquet")):
            if file.is_file():
                return file
        if any(folder.glob(f"{name}-*.parquet")):
            return folder / f"{name}-*.parquet"
        return folder / name if (folder / name / "state.json").is_file() else None

    found = {split: next(filter(None, map(named, names)), None) for split, names in _SPLITS.items()}
    if found["train"] is None:
        return {"train": path}
    return {split: str(file) for split, file in found.items() if file is not None}


def split_of(path: str, split: str) -> str:
    """The path of one split of `dataset.path`; a `DataError` if it does not exist."""
    found = splits_in(path)
    if split not in found:
        raise DataError(path, f"found {', '.join(found)} and no {split} split, expected a folder that has one")
    return found[split]

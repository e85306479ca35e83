"""Read conversations from JSON files, and choose the reader (JSON, Parquet or `datasets`) for a path."""

from __future__ import annotations

import codecs
import hashlib
import json
import mmap
import re
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

from qwen3vl_bridge.core.files import parse_record
from qwen3vl_bridge.data.conversations import (
    DEFAULT_COLUMNS,
    Columns,
    Conversation,
    Schema,
    add_schema_name,
    find_schema,
    parse_conversation,
)
from qwen3vl_bridge.data.data_paths import HUB, check_folder, is_saved_dataset
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import (
    MediaAccess,
    MediaRoot,
    UrlCache,
    make_media_access,
)

# White space, words and complete strings up to the next bracket, an unclosed quotation mark, or the end.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}"]|\Z)', re.DOTALL)


_MOST_DISTANCE = 64  # conversations among which one with another prompt is searched


class Conversations(Protocol):
    """Random access to conversations by index. Picklable, for data-loading workers."""

    def __getitem__(self, index: int, /) -> Conversation:
        """Read one conversation; raise DataError if the record cannot be read or is not a conversation."""
        ...

    def sample_id(self, index: int, /) -> str:
        """Return the location of a conversation, for messages."""
        ...

    def fingerprint(self) -> str:
        """Return a text that identifies the data: it differs if the conversation at any index may differ."""
        ...


class ConversationSource(Conversations, Protocol):
    """A data set with a known number of conversations, unlike a stream.

    `download_key` identifies the data set's download record.
    """

    download_key: str

    def __len__(self) -> int: ...


class _JsonFile(ABC):
    """The conversations in a JSON file. Only the offsets of the records are kept in memory."""

    _missing: ClassVar[str]

    def __init__(self, path: str | Path, media_root: MediaRoot = None, schema: Schema = DEFAULT_COLUMNS) -> None:
        """Find the offsets of the records. By default, `media_root` is the folder of the file.

        Raises:
            DataError: the file or a media root does not exist, or the file is empty or truncated.
        """
        self.path, self._schema = Path(path), schema
        self._starts, self._ends = array("Q"), array("Q")
        if not self.path.is_file():
            raise DataError(str(self.path), self._missing)
        media = make_media_access(media_root, self.path.parent)
        self.download_key = add_schema_name(self._find()[:16], schema)
        self.media = media.for_data(self.download_key)

    @abstractmethod
    def _find(self) -> str:
        """Store the offsets of the records; return a hash of the file."""

    @abstractmethod
    def sample_id(self, index: int) -> str:
        """Return the location of a conversation, for messages."""

    def fingerprint(self) -> str:
        """Return a text that identifies the contents: a hash of the file and, if downloads failed, of the failed URLs.

        A sample with such a URL is bad, so the usable samples depend on the URLs that failed.
        """
        return self.media.add_missing_urls(self.download_key)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Conversation:
        """Read one conversation."""
        place = self.sample_id(index)
        with self.path.open("rb") as file:
            file.seek(self._starts[index])
            text = file.read(self._ends[index] - self._starts[index])
        try:
            record = parse_record(text.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            raise DataError(place, f"found bytes that are not valid UTF-8 ({error})") from error
        except ValueError as error:  # also for a number with too many digits
            if isinstance(error, json.JSONDecodeError) and (
                error.pos >= len(error.doc) or error.msg.startswith("Unterminated")
            ):
                problem = (
                    f"found no valid JSON ({error}), expected one conversation per line: this one is truncated, or "
                    f"on several lines"
                )
                raise DataError(place, problem) from error
            raise DataError(place, f"found no valid JSON ({error}), expected one conversation") from error
        return parse_conversation(self._schema.convert_record(record, place), place, self.media)


class JsonLines(_JsonFile):
    """A file with one conversation per line. Blank lines are skipped, but count in line numbers."""

    _missing = "the file does not exist, expected JSON lines of conversations"

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
            raise DataError(str(self.path), "found no lines, expected one conversation per line")
        return digest.hexdigest()

    def sample_id(self, index: int) -> str:
        """Return the name of the file and the line of a conversation."""
        return f"{self.path.name}:{self._lines[index]}"


class JsonList(_JsonFile):
    """A JSON file with one list of records, as in LLaVA."""

    _missing = "the file does not exist or is empty, expected a list of conversations"

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
        """Store the offsets of the objects in the list. The contents of the objects are checked when they are read."""
        depth, end = 0, 0  # depth of open brackets; end of the list's opening bracket or the last record
        for match in _TO_BRACKET.finditer(text, begin):
            at, bracket = match.start(1), match[1]
            if depth == 0 and end and (bracket or text[end:].strip()):
                raise self._error(text[end : end + 40].strip(), "after the list, expected the end of the file")
            if bracket in (b"", b'"'):
                break
            if depth <= 1:
                # Accept only one list of objects separated by commas.
                gap = text[end or begin : at].strip()
                opening = b"[" if depth == 0 else b"]" if bracket == b"]" else b"{"
                comma = b"," if depth and self._starts and bracket != b"]" else b""
                if bracket != opening or gap != comma:
                    what = "a list" if depth == 0 else "objects with commas between them"
                    raise self._error((gap + bracket)[:40], f"after {len(self._ends)} records, expected {what}")
            depth += 1 if bracket in b"[{" else -1
            if depth == 2 and bracket == b"{" and len(self._starts) == len(self._ends):
                self._starts.append(at)
            elif depth == 1 and bracket in b"]}" and len(self._starts) > len(self._ends):
                self._ends.append(at + 1)
            if depth <= 1:
                end = at + 1
        if depth or not end:
            raise self._error(
                b"the end of the file" if depth else text[:40], "inside the list, expected a complete list"
            )

    def _error(self, found: bytes, problem: str) -> DataError:
        return DataError(str(self.path), f"found {found.decode('utf-8', 'backslashreplace')!r} {problem}")

    def sample_id(self, index: int) -> str:
        """Return the name of the file and the index of a conversation in the list."""
        return f"{self.path.name}[{range(len(self))[index]}]"


class MismatchedAnswers:
    """A data set that adds to each conversation a copy with the last answer of an earlier conversation.

    KTO estimates from these copies how far a model is from its reference model.
    """

    def __init__(self, source: ConversationSource) -> None:
        self.source, self.download_key = source, source.download_key

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Conversation:
        """Read a conversation, and the answer of the nearest earlier conversation with another prompt.

        The data set begins again before its first conversation.

        Raises:
            DataError: the conversation cannot be read, or no other answer is found among the conversations before it.
        """
        conversation = self.source[index]
        for distance in range(1, min(len(self), _MOST_DISTANCE + 1)):
            try:
                other = self.source[(index - distance) % len(self)]
            except DataError:  # reported when that conversation is read for itself
                continue
            if _prompt(other) != _prompt(conversation):
                break
        else:
            problem = f"found no readable answer to another prompt among the {_MOST_DISTANCE} records before this one"
            raise DataError(self.sample_id(index), f"{problem}, which KTO needs: shuffle the file")
        messages = (*conversation.messages[:-1], other.messages[-1])
        name = f"{conversation.sample_id} (answer of {other.sample_id})"
        return replace(conversation, others=(replace(conversation, sample_id=name, messages=messages),))

    def sample_id(self, index: int) -> str:
        """Return the location of a conversation, for messages."""
        return self.source.sample_id(index)

    def fingerprint(self) -> str:
        """Return a text that identifies the data."""
        return self.source.fingerprint()


def _prompt(conversation: Conversation) -> tuple[Any, ...]:
    return conversation.messages[:-1], conversation.images, conversation.videos


def open_source(
    path: str | Path,
    media_root: str | Path | Sequence[str | Path] | None = None,
    *,
    url_cache: UrlCache | None = None,
    schema_adapter: str | None = None,
    columns: Columns | None = None,
) -> ConversationSource:
    """Return the source of conversations for a path.

    Args:
        path: a .jsonl file; a .json file, of lines or with one list; a .parquet file, a folder of them, or a pattern
            such as "data/train-*.parquet"; a folder made by `save_to_disk` of Hugging Face's `datasets`; or
            "hf://owner/name:configuration#split" for a data set on the hub (see `HubName.parse`).
        media_root: as for `MediaAccess.from_settings`; by default the folder of the file, and none for the hub.
        url_cache: the folder of downloaded URLs; None for the default folder.
        schema_adapter: name of the schema of the records (`find_schema`), or None.
        columns: column names that differ from the default names; None if there are none.

    Raises:
        DataError: the path does not exist, has an unsupported format, or is damaged.
        ValueError: `schema_adapter` or `columns` is invalid.
    """
    schema = find_schema(schema_adapter, columns or DEFAULT_COLUMNS)
    source = _open_path(path, MediaAccess.from_settings(media_root, url_cache), schema)
    return MismatchedAnswers(source) if columns is not None and columns.adds_mismatched_answers else source


def _open_path(path: str | Path, media: MediaAccess, schema: Schema) -> ConversationSource:
    # Imported here, because pyarrow and its like are slow to import, and JSON does not need them.
    if str(path).startswith(HUB):
        from qwen3vl_bridge.data.hub import HubDataset

        return HubDataset.from_hub(str(path), media_root=media, schema=schema)
    path = Path(path)
    if path.is_dir():
        check_folder(path)
        if is_saved_dataset(path):
            from qwen3vl_bridge.data.hub import HubDataset

            return HubDataset.from_disk(path, media, schema)
    if path.is_dir() or path.suffix == ".parquet":
        from qwen3vl_bridge.data.tables import Parquet

        return Parquet(path, media, schema)
    if path.suffix not in (".json", ".jsonl"):
        raise DataError(str(path), "expected a folder, or a file that ends with .jsonl, .json or .parquet")
    listed = path.suffix == ".json" and path.is_file() and _starts_with_list(path)
    return JsonList(path, media, schema) if listed else JsonLines(path, media, schema)


def _starts_with_list(path: Path) -> bool:
    with path.open("rb") as file:
        while chunk := file.read(2**16):  # a list is often on a single line, of any length
            if chunk.strip():
                return chunk.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
    return False

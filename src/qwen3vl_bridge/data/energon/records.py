"""Energon's samples as conversations.

Two kinds of folders are supported:

* crude ones (`CrudeWebdataset`, or a JSONL file). The part "json" contains a record in any format that we read; an
  image or a video in it is the name of another part of the same sample: its extension ("jpg", "1.png", "clip.mp4"), or
  its full name in the tar ("000012.jpg"). Contents as "data:...;base64,..." need no part.
* Megatron-Bridge's ChatML ones (`ChatMLWebdataset`). Their own decoder converts images to float tensors; here they stay
  bytes. The placeholders "<image>" and "<video>" are used at their positions in the text, and the white space around
  them is kept.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import tarfile
from bisect import bisect_right
from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import MediaAccess
from qwen3vl_bridge.data.schemas.conversations import Conversation, conversation_of
from qwen3vl_bridge.data.schemas.placeholders import RATE, stored
from qwen3vl_bridge.data.schemas.record_schemas import Schema, read_by
from qwen3vl_bridge.io.parsing import parse_record

from megatron.energon import (
    Cooker,
    CrudeSample,
    DefaultCrudeJsonlDatasetFactory,
    DefaultDecoderWebdatasetFactory,
    Sample,
    basic_sample_keys,
    edataclass,
    stateless,
)
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

RECORD = "json"
_CHATML = {"conversation", "imgs", "videos"}
_BESIDE_TURNS = ("system", "tools")
_PICKLE = b"\x80"  # no image or video file begins with this byte


@edataclass
class Parts(Sample):
    """A crude sample.

    Attributes:
        parts: contents of its files by extension.
    """

    parts: dict[str, Any]


@stateless
def _take_parts(sample: CrudeSample) -> Parts:
    """Collect the parts unchecked: errors are raised later, where the sample can be dropped."""
    parts = {name: value for name, value in sample.items() if not name.startswith("__")}
    return Parts(**basic_sample_keys(sample), parts=parts)


COOKERS = (Cooker(_take_parts),)


class _RecordsAlone:
    """Energon's decoder of ChatML folders: decodes records, because field maps may use their fields, but not media."""

    def __call__(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        return {name: _json_or_bytes(value) if name.endswith(RECORD) else value for name, value in sample.items()}

    def config(self) -> dict[str, Any]:
        return {"decoder": type(self).__name__}


def keep_bytes(dataset: Any) -> None:
    """Make a dataset return media as bytes.

    Args:
        dataset: energon's dataset factory for a folder, before it is built.

    Raises:
        DataError: samples of an unsupported kind.
    """
    kind, place = dataset.__sample_type__, ", ".join(map(str, dataset.paths))
    crude = issubclass(kind, CrudeSample)
    fields = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    if isinstance(dataset, DefaultDecoderWebdatasetFactory) and (crude or fields >= _CHATML):
        # There is no public way to set it: ChatMLWebdataset ignores the decoder that it is given.
        dataset._decoder = None if crude else _RecordsAlone()  # pyright: ignore[reportAttributeAccessIssue]
    elif not (crude and isinstance(dataset, DefaultCrudeJsonlDatasetFactory)):
        found = f"found a {type(dataset).__name__} of {kind.__name__}"
        raise DataError(place, f"{found}, expected a CrudeWebdataset or Megatron-Bridge's ChatMLWebdataset")


class _Named:
    """One of energon's sample readers, with the path of the file in its errors."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def __getitem__(self, index: int) -> Any:
        try:
            return self._reader[index]
        except (OSError, ValueError, AssertionError, IndexError, tarfile.TarError) as error:
            found = f"energon does not read a sample of it: {type(error).__name__}: {error}"
            raise DataError(self._file(index), f"{found}; expected it as 'energon prepare' found it") from error

    def _file(self, index: int) -> str:
        if isinstance(self._reader, IJsonlReader):
            return str(self._reader.jsonl_path)
        return str(self._reader.shard_infos[bisect_right(self._reader.shard_count_cumsum, index) - 1].path)


def name_files(dataset: Any) -> None:
    """Make a dataset's errors name the file that it cannot read, with its folder, including errors in workers.

    Args:
        dataset: energon's dataset, built from factories that `keep_bytes` accepts.
    """
    if isinstance(dataset, WebdatasetSampleLoaderDataset):
        dataset.join_readers = [_Named(reader) for reader in dataset.join_readers]  # pyright: ignore[reportAttributeAccessIssue]
    for inner in getattr(dataset, "datasets", ()):
        name_files(inner)


def place_of(sample: Sample) -> str:
    """Tar and key, for messages."""
    return ":".join([*(source.shard_name for source in (sample.__sources__ or ())[:1]), str(sample.__key__)])


def conversation_in(sample: Sample, sample_fps: float | None = None, columns: Schema | None = None) -> Conversation:
    """A sample's conversation, with its media as bytes.

    Args:
        sample: `Parts`, or one with Megatron-Bridge's ChatML fields.
        sample_fps: frames per second of videos given as frames without a rate; None to refuse them.
        columns: mapping of the column names of crude folders, if they differ from ours.

    Raises:
        DataError: an invalid record, media that are not among the parts, or columns for a ChatML sample.
    """
    place = place_of(sample)
    if isinstance(sample, Parts):
        record, files = _record_in(sample.parts, place), _files(sample)
    else:
        if columns is not None:
            raise DataError(place, f"found a schema {columns.name}, expected none: ChatML's own names are read")
        record, files = _chatml_record(sample, place), {}
    record = _with_files(read_by(columns, record, place), files, sample_fps, place)
    return conversation_of(record, place, MediaAccess())  # it contains no paths any more


def _record_in(parts: Mapping[str, Any], place: str) -> Any:
    if RECORD not in parts:
        raise DataError(place, f"found the parts {', '.join(parts) or 'none'}, expected {RECORD!r} among them")
    return _decoded(parts[RECORD], f"{place}: part {RECORD!r}")


def _files(sample: Parts) -> dict[str, Any]:
    """Files by the names that a record may use: extensions, and full names with or without the folder in the tar."""
    parts = {name: value for name, value in sample.parts.items() if name != RECORD}
    keys = {sample.__key__, sample.__key__.rpartition("/")[2]}
    return {**{f"{key}.{name}": value for key in keys for name, value in parts.items()}, **parts}


def _with_files(record: Any, files: Mapping[str, Any], sample_fps: float | None, place: str) -> Any:
    """The record with names replaced by bytes. Invalid messages and parts are kept, and refused later."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list):
        return record
    filled = []
    for number, message in enumerate(messages, start=1):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            places = (f"{place}: message {number}, part {i}" for i in range(1, len(content) + 1))
            parts = [_filled(part, files, sample_fps, at) for part, at in zip(content, places, strict=True)]
            message = {**message, "content": parts}
        filled.append(message)
    return {**record, "messages": filled}


def _filled(part: Any, files: Mapping[str, Any], sample_fps: float | None, place: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("image", "video"):
        return part
    medium = part.get(kind)
    if not isinstance(medium, list):
        return {**part, kind: _contents(medium, files, place)}
    part = {**part, kind: [_contents(frame, files, place) for frame in medium]}
    if kind == "video" and part.get(RATE) is None and sample_fps is not None:
        part[RATE] = sample_fps
    return part


def _contents(medium: Any, files: Mapping[str, Any], place: str) -> Any:
    medium = stored(medium)
    if not isinstance(medium, str) or medium.startswith("data:"):
        return medium
    if medium not in files:
        there = ", ".join(sorted(files)) or "none"
        raise DataError(place, f"found {medium!r}, expected a part of the same sample; there is {there}")
    return files[medium]


def _chatml_record(sample: Any, place: str) -> dict[str, Any]:
    """A ChatML sample as a record in our format, with media as bytes in separate keys."""
    if getattr(sample, "audio", None) is not None:
        raise DataError(place, "found audio, expected only images and videos")
    payload = _decoded(sample.conversation, f"{place}: 'conversation'")
    payload = payload if isinstance(payload, dict) else {"conversation": payload}
    names = ("conversations", "messages", "conversation")
    turns = next((payload[name] for name in names if payload.get(name) is not None), None)
    spelled = isinstance(turns, list) and turns and isinstance(turns[0], dict) and "from" in turns[0]
    # Other keys about media contain file names from before they were added to the tar, so they are not read.
    record = {key: payload[key] for key in _BESIDE_TURNS if key in payload}
    record["conversations" if spelled else "messages"] = turns
    tools = getattr(sample, "tools", None)
    if tools is not None:
        record["tools"] = _decoded(tools, f"{place}: 'tools'")
    images, videos = (_media(getattr(sample, name), f"{place}: {name!r}") for name in ("imgs", "videos"))
    if any(isinstance(video, list) for video in videos):
        record[RATE] = payload.get(RATE)
    # Set even if empty: a placeholder without an image is an error in this format.
    return {**record, "images": images, "videos": videos}


def _media(value: Any, place: str) -> list[Any]:
    """The media of one file, or of the pickled list of files in ChatML folders."""
    if isinstance(value, bytes) and value.startswith(_PICKLE):
        try:
            value = _Plain(io.BytesIO(value)).load()
        except Exception as error:  # a damaged pickle raises anything
            raise DataError(place, f"found a pickle that does not load ({error}), expected lists of bytes") from error
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


class _Plain(pickle.Unpickler):
    """Loads only lists, numbers, strings and bytes; an unrestricted pickle can call any function."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _decoded(value: Any, place: str) -> Any:
    """Decode JSON, unless it is already decoded."""
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return parse_record(value)
    except ValueError as error:
        raise DataError(place, f"found what is not valid JSON ({error})") from error


def _json_or_bytes(value: Any) -> Any:
    try:
        return parse_record(value)
    except (ValueError, TypeError):
        return value  # reported later, where the sample can be dropped

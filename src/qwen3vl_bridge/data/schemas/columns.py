"""Maps a data set's column names to ours, and composes texts from several of its columns.

Each field but the last two is one of our keys, and its value the column that holds it. Media may be in several columns:
"image_*" is image_1, image_2 and so on, in numerical order, as many as a record has. `system`, `question` and `answer`
may also be templates (`templates.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qwen3vl_bridge.data.errors import DataError, check_choice
from qwen3vl_bridge.data.schemas.media_keys import MEDIA_KEYS, RATE, is_none
from qwen3vl_bridge.data.schemas.named_schemas import NamedSchema
from qwen3vl_bridge.data.schemas.placeholders import Placeholders
from qwen3vl_bridge.data.schemas.spellings import EXPECTED, KEYS, QUESTIONS, TURNS, messages_of, spelling_of
from qwen3vl_bridge.data.schemas.templates import columns_of, filled, is_template

_TEXTS = ("system", "question", "answer")
_OPTIONAL = (*MEDIA_KEYS, RATE, "system", "tools")  # optional in a record
_PAIRED = {*QUESTIONS, *QUESTIONS.values(), "input"}
_ANY = "*"  # in a column's name, any number


@dataclass(kw_only=True)
class Columns:
    """Names of a data set's columns, where they differ from ours.

    Attributes:
        messages: turns, with role and content.
        conversations: turns, with from and value.
        image: an image or a list of images; "image_*" for the columns image_1, image_2 and so on.
        images: the same.
        video: a video or a list of videos; "video_*" for several columns.
        videos: the same.
        sample_fps: frames per second of videos that are lists of frames.
        system: the system prompt, or a template.
        tools: tools that the model may call.
        question: the question, or a template.
        answer: the answer, or a template.
        ignore: columns to ignore although they look like media.
        placeholders: "media": each "<image>" or "<video>" in a text is a placeholder; "text": they are literal text.
    """

    messages: str | None = None
    conversations: str | None = None
    image: str | None = None
    images: str | None = None
    video: str | None = None
    videos: str | None = None
    sample_fps: str | None = None
    system: str | None = None
    tools: str | None = None
    question: str | None = None
    answer: str | None = None
    ignore: tuple[str, ...] = ()
    placeholders: Placeholders = "media"

    @classmethod
    def of(cls, words: Sequence[str]) -> Columns:
        """Parse a command-line value: "image=img", "ignore=thumbnail,preview".

        Raises:
            ValueError: the value cannot be parsed, or fails `check`.
        """
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name not in names or name in given:
                expected = f"KEY=COLUMN, each key once, with KEY one of {_listed(names)}"
                raise ValueError(f"columns has {word!r}, expected {expected}")
            given[name] = tuple(value.split(",")) if name == "ignore" else value
        return cls.set_to(given, "columns")

    @classmethod
    def set_to(cls, given: Any, where: str) -> Columns:
        """Create from a mapping of these fields, as in YAML.

        Raises:
            ValueError: not such a mapping, or it fails `check`; `where` names it in the message.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"{where} is {given!r}, expected {{KEY: COLUMN}} with keys of {_listed(names)}")
        columns = cls(**given)
        columns.check()
        return columns

    def check(self) -> None:
        """Refuse values that cannot be column names.

        Raises:
            ValueError: an empty value, a value that is not text, or an invalid template.
        """
        check_choice("columns.placeholders", self.placeholders, Placeholders)
        if isinstance(self.ignore, str) or not all(isinstance(name, str) and name for name in self.ignore):
            raise ValueError(f"columns.ignore is {self.ignore!r}, expected a list of columns, such as [thumbnail]")
        for key, value in self._given().items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"columns.{key} is {value!r}, expected the name of a column")
            if key in _TEXTS and is_template(value):
                try:
                    list(columns_of(value))
                except ValueError as error:
                    raise ValueError(f"columns.{key} is {value!r}, expected a template: {error}") from error
            elif _ANY in value and (key not in MEDIA_KEYS or value.count(_ANY) > 1 or value == _ANY):
                raise ValueError(
                    f"columns.{key} is {value!r}, expected the name of a column; of {', '.join(MEDIA_KEYS)} one '*' in "
                    "it may stand for numbers, such as 'image_*'"
                )
        read = self._columns(self.ignore)
        if left := [name for name in self.ignore if name in read]:
            raise ValueError(f"columns.ignore has {left[0]!r}, which columns.{read[left[0]]} reads")

    @property
    def name(self) -> str:
        """The fields that are set, as text for fingerprints and messages."""
        return f"of columns {', '.join(f'{key}={value!r}' for key, value in self.settings().items())}"

    def settings(self) -> dict[str, Any]:
        """The fields that are set."""
        ignored = {"ignore": list(self.ignore)} if self.ignore else {}
        return {**self._given(), **ignored, **({} if self.placeholders == "media" else {"placeholders": "text"})}

    def key_of(self, column: str) -> str:
        """Our key for a column."""
        return next((key for key, value in self._given().items() if value == column), column)

    def messages_of(self, record: Any, place: str) -> Any:
        """Convert a record to our own spelling.

        Raises:
            DataError: a record lacks a column, or as for `spellings.messages_of`.
        """
        if not isinstance(record, dict):
            return record
        self._check_one([key for key, value in record.items() if value is not None], place)
        replaced = self._replaced(record)
        own = {key: value for key, value in record.items() if key not in replaced}
        for key, value in self._given().items():
            if key in _TEXTS and is_template(value):
                own[key] = filled(value, record, f"{place}: columns.{key}")
                continue
            if several := _numbered(value, record):
                own[key] = _up_to_the_last([record[column] for column in several])
                continue
            # If turns have placeholders, a missing image is detected by their number; a missing rate by the frames.
            may_lack = key == RATE or (key in MEDIA_KEYS and self._has_turns(record))
            if (value not in record and not may_lack) or (record.get(value) is None and key not in _OPTIONAL):
                raise DataError(place, f"found the keys {_listed(record)}, expected {value!r} (columns.{key})")
            own[key] = record.get(value)
        return messages_of(own, place, placeholders=self.placeholders)

    def columns_in(self, names: Sequence[str], place: str) -> list[str]:
        """The columns of a table that are read.

        Raises:
            DataError: no column can be used, or a named column does not exist.
        """
        columns = self._columns(names)
        asked = {**columns, **dict.fromkeys(self.ignore, "ignore")}
        for column, key in asked.items():
            if column not in names:
                raise DataError(place, f"found the columns {_listed(names)}, expected {column!r} (columns.{key})")
        self._check_one(names, place)
        replaced, given = self._replaced(names), self._given()
        known = [name for name in names if name in KEYS and name not in replaced]
        spelling = spelling_of({*known, *given}, place)
        if spelling is None:
            raise DataError(place, f"found the columns {_listed(names)}, expected {EXPECTED}")
        if spelling in TURNS:  # a question next to turns is not read
            known = [name for name in known if name not in _PAIRED or name == "input"]  # may be empty
        return [name for name in names if name in known or name in columns]

    def _check_one(self, keys: Iterable[str], place: str) -> None:
        """Refuse turns in addition to a named question."""
        asked = next((key for key in ("question", "answer") if getattr(self, key) is not None), None)
        turns = [key for key in keys if key in TURNS and key not in self.ignore]
        if asked and turns:
            raise DataError(
                place,
                f"found {turns[0]!r} in addition to columns.{asked}, expected one of them: leave the other out "
                f"(columns.ignore=[{turns[0]}])",
            )

    def _replaced(self, names: Collection[str]) -> set[str]:
        """Keys of a record that are not read under their own names."""
        given, columns = self._given(), self._columns(names)
        templates = {key for key, value in given.items() if key in _TEXTS and is_template(value)}
        moved = {column for column, key in columns.items() if key not in templates}
        filled_in = {column for column, key in columns.items() if key in templates and column not in KEYS}
        other = _PAIRED - {"question", "answer"} if {"question", "answer"} & given.keys() else set()
        return {*given, *moved, *filled_in, *other, *self.ignore}

    def _given(self) -> dict[str, Any]:
        """Our keys that are set, with their columns."""
        keys = (field.name for field in fields(self) if field.name not in ("ignore", "placeholders"))
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def _columns(self, names: Collection[str]) -> dict[str, str]:
        """Every named column, with our key for it."""
        found: dict[str, str] = {}
        for key, value in self._given().items():
            template = key in _TEXTS and is_template(value)
            found |= dict.fromkeys(columns_of(value) if template else _numbered(value, names) or [value], key)
        return found

    def _has_turns(self, record: Mapping[str, Any]) -> bool:
        named = {key for key in ("messages", "conversations") if getattr(self, key) is not None}
        return bool(named) or any(record.get(key) is not None for key in ("messages", "conversations"))


Schema = NamedSchema | Columns


def read_by(schema: Schema | None, record: Any, place: str) -> Any:
    """Convert a record to our own spelling, by a schema or by its keys; raises `DataError` as either does."""
    return messages_of(record, place) if schema is None else schema.messages_of(record, place)


def marked(fingerprint: str, schema: Schema | None) -> str:
    """A source's fingerprint with the schema, because the schema determines a record's tokens."""
    return fingerprint if schema is None else f"{fingerprint}, schema {schema.name}"


def one_schema(named: NamedSchema | None, columns: Columns | None) -> Schema | None:
    """The schema that two settings specify; None if neither is set.

    Raises:
        ValueError: both are set, or `columns` has an invalid value.
    """
    if columns is None or not columns.settings():
        return named
    columns.check()
    if named is not None:
        raise ValueError(
            f"schema_adapter is {named.name!r}, whose columns have fixed names, and there is a schema "
            f"{columns.name}; expected one of the two settings"
        )
    return columns


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


def _numbered(pattern: str, names: Collection[str]) -> list[str]:
    """The columns that a name with a "*" matches, in numerical order; none for another name."""
    before, star, behind = pattern.partition(_ANY)
    if not star:
        return []
    matches = [re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(behind)}", str(name)) for name in names]
    return [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1]))]


def _up_to_the_last(media: list[Any]) -> list[Any]:
    """Media without the trailing empty ones. Empty ones before others are kept, and refused elsewhere."""
    last = max((place for place, medium in enumerate(media) if not is_none(medium)), default=-1)
    return media[: last + 1]

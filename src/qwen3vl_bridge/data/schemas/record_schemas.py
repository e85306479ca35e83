r"""How a data set's records are read where they differ from our format: column names and templates, or a known schema.

A value of `Columns` is a column of the data set. Media may be in several columns: "image_*" is image_1, image_2 and so
on, in numerical order, as many as a record has. `system`, `question` and `answer` may also be templates: texts with a
brace, or that begin with "text:". In a template

    {question}           is a column's text, or its number
    {answers[0]}         is the first of a list; {answers[0][answer]} a value of an object there
    {choices:letters}    is a list, one item per line, as "A. ...", "B. ..."; also a list in a text, "['six', 'seven']"
    {answer:letter}      is the letter of a number that counts from 0
    {{ and }}            are braces
    \n                   is the end of a line

A line whose columns are all empty is left out: in "{hint}\n{question}" without a hint, and "{options:letters}" of an
empty list.

A `NamedSchema` is a published format by Megatron-Bridge's name; its adapter makes the texts (docs/data.md lists them).
"""

from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from qwen3vl_bridge.data.errors import DataError, check_choice
from qwen3vl_bridge.data.schemas.conversations import EXPECTED, KEYS, QUESTIONS, TURNS, messages_of, spelling_of
from qwen3vl_bridge.data.schemas.placeholders import MEDIA_KEYS, RATE, Placeholders, is_none, shown

_CONSTANT = "text:"
_LETTERS = string.ascii_uppercase
_MOST_WRITTEN = 1 << 16  # letters of a list that is written as a text


def is_template(value: Any) -> bool:
    """Whether a value of a setting is a template, and not a column's name."""
    return isinstance(value, str) and (value.startswith(_CONSTANT) or "{" in value or "}" in value)


def template_columns(template: str) -> Iterator[str]:
    """The columns that a template uses; a `ValueError` for an invalid one."""
    for _, field, spec, conversion in string.Formatter().parse(template.removeprefix(_CONSTANT)):
        if field is None:
            continue
        column = field.partition("[")[0]
        if not column or "." in column or conversion or spec not in ("", "letter", "letters"):
            raise ValueError(f"found {{{field}}}, a column stands as {{NAME}}, {{NAME[0]}} or {{NAME:letters}}")
        yield column


def filled(template: str, record: Mapping[str, Any], place: str) -> str:
    """Fill a template with a record's values; a `DataError` for a column that is missing or cannot be inserted."""
    if missing := [column for column in template_columns(template) if record.get(column) is None]:
        found = ", ".join(map(str, record)) or "none"
        raise DataError(place, f"found the keys {found}, expected {missing[0]!r}, and not null")
    lines = template.removeprefix(_CONSTANT).replace("\\n", "\n").split("\n")
    try:
        texts = [(line, _Filling().vformat(line, (), record)) for line in lines]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(place, f"{template!r} cannot be filled: {error}") from error
    return "\n".join(text for line, text in texts if text or not line)  # without lines of empty columns alone


class _Filling(string.Formatter):
    """Columns of a record, without Python's attributes."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        column, *places = field_name.replace("]", "").split("[")
        value = kwargs[column]
        for at in places:
            value = value[int(at)] if isinstance(value, list) else value[at]
        return value, column

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec == "letter" and isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < len(_LETTERS):
                raise ValueError(f"found {value}, expected a number from 0 to {len(_LETTERS) - 1}")
            return _LETTERS[value]
        items = _as_list(value) if format_spec == "letters" else None
        if items is not None and len(items) <= len(_LETTERS):
            return "\n".join(f"{letter}. {_word(one)}" for letter, one in zip(_LETTERS, items, strict=False))
        if format_spec:
            kinds = {"letter": "a whole number", "letters": f"a list of up to {len(_LETTERS)}"}
            raise ValueError(f"found {shown(value)}, expected {kinds[format_spec]}")
        return _word(value)


def _as_list(value: Any) -> list[Any] | None:
    """A list, or one that is written as a text, by Python or as JSON; None for anything else."""
    if isinstance(value, str) and value.strip().startswith("[") and len(value) <= _MOST_WRITTEN:
        try:
            with warnings.catch_warnings(action="ignore"):  # about a backslash that begins no escape
                value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _word(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(
            f"found {shown(value)}, expected a text or a number; {{NAME[0]}} is the first of a list, {{NAME:letters}} "
            "all of it"
        )
    return str(value)


# Names of Megatron-Bridge's schemas with audio, or with videos asked about by their sound.
_SOUND = ("cv17", "default_audio", "valor32k_avqa")
_KINDS = {str: "string", list: "list", dict: "object", object: "value"}


@dataclass(frozen=True)
class NamedSchema:
    """A published record format. Picklable, for data-loading workers."""

    name: str  # Megatron-Bridge's
    keys: Mapping[str, type]  # required ones, with the type of their values; others are not read

    def messages_of(self, record: Any, place: str) -> dict[str, Any]:
        """Convert a record to our own spelling; a `DataError` if it is of another format, or a text is left out."""
        from megatron.bridge.data.sources.hf_adapters import adapt_hf_dataset  # imported here because it is slow

        given = record if isinstance(record, dict) else {}
        for key, kind in self.keys.items():
            value = given.get(key)
            is_empty = kind is not object and not (value.strip() if isinstance(value, str) else value)
            if value is None or is_empty or not isinstance(value, kind):
                raise DataError(
                    place,
                    f"found {shown(value)} under {key!r}, expected a non-empty {_KINDS[kind]}; the keys are "
                    f"{_listed(given)}, and schema {self.name} reads {' and '.join(self.keys)}",
                )
        for number, turn in enumerate(given["conversations"] if "conversations" in self.keys else (), start=1):
            said = turn.get("value") if isinstance(turn, dict) and turn.get("from") in ("human", "gpt") else None
            if not isinstance(said, str) or not said.strip():  # the adapter would skip it
                expected = "an object with 'from', human or gpt, and 'value', a non-empty string"
                raise DataError(f"{place}: turn {number}", f"found {shown(turn)}, expected {expected}")
        # A video may be contents, and a path follows our own rules: both are inserted in place of a stand-in.
        read = {key: "video" if key == "video" else given[key] for key in self.keys}
        settings = {"video_root_path": "."} if "video" in read else {}
        try:
            (adapted,) = adapt_hf_dataset([read], adapter_name=self.name, adapter_kwargs=settings)
        except Exception as error:  # the adapter does not check its records
            texts = {key: given[key] for key, kind in self.keys.items() if kind is not object}
            raise DataError(
                place, f"found {shown(texts)}, which schema {self.name} cannot read ({type(error).__name__}: {error})"
            ) from error
        pair = [{"role": "user", "content": adapted.get("prompt")}]
        pair += [{"role": "assistant", "content": adapted.get("completion")}]
        messages = []
        for adapted_message in adapted.get("conversation") or adapted.get("messages") or pair:
            names = {"thinking": "reasoning_content"}
            message = {names.get(key, key): value for key, value in adapted_message.items()}
            content, texts = message["content"], [message["content"]]
            if isinstance(content, list):
                video = {"type": "video", "video": given.get("video")}
                message["content"] = [video if part["type"] == "video" else part for part in content]
                texts = [part["text"] for part in content if part["type"] == "text"]
            # A turn of LLaVA-Video's may be nothing but the placeholder.
            if message["role"] == "assistant" and not all(isinstance(text, str) and text.strip() for text in texts):
                raise DataError(place, f"found {shown(texts)} as the answer, expected a non-empty string")
            messages.append(message)
        return messages_of({"messages": messages}, place, placeholders="text")

    def columns_in(self, names: Sequence[str], place: str) -> list[str]:
        """The columns of a table that are read; `DataError` if one does not exist."""
        if not set(self.keys) <= set(names):
            expected = " and ".join(map(repr, self.keys))
            raise DataError(place, f"found the columns {_listed(names)}, expected {expected} under schema {self.name}")
        return list(self.keys)

    def key_of(self, column: str) -> str:
        """Our key for a column."""
        return column


_MATH = {"problem": str, "generated_solution": str, "expected_answer": str}
SCHEMAS = {
    name: NamedSchema(name, keys)
    for name, keys in {
        "cord_v2": {"image": object, "ground_truth": str},
        "rdr": {"image": object, "text": str},
        "medpix": {"image_id": object, "question": str, "answer": str},
        "raven": {"images": list, "texts": list},
        "llava_video_178k": {"video": object, "conversations": list},
        "squad": {"context": str, "question": str, "answers": dict},
        "gsm8k": {"question": str, "answer": str},
        "openmathinstruct2": _MATH,
        "openmathinstruct2_thinking": _MATH,
    }.items()
}


_TEXTS = ("system", "question", "answer")
_OPTIONAL = (*MEDIA_KEYS, RATE, "system", "tools")  # optional in a record
_PAIRED = {*QUESTIONS, *QUESTIONS.values(), "input"}
_WORSE = ("rejected", "rejected_response", "rejected_messages")  # TRL's and LLaMA-Factory's, and ms-swift's
_ANY = "*"  # in a column's name, any number


@dataclass(kw_only=True)
class Columns:
    """Names of a data set's columns, where they differ from ours (docs/data.md)."""

    messages: str | None = None  # turns, with role and content
    conversations: str | None = None  # turns, with from and value
    image: str | None = None  # an image or a list of images; "image_*" for the columns image_1, image_2 and so on
    images: str | None = None  # the same as image
    video: str | None = None  # a video or a list of videos; "video_*" for several columns
    videos: str | None = None  # the same as video
    sample_fps: str | None = None  # frames per second of videos that are lists of frames
    system: str | None = None  # the system prompt, or a template
    tools: str | None = None  # tools that the model may call
    question: str | None = None  # the question, or a template
    answer: str | None = None  # the answer, or a template
    ignore: tuple[str, ...] = ()  # columns to ignore although they look like media
    placeholders: Placeholders = "media"  # whether "<image>" and "<video>" in a text are placeholders, or literal text

    @classmethod
    def of(cls, words: Sequence[str]) -> Columns:
        """Parse a command-line value, "image=img", "ignore=thumbnail,preview"; `ValueError` if it cannot be."""
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
        """Create from a mapping of these fields, as in YAML; `ValueError` with `where` for another one."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"{where} is {given!r}, expected {{KEY: COLUMN}} with keys of {_listed(names)}")
        columns = cls(**given)
        columns.check()
        return columns

    def check(self) -> None:
        """Refuse values that cannot be column names with a `ValueError`."""
        check_choice("columns.placeholders", self.placeholders, Placeholders)
        if isinstance(self.ignore, str) or not all(isinstance(name, str) and name for name in self.ignore):
            raise ValueError(f"columns.ignore is {self.ignore!r}, expected a list of columns, such as [thumbnail]")
        for key, value in self._given().items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"columns.{key} is {value!r}, expected the name of a column")
            if key in _TEXTS and is_template(value):
                try:
                    list(template_columns(value))
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
        """The fields that are set, as text for fingerprints and messages; empty without any."""
        names = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return names and f"of columns {names}"

    def settings(self) -> dict[str, Any]:
        """The fields that are set."""
        ignored = {"ignore": list(self.ignore)} if self.ignore else {}
        return {**self._given(), **ignored, **({} if self.placeholders == "media" else {"placeholders": "text"})}

    def key_of(self, column: str) -> str:
        """Our key for a column."""
        return next((key for key, value in self._given().items() if value == column), column)

    def messages_of(self, record: Any, place: str) -> Any:
        """Convert a record to our own spelling; `DataError` if it lacks a column, or as for `messages_of`."""
        if not isinstance(record, dict):
            return record
        said = [key for key, value in record.items() if value is not None and not isinstance(value, (bool, int, float))]
        self._check_one(said, place)
        replaced = self._replaced(record)
        own = {key: value for key, value in record.items() if key not in replaced}
        for key, value in self._given().items():
            if key in _TEXTS and is_template(value):
                own[key] = filled(value, record, f"{place}: columns.{key}")
                continue
            if several := _numbered(value, record):
                media = [record[column] for column in several]
                while media and is_none(media[-1]):  # empty ones before others are refused elsewhere
                    media.pop()
                own[key] = media
                continue
            # If turns have placeholders, a missing image is detected by their number; a missing rate by the frames.
            turns = (self.messages, self.conversations, record.get("messages"), record.get("conversations"))
            has_turns = any(given is not None for given in turns)
            may_lack = key == RATE or (key in MEDIA_KEYS and has_turns)
            if (value not in record and not may_lack) or (record.get(value) is None and key not in _OPTIONAL):
                raise DataError(place, f"found the keys {_listed(record)}, expected {value!r} (columns.{key})")
            own[key] = record.get(value)
        return messages_of(own, place, placeholders=self.placeholders)

    def columns_in(self, names: Sequence[str], place: str) -> list[str]:
        """The columns of a table that are read; `DataError` if none is, or a named one does not exist."""
        columns = self._columns(names)
        asked = {**columns, **dict.fromkeys(self.ignore, "ignore")}
        for column, key in asked.items():
            if column not in names:
                raise DataError(place, f"found the columns {_listed(names)}, expected {column!r} (columns.{key})")
        self._check_one(names, place)
        replaced, given = self._replaced(names), self._given()
        known = [name for name in names if name in KEYS and name not in replaced]
        if spelling_of({*known, *given}, place) is None:
            raise DataError(place, f"found the columns {_listed(names)}, expected {EXPECTED}")
        return [name for name in names if name in known or name in columns]

    def _check_one(self, keys: Collection[str], place: str) -> None:
        """Refuse turns in addition to a named question, and a second answer, as preference training has it."""
        read = {*self.ignore, *self._columns(keys)}
        if worse := next((key for key in keys if key in _WORSE and key not in read), None):
            raise DataError(
                place,
                f"found {worse!r}, an answer for preference training, which is not done here: the other one would be "
                f"trained on as any answer. If that is meant, leave it out (columns.ignore=[{worse}])",
            )
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
        given = self._given()
        other = _PAIRED - {"question", "answer"} if {"question", "answer"} & given.keys() else set()
        return {*given, *self._columns(names), *other, *self.ignore}

    def _given(self) -> dict[str, Any]:
        """Our keys that are set, with their columns."""
        keys = (field.name for field in fields(self) if field.name not in ("ignore", "placeholders"))
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def _columns(self, names: Collection[str]) -> dict[str, str]:
        """Every named column, with our key for it."""
        found: dict[str, str] = {}
        for key, value in self._given().items():
            template = key in _TEXTS and is_template(value)
            found |= dict.fromkeys(template_columns(value) if template else _numbered(value, names) or [value], key)
        return found


Schema = NamedSchema | Columns
OURS = Columns()  # our own names


def schema_of(name: str | None, columns: Columns) -> Schema:
    """The schema that two settings specify; a `ValueError` if both do, or for an invalid or unsupported one."""
    columns.check()
    if name is None:
        return columns
    if name not in SCHEMAS:
        audio = ", whose records contain audio, which the model does not support;" if name in _SOUND else ","
        raise ValueError(f"schema_adapter is {name!r}{audio} expected one of {', '.join(SCHEMAS)}, or none")
    if columns.name:
        raise ValueError(
            f"schema_adapter is {name!r}, whose columns have fixed names, and there is a schema {columns.name}; "
            "expected one of the two settings"
        )
    return SCHEMAS[name]


def marked(fingerprint: str, schema: Schema) -> str:
    """A source's fingerprint with the schema, because the schema determines a record's tokens."""
    return f"{fingerprint}, schema {schema.name}" if schema.name else fingerprint


def _listed(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


def _numbered(pattern: str, names: Collection[str]) -> list[str]:
    """The columns that a name with a "*" matches, in numerical order; none for another name."""
    before, star, behind = pattern.partition(_ANY)
    if not star:
        return []
    matches = [re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(behind)}", str(name)) for name in names]
    return [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1]))]

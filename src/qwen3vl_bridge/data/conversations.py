"""`Conversation`, and the schemas that convert records of a data set to conversations."""

from __future__ import annotations

import ast
import json
import re
import string
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media import (
    MOST_PIXELS,
    FrameList,
    Media,
    MediaAccess,
    Video,
    find_media,
)
from qwen3vl_bridge.data.records import (
    EXPECTED_KEYS,
    FPS_KEY,
    KEYS,
    LOSS_KEYS,
    MEDIA_KEYS,
    PART_KINDS,
    PIXEL_LIMIT_KEYS,
    PROMPT_KEYS,
    REFERENCES,
    TEMPLATE_KWARGS,
    TURN_KEYS,
    Placeholders,
    convert_record,
    drop_nulls,
    is_empty_medium,
    short_repr,
)

ROLES = ("system", "user", "assistant", "tool")
_OPTIONAL = {"reasoning_content", "tool_calls", "tool_call_id", "name"}  # keys of a message next to role and content


class PixelLimits(NamedTuple):
    """Minimum and maximum number of pixels of one image; None keeps the processor's limit."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(frozen=True)
class Conversation:
    """One conversation as read from a data set, before it is encoded."""

    sample_id: str  # file and line, "train.jsonl:12"
    messages: tuple[dict[str, Any], ...]  # with role and content, as a chat template takes them
    images: tuple[Media, ...] = ()  # in the order of their parts, like the videos
    videos: tuple[Video, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    # limits of images that have their own, by the index of the image
    limits: Mapping[int, PixelLimits] = field(default_factory=dict)
    # Whether an assistant message is trained on, by its index. Only for messages with the key "loss" or "weight".
    losses: Mapping[int, bool] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template, by name
    references: Any = None  # the answers that an evaluation accepts; training does not read them
    # Further conversations of the same record, for objectives that compare several: the rejected answer of a pair, or
    # the documents for a query.
    others: tuple[Conversation, ...] = ()
    is_desirable: bool | None = None  # whether the answer is a good one, if records are labeled (KTO)

    @property
    def documents(self) -> tuple[Conversation, ...]:
        """All conversations of the record: first this conversation, then `others`."""
        return (self, *self.others)


class GroupRecord(dict[str, Any]):
    """A record of several conversations, such as a pair of answers. The dict is the record of the first conversation.

    Attributes:
        others: (description for error messages, record) of each further conversation, in order.
        is_desirable: the label of the answer in KTO data; None without a label.
    """

    def __init__(
        self,
        first: Mapping[str, Any],
        others: Sequence[tuple[str, Mapping[str, Any]]] = (),
        is_desirable: bool | None = None,
    ) -> None:
        super().__init__(first)
        self.others, self.is_desirable = others, is_desirable


def parse_conversation(record: Any, place: str, root: Path | MediaAccess) -> Conversation:
    """Validate a record {"messages": [...]} and return it as a conversation; raise DataError if it is invalid.

    `place` is the location of the record, such as "train.jsonl:12", and becomes the `sample_id`.
    `root` is the folder that media paths are relative to and must not leave, or a `MediaAccess`.
    """
    if isinstance(record, GroupRecord):
        others = tuple(parse_conversation(other, f"{place} ({name})", root) for name, other in record.others)
        first = parse_conversation(dict(record), place, root)
        return replace(first, others=others, is_desirable=record.is_desirable)
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        found = short_repr(record) if not isinstance(record, dict) else f"{short_repr(messages)} under 'messages'"
        raise DataError(place, f"found {found}, expected an object with a list of messages")
    reader = _MessageParser(root)
    checked = tuple(reader.message(message, n, f"{place}: message {n + 1}") for n, message in enumerate(messages))
    roles = [message["role"] for message in checked]
    if "assistant" not in roles or roles[0] == "assistant":
        expected = "an assistant message after at least one other message"
        raise DataError(place, f"found the roles {', '.join(roles)}, expected {expected}")
    tools = record.get("tools") or ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(place, f"found {short_repr(tools)} under 'tools', expected a list of objects")
    if not isinstance(kwargs := record.get(TEMPLATE_KWARGS) or {}, dict):
        raise DataError(place, f"found {short_repr(kwargs)} under {TEMPLATE_KWARGS!r}, expected an object")
    return Conversation(
        place,
        checked,
        images=tuple(reader.images),
        videos=tuple(reader.videos),
        tools=tuple(tools) or None,
        limits=reader.limits,
        losses=reader.losses,
        template_kwargs=kwargs,
        references=record.get(REFERENCES),
    )


class _MessageParser:
    """Parser of the messages of one conversation; collects their images and videos in order."""

    def __init__(self, root: Path | MediaAccess) -> None:
        self._root = root
        self.images: list[Media] = []
        self.videos: list[Video] = []
        self.limits: dict[int, PixelLimits] = {}
        self.losses: dict[int, bool] = {}

    def message(self, message: Any, number: int, place: str) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(place, f"found {short_repr(message)}, expected an object with role and content")
        given = dict(message)
        if given.get("tool_calls"):
            given.setdefault("content", "")
        if not {"role", "content"} <= set(given) <= {"role", "content", *_OPTIONAL, *LOSS_KEYS}:
            allowed = f"role and content, and {', '.join(sorted({*_OPTIONAL, *LOSS_KEYS}))} where needed"
            raise DataError(place, f"found the keys {', '.join(map(str, given))}, expected {allowed}")
        role, content, reasoning, calls = (
            given.get(key) for key in ("role", "content", "reasoning_content", "tool_calls")
        )
        if role not in ROLES:
            raise DataError(place, f"found the role {role!r}, expected one of {', '.join(ROLES)}")
        for key in ("reasoning_content", "tool_calls", *LOSS_KEYS):
            if given.get(key) and role != "assistant":
                problem = f"found {key!r} on a message of the role {role!r}"
                raise DataError(place, f"{problem}, expected it only on messages of the role 'assistant'")
        if not isinstance(reasoning, str | None):
            raise DataError(place, f"found {short_repr(reasoning)} under 'reasoning_content', expected a string")
        if not isinstance(calls, list | None):
            raise DataError(place, f"found {short_repr(calls)} under 'tool_calls', expected a list of objects")
        for at, call in enumerate(calls or (), start=1):
            where, function = f"{place}, tool call {at}", call.get("function", call) if isinstance(call, dict) else call
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise DataError(where, f"found {short_repr(function)}, expected an object with a name and arguments")
            if not isinstance(arguments := function.get("arguments", {}), dict):
                expected = "an object, or a string that contains one as JSON"
                raise DataError(where, f"found {short_repr(arguments)} under 'arguments', expected {expected}")
        losses = {key: given.pop(key) for key in LOSS_KEYS if key in given}
        if len(losses) > 1:
            raise DataError(place, "found both 'loss' and 'weight', expected one of them")
        for key, value in losses.items():
            # A column of floats stores 1 as 1.0. The type is checked because True equals 1 in Python.
            if isinstance(value, bool) != (key == "loss") or value not in (0, 1):
                expected = "true or false" if key == "loss" else "0 or 1"
                raise DataError(place, f"found {short_repr(value)} under {key!r}, expected {expected}")
            if role == "assistant":
                self.losses[number] = bool(value)
        if isinstance(content, str):
            return given
        if not isinstance(content, list) or not content:
            raise DataError(place, f"found {short_repr(content)} as content, expected a string or a list of parts")
        parts = [self._part(part, f"{place}, part {at}") for at, part in enumerate(content, start=1)]
        return {**given, "content": parts}

    def _part(self, part: Any, place: str) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in PART_KINDS:
            found = short_repr(part) if not isinstance(part, dict) else f"a part of type {kind!r}"
            raise DataError(place, f"found {found}, expected an object of type 'text', 'image' or 'video'")
        value = part.get(kind)
        optional = {"text": (), "image": PIXEL_LIMIT_KEYS, "video": (FPS_KEY,) if isinstance(value, list) else ()}[kind]
        if set(part) - {"type", kind, *optional}:
            needed = f", and {' and '.join(map(repr, optional))} where needed" if optional else " only"
            settings = "" if kind == "text" else f"; set other limits for all {kind}s in dataset.vision"
            raise DataError(
                place, f"found the keys {', '.join(map(str, part))}, expected 'type' and {kind!r}{needed}{settings}"
            )
        if kind == "text":
            if not isinstance(value, str):
                raise DataError(place, f"found {short_repr(value)} under 'text', expected a string")
        elif kind == "image":
            limits = PixelLimits(*(part.get(name) for name in PIXEL_LIMIT_KEYS))
            for name, most in limits._asdict().items():
                if most is not None and (type(most) is not int or not 0 < most <= MOST_PIXELS):  # no bool
                    expected = f"a number of pixels up to {MOST_PIXELS:,}"
                    raise DataError(place, f"found {short_repr(most)} under {name!r}, expected {expected}")
            if limits != PixelLimits():
                self.limits[len(self.images)] = limits
            self.images.append(self._media(value, kind, place))
        else:
            is_list = isinstance(value, list)
            self.videos.append(
                self._frames(value, part.get(FPS_KEY), place) if is_list else self._media(value, kind, place)
            )
        # A template reads only a part's type. Contents would only make the messages larger.
        return {"type": kind, kind: value if isinstance(value, str) and not value.startswith("data:") else ""}

    def _media(self, value: Any, kind: str, place: str) -> Media:
        if not isinstance(value, str | bytes) or not value:
            raise DataError(place, f"found {short_repr(value)} under {kind!r}, expected a path or bytes")
        return find_media(value, self._root, place) if isinstance(value, str) else value

    def _frames(self, frames: list[Any], fps: Any, place: str) -> FrameList:
        if not frames:
            raise DataError(place, "found a video without frames, expected at least one frame")
        try:  # Qwen's examples write the rate as a string
            rate = float(fps) if isinstance(fps, int | float | str) and not isinstance(fps, bool) else 0
        except (ValueError, OverflowError):
            rate = 0
        if not 0 < rate < float("inf"):
            raise DataError(
                place,
                f"found {short_repr(fps)} as the {FPS_KEY!r} of a list of frames, expected the frames per second. "
                "Set it next to 'video' in a content part, or next to 'videos': a number, or a list with one per video",
            )
        media = (self._media(frame, "video", f"{place}, frame {at}") for at, frame in enumerate(frames))
        return FrameList(tuple(media), rate)


_CONSTANT = "text:"
_LETTERS = string.ascii_uppercase
_MAX_LIST_LENGTH = 1 << 16  # characters of a list that is written as a string


def is_template(value: Any) -> bool:
    """Return whether a `Columns` setting is a template, such as "{question}", instead of a column name."""
    return isinstance(value, str) and (value.startswith(_CONSTANT) or "{" in value or "}" in value)


def template_columns(template: str) -> Iterator[str]:
    """Yield the names of the columns that a template uses; raise ValueError for an invalid template."""
    for _, name, spec, conversion in string.Formatter().parse(template.removeprefix(_CONSTANT)):
        if name is None:
            continue
        column = name.partition("[")[0]
        if not column or "." in column or conversion or spec not in ("", "letter", "letters"):
            raise ValueError(f"found {{{name}}}; write a column as {{NAME}}, {{NAME[0]}} or {{NAME:letters}}")
        yield column


def fill_template(template: str, record: Mapping[str, Any], place: str) -> str:
    """Return a template with values of a record in place of the columns that it names.

    Raises:
        DataError: a column is missing or null, or has a value that the template cannot format.
    """
    if missing := [column for column in template_columns(template) if record.get(column) is None]:
        found = ", ".join(map(str, record)) or "none"
        raise DataError(place, f"found the keys {found}, expected {missing[0]!r} with a value other than null")
    lines = template.removeprefix(_CONSTANT).replace("\\n", "\n").split("\n")
    try:
        texts = [(line, _ColumnFormatter().vformat(line, (), record)) for line in lines]
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(place, f"{template!r} cannot be filled: {error}") from error
    return "\n".join(text for line, text in texts if text or not line)  # without lines that contain only empty columns


class _ColumnFormatter(string.Formatter):
    """String formatter for templates: fields are columns of a record, and Python attributes are not accessible."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        column, *places = field_name.replace("]", "").split("[")
        value = kwargs[column]
        for at in places:
            value = value[int(at)] if isinstance(value, list) else value[at]
        return value, column

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec == "letter" and isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < len(_LETTERS):
                raise ValueError(f"found {value} for {{NAME:letter}}, expected a number from 0 to {len(_LETTERS) - 1}")
            return _LETTERS[value]
        items = _parse_list(value) if format_spec == "letters" else None
        if items is not None and len(items) <= len(_LETTERS):
            return "\n".join(f"{letter}. {_format_value(one)}" for letter, one in zip(_LETTERS, items, strict=False))
        if format_spec:
            kinds = {"letter": "an integer", "letters": f"a list of up to {len(_LETTERS)} items"}
            raise ValueError(f"found {short_repr(value)} for {{NAME:{format_spec}}}, expected {kinds[format_spec]}")
        return _format_value(value)


def _parse_list(value: Any) -> list[Any] | None:
    """Return `value` if it is a list, or the list that it contains as Python or JSON text; otherwise None."""
    if isinstance(value, str) and value.strip().startswith("[") and len(value) <= _MAX_LIST_LENGTH:
        try:
            with warnings.catch_warnings(action="ignore"):  # about a backslash that begins no escape
                value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    return value if isinstance(value, list) else None


def _format_value(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise ValueError(
            f"found {short_repr(value)}, expected a text or a number; for a list, write {{NAME[0]}} for its first "
            "item, or {NAME:letters} for all items labeled A, B, C"
        )
    return str(value)


# Names of Megatron-Bridge's schemas with audio, or with questions about the sound of videos.
_AUDIO_SCHEMAS = ("cv17", "default_audio", "valor32k_avqa")
_KINDS = {str: "string", list: "list", dict: "object", object: "value"}


@dataclass(frozen=True)
class NamedSchema:
    """One of Megatron-Bridge's record formats, such as "cord_v2". Picklable, for data-loading workers."""

    name: str  # Megatron-Bridge's name of the format
    keys: Mapping[str, type]  # required keys, with the type of their values; other keys are not read

    def convert_record(self, record: Any, place: str) -> dict[str, Any]:
        """Convert a record of this format to {"messages": [...]}; raise DataError if a value is missing or invalid."""
        from megatron.bridge.data.sources.hf_adapters import adapt_hf_dataset  # imported here because it is slow

        given = drop_nulls(record) if isinstance(record, dict) else {}
        for key, kind in self.keys.items():
            value = given.get(key)
            is_empty = kind is not object and not (value.strip() if isinstance(value, str) else value)
            if value is None or is_empty or not isinstance(value, kind):
                raise DataError(
                    place,
                    f"found {short_repr(value)} under {key!r}, expected a non-empty {_KINDS[kind]}; the keys are "
                    f"{_join_names(given)}, and schema {self.name} reads {' and '.join(self.keys)}",
                )
        for number, turn in enumerate(given["conversations"] if "conversations" in self.keys else (), start=1):
            said = turn.get("value") if isinstance(turn, dict) and turn.get("from") in ("human", "gpt") else None
            if not isinstance(said, str) or not said.strip():  # the adapter would skip it
                expected = "an object with 'from', human or gpt, and 'value', a non-empty string"
                raise DataError(f"{place}: turn {number}", f"found {short_repr(turn)}, expected {expected}")
        # The adapter gets a stand-in, replaced below: a video may be bytes, and paths follow our own rules.
        read = {key: "video" if key == "video" else given[key] for key in self.keys}
        settings = {"video_root_path": "."} if "video" in read else {}
        try:
            (adapted,) = adapt_hf_dataset([read], adapter_name=self.name, adapter_kwargs=settings)
        except Exception as error:  # the adapter does not check its records
            texts = {key: given[key] for key, kind in self.keys.items() if kind is not object}
            raise DataError(
                place,
                f"found {short_repr(texts)}, which schema {self.name} cannot read ({type(error).__name__}: {error})",
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
            # A turn of LLaVA-Video may be only the placeholder.
            if message["role"] == "assistant" and not all(isinstance(text, str) and text.strip() for text in texts):
                raise DataError(place, f"found {short_repr(texts)} as the answer, expected a non-empty string")
            messages.append(message)
        return convert_record({"messages": messages}, place, placeholders="text")

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`; raise DataError if one is missing."""
        if not set(self.keys) <= set(names):
            expected = " and ".join(map(repr, self.keys))
            raise DataError(
                place, f"found the columns {_join_names(names)}, expected {expected} under schema {self.name}"
            )
        return list(self.keys)

    def key_for_column(self, column: str) -> str:
        """Return the name of the column, which is also its key in a record."""
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
_OPTIONAL_KEYS = (*MEDIA_KEYS, FPS_KEY, "system", "tools")  # optional in a record
_PAIRED = {*PROMPT_KEYS, *PROMPT_KEYS.values(), "input"}
# Rejected answers of preference data: `rejected` in TRL and LLaMA-Factory, `rejected_response` in ms-swift and so on.
REJECTED_KEY = re.compile(r"reject(ed)?(_\w+)?")
# Keys of the relevant document of a query, in data for embedding models and rerankers.
POSITIVE_KEYS = ("positive", "positives", "pos", "positive_messages")
# Advice in errors about records for another objective.
OTHER_OBJECTIVES = (
    "objective.kind must fit the records: sft for conversations, dpo for 'chosen' and 'rejected', kto for answers with "
    "a 'label', embedding or reranker for 'query' and 'positive'"
)
# Keys of KTO data (TRL, LLaMA-Factory) and the values that mark a bad answer. In many data sets `label` is a class.
DESIRABLE: Mapping[str, tuple[Any, ...]] = {
    "label": (False,), "kto_tag": (False, 0, "false", "False"), "desirable": (False,)
}  # fmt: skip
_ANY = "*"  # in a column's name, any number


@dataclass(kw_only=True)
class Columns:
    r"""Names of the columns of a data set, where they differ from the default names (docs/data.md).

    Media may be in several columns: "image_*" means image_1, image_2 and so on, in numerical order, as many as a record
    has. `system`, `question` and `answer` may also be templates: texts with a brace, or that begin with "text:". In a
    template

        {question}           is the text or the number in a column
        {answers[0]}         is the first of a list; {answers[0][answer]} a value of an object there
        {choices:letters}    is a list, one item per line, as "A. ...", "B. ..."; also a text "['six', 'seven']"
        {answer:letter}      is the letter of a number that counts from 0
        {{ and }}            are braces
        \n                   is the end of a line

    A line of a template is left out if all its columns are empty: in "{hint}\n{question}" without a hint, and
    "{options:letters}" for an empty list.
    """

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

    # Whether each record also gets a conversation with the answer of another record, see `MismatchedAnswers`.
    adds_mismatched_answers: ClassVar[bool] = False

    @classmethod
    def of(cls, columns: Columns) -> Self:
        """Return a copy of `columns` as an instance of this class, for example of `PairColumns`."""
        return cls(**{field.name: getattr(columns, field.name) for field in fields(Columns)})

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Columns:
        """Parse command-line values such as "image=img" and "ignore=thumbnail,preview".

        Raises:
            ValueError: a word is not KEY=COLUMN, or its key is unknown or was given before.
        """
        given: dict[str, Any] = {}
        names = [field.name for field in fields(cls)]
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name not in names or name in given:
                expected = f"KEY=COLUMN, each key once, with KEY one of {_join_names(names)}"
                raise ValueError(f"columns has {word!r}, expected {expected}")
            given[name] = tuple(value.split(",")) if name == "ignore" else value
        return cls.from_mapping(given, "columns")

    @classmethod
    def from_mapping(cls, given: Any, where: str) -> Columns:
        """Create `Columns` from a mapping of field names to values, as in YAML; raise ValueError for unknown keys.

        `where` is the name of the setting, for the error message.
        """
        names = [field.name for field in fields(cls)]
        if not isinstance(given, Mapping) or not set(given) <= set(names):
            raise ValueError(f"{where} is {given!r}, expected {{KEY: COLUMN}} with keys of {_join_names(names)}")
        columns = cls(**given)
        columns.check()
        return columns

    def check(self) -> None:
        """Raise ValueError for a field that is neither a valid column name nor a valid template."""
        if self.placeholders not in ("media", "text"):
            raise ValueError(f"columns.placeholders is {self.placeholders!r}, expected 'media' or 'text'")
        if isinstance(self.ignore, str) or not all(isinstance(name, str) and name for name in self.ignore):
            raise ValueError(f"columns.ignore is {self.ignore!r}, expected a list of columns, such as [thumbnail]")
        for key, value in self._set_fields().items():
            if not isinstance(value, str) or not value:
                raise ValueError(f"columns.{key} is {value!r}, expected the name of a column")
            if key in _TEXTS and is_template(value):
                try:
                    list(template_columns(value))
                except ValueError as error:
                    raise ValueError(f"columns.{key} is {value!r}, expected a template: {error}") from error
            elif _ANY in value and (key not in MEDIA_KEYS or value.count(_ANY) > 1 or value == _ANY):
                raise ValueError(
                    f"columns.{key} is {value!r}, expected the name of a column; for {', '.join(MEDIA_KEYS)} one '*' "
                    "in the name may stand for numbers, such as 'image_*'"
                )
        read = self._column_keys(self.ignore)
        if left := [name for name in self.ignore if name in read]:
            raise ValueError(
                f"columns.ignore has {left[0]!r}, but columns.{read[left[0]]} reads it; remove it from one of them"
            )

    @property
    def name(self) -> str:
        """Return a text that lists the fields that are set: "of columns image='img'", or "" if there are none."""
        names = ", ".join(f"{key}={value!r}" for key, value in self.settings().items())
        return names and f"of columns {names}"

    def settings(self) -> dict[str, Any]:
        """Return the fields that differ from the defaults, by name."""
        ignored = {"ignore": list(self.ignore)} if self.ignore else {}
        return {**self._set_fields(), **ignored, **({} if self.placeholders == "media" else {"placeholders": "text"})}

    def key_for_column(self, column: str) -> str:
        """Return the key under which a column is stored in a record, such as "image".

        If no setting names the column, the key is the name of the column.
        """
        return next((key for key, value in self._set_fields().items() if value == column), column)

    def convert_record(self, record: Any, place: str) -> Any:
        """Rename the columns of a record, and convert it to {"messages": [...]}.

        Raises:
            DataError: the record lacks a column that a setting names, or its format is not supported.
        """
        if not isinstance(record, dict):
            return record
        names, record = record.keys(), drop_nulls(record)
        said = [key for key, value in record.items() if not isinstance(value, (bool, int, float))]
        self._check_conflicts(said, place)
        self._check_kto_label(record, place)
        replaced = self._replaced_keys(record)
        own = {key: value for key, value in record.items() if key not in replaced}
        for key, value in self._set_fields().items():
            if key in _TEXTS and is_template(value):
                own[key] = fill_template(value, record, f"{place}: columns.{key}")
                continue
            if several := _numbered_columns(value, names):
                media = [record.get(column) for column in several]
                while media and is_empty_medium(media[-1]):  # empty ones before others raise elsewhere
                    media.pop()
                own[key] = media
                continue
            # A record with turns may lack media and rates: placeholders and lists of frames show what is missing.
            turns = (self.messages, self.conversations, record.get("messages"), record.get("conversations"))
            has_turns = any(given is not None for given in turns)
            may_lack = key == FPS_KEY or (key in MEDIA_KEYS and has_turns)
            if value not in names if key in _OPTIONAL_KEYS and not may_lack else value not in record and not may_lack:
                raise DataError(place, f"found the keys {_join_names(record)}, expected {value!r} (columns.{key})")
            if value in record:
                own[key] = record[value]
        return convert_record(own, place, placeholders=self.placeholders)

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`.

        Raises:
            DataError: a column that a setting names does not exist, or there is neither a column of messages nor
                a pair of columns with questions and answers.
        """
        columns = self._column_keys(names)
        asked = {**columns, **dict.fromkeys(self.ignore, "ignore")}
        for column, key in asked.items():
            if column not in names:
                raise DataError(place, f"found the columns {_join_names(names)}, expected {column!r} (columns.{key})")
        replaced, given = self._replaced_keys(names), {*self._set_fields()}
        known = [name for name in names if name in KEYS and name not in replaced]
        # A row is checked when it is read, because null counts as missing.
        asked_for = {*known, *given}
        if not asked_for & {*TURN_KEYS} and not any({*pair} <= asked_for for pair in PROMPT_KEYS.items()):
            raise DataError(place, f"found the columns {_join_names(names)}, expected {EXPECTED_KEYS}")
        return [name for name in names if name in known or name in columns]

    def _check_conflicts(self, keys: Collection[str], place: str) -> None:
        """Raise DataError if the keys of a record conflict with the settings.

        Conflicts are a rejected answer (preference data), and messages next to columns.question or columns.answer.
        """
        read = {*self.ignore, *self._column_keys(keys)}
        if worse := next((key for key in keys if REJECTED_KEY.fullmatch(str(key)) and key not in read), None):
            raise DataError(
                place,
                f"found {worse!r}, a key of preference data, of which supervised training would learn only the other "
                "answer. To train on pairs, set objective.kind=dpo (recipes such as qwen3_vl_8b_dpo_config); if "
                f"supervised training is intended, set columns.ignore=[{worse}]",
            )
        if {"query", "anchor", "messages"} & {*keys} and (found := {*POSITIVE_KEYS} & {*keys} - read):
            raise DataError(
                place,
                f"found {min(found)!r} next to a query, expected a conversation: {OTHER_OBJECTIVES}. If the key means "
                f"something else, set columns.ignore=[{min(found)}]",
            )
        asked = next((key for key in ("question", "answer") if getattr(self, key) is not None), None)
        turns = [key for key in keys if key in TURN_KEYS and key not in self.ignore]
        if asked and turns:
            raise DataError(
                place,
                f"found {turns[0]!r} in addition to columns.{asked}, expected one of them: ignore the other "
                f"(columns.ignore=[{turns[0]}])",
            )

    def _check_kto_label(self, record: Mapping[str, Any], place: str) -> None:
        """Raise DataError if a key of the record marks its answer as undesirable, as in KTO data."""
        for key, values in DESIRABLE.items():
            found = record.get(key)
            is_class = key == "label" and (found is not False or "question" in record)  # as of yes-or-no questions
            if found in values and not is_class and key not in {*self.ignore, *self._column_keys(record)}:
                raise DataError(
                    place,
                    f"{key!r} is {json.dumps(found)}, which marks an undesirable answer in KTO data; supervised "
                    "training would learn this answer. To train on labeled answers, set objective.kind=kto; if the "
                    f"key means something else, set columns.ignore=[{key}]",
                )

    def _replaced_keys(self, names: Collection[str]) -> set[str]:
        """Return the record keys that are not read under their own names, because settings replace or ignore them."""
        given = self._set_fields()
        other = _PAIRED - {"question", "answer"} if {"question", "answer"} & given.keys() else set()
        return {*given, *self._column_keys(names), *other, *self.ignore}

    def _set_fields(self) -> dict[str, Any]:
        """Return the fields that name a column or a template, as a dict from field name to value."""
        keys = (field.name for field in fields(self) if field.name not in ("ignore", "placeholders"))
        return {key: value for key in keys if (value := getattr(self, key)) is not None}

    def _column_keys(self, names: Collection[str]) -> dict[str, str]:
        """Return a dict from each column that the settings name to the key that it is read as."""
        found: dict[str, str] = {}
        for key, value in self._set_fields().items():
            template = key in _TEXTS and is_template(value)
            found |= dict.fromkeys(
                template_columns(value) if template else _numbered_columns(value, names) or [value], key
            )
        return found


Schema = NamedSchema | Columns
DEFAULT_COLUMNS = Columns()  # our own names


def find_schema(name: str | None, columns: Columns) -> Schema:
    """Return the schema named `name`, or `columns` if `name` is None.

    Raises:
        ValueError: there is no schema with this name, `columns` is invalid, or both are set.
    """
    columns.check()
    if name is None:
        return columns
    if name not in SCHEMAS:
        audio = ", which contains audio that the model does not support;" if name in _AUDIO_SCHEMAS else ","
        raise ValueError(f"schema_adapter is {name!r}{audio} expected one of {', '.join(SCHEMAS)}, or none")
    if type(columns) is not Columns:
        raise ValueError(
            f"schema_adapter is {name!r}, which reads conversations, expected None: it is for objective.kind=sft"
        )
    if columns.name:
        raise ValueError(
            f"schema_adapter is {name!r}, which has fixed column names, but there is also a schema {columns.name}; "
            "set only schema_adapter or only columns"
        )
    return SCHEMAS[name]


def add_schema_name(fingerprint: str, schema: Schema) -> str:
    """Return the fingerprint of a source, followed by the name of its schema, which affects the tokens of a record."""
    return f"{fingerprint}, schema {schema.name}" if schema.name else fingerprint


def _join_names(names: Any) -> str:
    return ", ".join(map(str, names)) or "none"


def _numbered_columns(pattern: str, names: Collection[str]) -> list[str]:
    """Return the columns that match a pattern such as "image_*", in numerical order; [] for a name without "*"."""
    before, star, behind = pattern.partition(_ANY)
    if not star:
        return []
    matches = [re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(behind)}", str(name)) for name in names]
    return [match[0] for match in sorted(filter(None, matches), key=lambda match: int(match[1]))]

"""Preference data: pairs of answers, labeled answers, and their log-probabilities under a reference model.

A pair becomes two records of supervised data, one for each answer, which are read like any other. The formats are TRL's
(`chosen` and `rejected`, with `prompt` or with the prompt at the beginning of both), ms-swift's (`rejected_response` or
`rejected_messages` next to a conversation) and LLaMA-Factory's (`chosen` and `rejected` next to a question or turns).

A labeled answer (KTO) is a record of supervised data with `label`, `kto_tag` or `desirable`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.core.files import parse_json, parse_record
from qwen3vl_bridge.data.conversations import (
    DESIRABLE,
    OTHER_OBJECTIVES,
    REJECTED_KEY,
    Columns,
    GroupRecord,
    is_template,
)
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.records import (
    KEYS_OF_KIND,
    LOSS_KEYS,
    PROMPT_KEYS,
    SPEAKERS,
    TURN_KEYS,
    drop_nulls,
    short_repr,
)
from qwen3vl_bridge.data.samples import SampleFilter
from qwen3vl_bridge.data.sources import Conversations

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_REJECTED_KEYS = ("rejected", "rejected_response", "rejected_messages")
# Keys of the prompt that a record repeats if `chosen` and `rejected` begin with it.
_QUESTION_KEYS = {*TURN_KEYS, *PROMPT_KEYS, *PROMPT_KEYS.values(), "input", "history"}
_REJECTED_IMAGES = "rejected_images"  # ms-swift's images of the rejected answer, where they differ
_OTHER_MEDIA = ("rejected_image", "rejected_video", "rejected_videos")
_EXPECTED = (
    "a chosen and a rejected answer: 'chosen' and 'rejected', or 'rejected_response' next to a conversation; "
    + OTHER_OBJECTIVES
)


@dataclass(kw_only=True)
class PairColumns(Columns):
    """Column names of a data set of pairs. Set `answer` if the column of the chosen answer is not named "chosen"."""

    @property
    def name(self) -> str:
        """Return a text that identifies the schema, which is part of the fingerprint of a data set."""
        return f"{super().name} of pairs".strip()

    def convert_record(self, record: Any, place: str) -> Any:
        """Return a `GroupRecord` of two conversations, with the chosen answer and with the rejected answer.

        Raises:
            DataError: the record has no pair of answers, or its format is not supported.
        """
        if not isinstance(record, dict):
            return record
        chosen, rejected = self._split(drop_nulls(record), place)
        places = (place, f"{place} (rejected)")
        convert = super().convert_record
        converted = [convert(*one) for one in zip((chosen, rejected), places, strict=True)]
        if "history" in chosen:  # its answers belong to the prompt
            for one in converted:
                one["messages"] = [*map(_without_loss, one["messages"][:-1]), one["messages"][-1]]
        return GroupRecord(converted[0], [("rejected", converted[1])])

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`; raise DataError if there are no pairs."""
        if not any(key in names for key in _REJECTED_KEYS):
            raise DataError(place, f"found the columns {', '.join(names)}, expected {_EXPECTED}")
        read = super().columns_to_read([*names, "messages"], place)  # the turns may be in the columns of the answers
        return [name for name in names if name in read or name in ("chosen", *_REJECTED_KEYS, _REJECTED_IMAGES)]

    def _split(self, record: dict[str, Any], place: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two records of supervised data: with the chosen answer, and with the rejected answer.

        Raises:
            DataError: the record is not a valid pair.
        """
        keys = [key for key in _REJECTED_KEYS if key in record and key not in self.ignore]
        if len(keys) != 1:
            found = f"both {' and '.join(map(repr, keys))}" if keys else f"the keys {', '.join(map(str, record))}"
            raise DataError(place, f"found {found}, expected {_EXPECTED}")
        if others := [key for key in _OTHER_MEDIA if key in record and key not in self.ignore]:
            raise DataError(place, f"found {others[0]!r}, expected only {_REJECTED_IMAGES!r} for the rejected answer")
        chosen, rejected = record.get("chosen"), record[keys[0]]
        if chosen is not None and self.answer is not None:
            raise DataError(place, f"found 'chosen' next to columns.answer={self.answer!r}, expected one of them")
        own = {key: record[key] for key in record if key != "chosen" and not REJECTED_KEY.fullmatch(str(key))}
        names = (self.messages or "messages", self.conversations or "conversations")
        turns_key = next((name for name in names if name in own), None)
        turns = None if turns_key is None else _parse_turns(own[turns_key], place)
        full = turns if chosen is None else chosen
        if _has_prompt(full) and _has_prompt(rejected):
            prompt, chosen, rejected = _common_prompt(full, rejected, place)
            for key in [key for key in own if key in _QUESTION_KEYS]:
                if not _repeats(own.pop(key), prompt, full):
                    raise DataError(
                        place,
                        f"the text of {key!r} differs from the beginning of both conversations, expected the same",
                    )
        elif turns is not None:
            prompt, chosen = (turns[:-1], turns[-1:]) if chosen is None else (turns, chosen)
        elif (answer := self._answer_key(own)) is not None:
            chosen = own.get(answer) if chosen is None else chosen
            if chosen == rejected and _REJECTED_IMAGES not in record:
                raise DataError(place, "found equal answers, expected two different ones")
            return own | {answer: chosen}, self._with_rejected_images(own, record) | {answer: rejected}
        else:
            found = f"'chosen' {short_repr(chosen)} and {keys[0]!r} {short_repr(rejected)}"
            raise DataError(
                place, f"found {found} without a question: add 'prompt', or begin both with messages of the question"
            )
        answers = [_as_messages(answer) for answer in (chosen, rejected)]
        if answers[0] == answers[1] and _REJECTED_IMAGES not in record:
            raise DataError(place, "found equal answers, expected two different ones")
        roles = [_role(answer[0]) for answer in answers if answer]
        if not prompt or _role(prompt[-1]) == "assistant" or len(roles) < 2 or {"user", "system"} & {*roles}:
            raise DataError(
                place, "found no prompt that ends with a question, followed by a chosen and a rejected answer to it"
            )
        prompt = [_without_loss(message) for message in prompt]
        first, second = ({turns_key or "messages": [*prompt, *answer]} for answer in answers)
        return own | first, self._with_rejected_images(own, record) | second

    def _with_rejected_images(self, own: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        """Return `own` with the images of the rejected answer, if `record` has separate images for it."""
        if _REJECTED_IMAGES not in record:
            return own
        name = self.images or self.image or "images"
        others = {key: value for key, value in own.items() if key not in {*KEYS_OF_KIND["image"], name}}
        return others | {name: record[_REJECTED_IMAGES]}

    def _answer_key(self, record: Mapping[str, Any]) -> str | None:
        """Return the key of a record under which an answer to its question is stored; None if it has no question."""
        if self.answer is not None and not is_template(self.answer):
            return self.answer
        if self.question is not None:
            return "answer"
        return next((answer for question, answer in PROMPT_KEYS.items() if question in record), None)


@dataclass(kw_only=True)
class LabeledColumns(Columns):
    """Names of the columns of KTO data: conversations with a label that says whether the last answer is desirable."""

    adds_mismatched_answers: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Return a text that identifies the schema, which is part of the fingerprint of a data set."""
        return f"{super().name} of labeled answers".strip()

    def convert_record(self, record: Any, place: str) -> Any:
        """Return the conversation and its label as a `GroupRecord`; only the last answer is trained on.

        Raises:
            DataError: the record has no label, or does not end with an answer.
        """
        if not isinstance(record, dict):
            return record
        given = drop_nulls(record)
        key = self._label_key(given, place)
        label = str(given.pop(key)).lower()
        if label not in _LABELS:
            expected = "true for a desirable or false for an undesirable answer"
            raise DataError(place, f"found {short_repr(record[key])} under {key!r}, expected {expected}")
        own = super().convert_record(given, place)
        messages = own.get("messages")
        if not isinstance(messages, list) or not messages or _role(messages[-1]) != "assistant":
            raise DataError(place, f"found {short_repr(messages)} as messages, expected a conversation with an answer")
        *prompt, answer = messages
        if any(part.get("type") != "text" for part in _parts(answer)):
            raise DataError(place, "found an image or video in the answer, expected only text: the answer is also used "
                            "with the prompt of another record")  # fmt: skip
        return GroupRecord(own | {"messages": [*map(_without_loss, prompt), answer]}, is_desirable=_LABELS[label])

    def columns_to_read(self, names: Sequence[str], place: str) -> list[str]:
        """Return the columns to read from a table with the columns `names`; raise DataError if there is no label."""
        read = {self._label_key(names, place), *super().columns_to_read(names, place)}
        return [name for name in names if name in read]

    def _label_key(self, names: Collection[str], place: str) -> str:
        keys = [key for key in DESIRABLE if key in names and key not in self.ignore]
        if len(keys) != 1:
            found = " and ".join(map(repr, keys)) or ", ".join(map(str, names))
            raise DataError(
                place,
                f"found {found}, expected one of {', '.join(map(repr, DESIRABLE))}, which says whether the answer is "
                f"desirable; {OTHER_OBJECTIVES}",
            )
        return keys[0]


_LABELS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content parts of a converted message, or an empty list if the content is a text."""
    return message["content"] if isinstance(message.get("content"), list) else []


def _parse_turns(turns: Any, place: str) -> list[Any]:
    """Return a list of messages, decoded if it is JSON text; raise DataError for an empty list or another value."""
    if isinstance(turns, str):
        try:
            turns = parse_record(turns)
        except ValueError as error:
            raise DataError(place, f"found messages that are not valid JSON ({error})") from error
    if not isinstance(turns, list) or not turns:
        raise DataError(place, f"found {short_repr(turns)}, expected a list of messages")
    return turns


def _role(message: Any) -> str | None:
    role = message.get("role", message.get("from")) if isinstance(message, dict) else None
    return SPEAKERS.get(role, role) if isinstance(role, str) else None


def _has_prompt(turns: Any) -> TypeGuard[list[Any]]:
    """Return whether a value is a conversation that begins with a prompt, and not only an answer."""
    return isinstance(turns, list) and bool(turns) and _role(turns[0]) not in ("assistant", None)


def _common_prompt(chosen: list[Any], rejected: list[Any], place: str) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the messages that both conversations begin with, the rest of `chosen`, and the rest of `rejected`.

    Raises:
        DataError: one conversation begins with the other, or they are equal.
    """
    same = next((i for i, pair in enumerate(zip(chosen, rejected, strict=False)) if pair[0] != pair[1]), None)
    if same is None:
        raise DataError(place, "found equal conversations, or one that begins with the other, expected two answers")
    return chosen[:same], chosen[same:], rejected[same:]


def _repeats(value: Any, prompt: list[Any], full: list[Any]) -> bool:
    """Return whether `value`, from a key such as "prompt", only repeats text of a conversation.

    A list must equal the first messages of the conversation `full`. Another value must be empty, or be the content of
    a message in `prompt`.
    """
    if isinstance(value, list):
        return value == full[: len(value)]
    texts = [message.get("content", message.get("value")) for message in prompt if isinstance(message, dict)]
    return not value or value in texts


def _as_messages(answer: Any) -> list[Any]:
    """Return an answer, which may be a text, a message or several messages, as a list of messages."""
    if isinstance(answer, str):
        return [{"role": "assistant", "content": answer}]
    return answer if isinstance(answer, list) else [answer]


def _without_loss(message: Any) -> Any:
    """Return a message of a prompt. If it is an answer, mark it so that it is not trained on."""
    if _role(message) != "assistant":
        return message
    return {key: value for key, value in message.items() if key not in LOSS_KEYS} | {"loss": False}


def reference_rules(source: Conversations, sample_filter: SampleFilter) -> dict[str, str]:
    """Return fingerprints of the data and of the encoding, to detect log-probabilities that no longer fit them."""
    return {"data": source.fingerprint(), "encoding": sample_filter.encoder.fingerprint}


def write_reference_logps(folder: Path, split: str, logps: Tensor, rules: Mapping[str, str], model: str) -> Path:
    """Write log-probabilities [samples, 2] of a split's chosen and rejected answers, and return the file.

    Args:
        folder: created if necessary.
        split: "train", "valid" or "test".
        logps: float64; NaN for samples that were dropped.
        rules: from `reference_rules`.
        model: digest of the weights, from `weights_digest`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{split}.safetensors"
    metadata = {"rules": json.dumps(dict(rules)), "model": model}
    replace_file(path, safetensors.torch.save({"logps": logps.contiguous()}, metadata))
    return path


def read_reference_logps(folder: str | Path, split: str, rules: Mapping[str, str]) -> Tensor:
    """Return the log-probabilities [samples, 2] of a split.

    Raises:
        DataError: the file is missing or damaged, or was written for other `rules` (see `reference_rules`).
    """
    metadata, logps = _read(folder, split)
    found = parse_json(metadata["rules"])
    if names := [name for name in rules if found.get(name) != rules[name]]:
        differ = "; ".join(f"{name} {found.get(name)}, expected {rules[name]}" for name in names)
        raise DataError(
            str(Path(folder, f"{split}.safetensors")),
            f"the log-probabilities were computed for other data or another chat template: found {differ}. Run "
            "`qwen3vl data score` with the data set and the settings of this run",
        )
    return logps


def reference_model_digest(folder: str | Path, split: str) -> str:
    """Return the digest of the model weights with which the log-probabilities of a split were computed."""
    return _read(folder, split)[0]["model"]


def _read(folder: str | Path, split: str) -> tuple[dict[str, str], Tensor]:
    path = Path(folder, f"{split}.safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            metadata, logps = file.metadata(), file.get_tensor("logps")
        assert {"rules", "model"} <= metadata.keys() and logps.dtype == torch.float64
    except (OSError, SafetensorError, AssertionError, AttributeError) as error:
        raise DataError(
            str(path), f"cannot read log-probabilities ({error}), expected a file that `qwen3vl data score` writes"
        ) from error
    return metadata, logps

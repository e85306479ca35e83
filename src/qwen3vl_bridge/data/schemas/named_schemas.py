"""Record formats of published data sets, chosen by the names that Megatron-Bridge has for them.

| name | as published by | a record | becomes |
|---|---|---|---|
| `cord_v2` | naver-clova-ix/cord-v2 | image, ground_truth | "Describe this image.", the receipt's fields |
| `rdr` | quintend/rdr-items | image, text | "Describe this image.", the text |
| `medpix` | mmoukouba/MedPix-VQA | image_id (the image), question, answer | both |
| `raven` | HuggingFaceM4/the_cauldron, raven | images, texts | all images, the first of the texts |
| `llava_video_178k` | lmms-lab/LLaVA-Video-178K | video, conversations | all turns |
| `squad` | rajpurkar/squad | context, question, answers | context and question, the first answer |
| `gsm8k` | openai/gsm8k | question, answer | both |
| `openmathinstruct2` | nvidia/OpenMathInstruct-2 | problem, generated_solution | both |
| `openmathinstruct2_thinking` | the same | the same, expected_answer | the solution as reasoning, that answer |

`ground_truth` of `cord_v2` is a string of JSON with "gt_parse" (or "gt_parses", a list whose first entry counts). The
answer is that object as tags, keys in reverse alphabetical order, items of a list with "<sep/>" between:
{"total": {"total_price": "45"}} is "<s_total><s_total_price>45</s_total_price></s_total>".

`texts` of `raven` are objects with "user" and "assistant". `conversations` of `llava_video_178k` are turns with "from"
("human" or "gpt") and "value"; the video stands before the first of the user's words, whatever "<image>" or "<video>"
they hold, and its path is relative to the media root, which Megatron-Bridge calls `video_root_path`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.io.parsing import parse_record

# Names of Megatron-Bridge's schemas with audio, or with videos asked about by their sound.
_SOUND = ("cv17", "default_audio", "valor32k_avqa")
_SPEAKERS = ("human", "gpt")


def _nothing(record: dict[str, Any], place: str) -> None:
    """For schemas that need no check other than that of keys and strings."""


@dataclass(frozen=True)
class NamedSchema:
    """A record format. Picklable, for data-loading workers.

    Attributes:
        name: Megatron-Bridge's.
        keys: required keys; others are not read.
        texts: keys whose values are non-empty strings.
        check: refuses other values that the adapter could not translate, or would omit; called with the record and its
            position.
    """

    name: str
    keys: tuple[str, ...]
    texts: tuple[str, ...] = ()
    check: Callable[[dict[str, Any], str], None] = _nothing

    def messages_of(self, record: Any, place: str) -> dict[str, Any]:
        """Convert a record to our own spelling.

        Raises:
            DataError: a record that is not of this format.
        """
        from megatron.bridge.data.sources.hf_adapters import adapt_hf_dataset  # imported here because it is slow

        given = record if isinstance(record, dict) else {}
        missing = [key for key in self.keys if given.get(key) is None]
        if missing:
            found = f"the keys {', '.join(map(str, given)) or 'none'}" if given is record else type(record).__name__
            raise DataError(place, f"found {found}, expected {' and '.join(self.keys)} under schema {self.name}")
        for key in self.texts:
            _check_text(given[key], repr(key), place)
        self.check(given, place)
        # A video may be contents, and a path follows our own rules: both are inserted in place of a stand-in.
        read = {key: "video" if key == "video" else given[key] for key in self.keys}
        settings = {"video_root_path": "."} if "video" in read else {}
        (adapted,) = adapt_hf_dataset([read], adapter_name=self.name, adapter_kwargs=settings)
        return {"messages": _own_messages(adapted, given.get("video"))}


def _own_messages(adapted: dict[str, Any], video: Any) -> list[dict[str, Any]]:
    """Convert an adapter's result to our messages."""
    if "completion" in adapted:
        pair = (("user", adapted["prompt"]), ("assistant", adapted["completion"]))
        return [{"role": role, "content": text} for role, text in pair]
    messages = []
    for message in adapted.get("conversation") or adapted["messages"]:
        own = {"reasoning_content" if key == "thinking" else key: value for key, value in message.items()}
        if isinstance(own["content"], list):
            own["content"] = [
                {"type": "video", "video": video} if part["type"] == "video" else part for part in own["content"]
            ]
        messages.append(own)
    return messages


def _check_text(value: Any, name: str, place: str) -> None:
    if not isinstance(value, str) or not value.strip():
        found = "an empty string" if isinstance(value, str) else type(value).__name__
        raise DataError(place, f"found {found} under {name}, expected a non-empty string")


def _check_cord_v2(record: dict[str, Any], place: str) -> None:
    text = record["ground_truth"]
    if not isinstance(text, str):
        raise DataError(place, f"found {type(text).__name__} under 'ground_truth', expected a string of JSON")
    try:
        truth = parse_record(text)
    except ValueError as error:
        raise DataError(
            place, f"found a 'ground_truth' that is not valid JSON ({error}), expected an object"
        ) from error
    parses = truth.get("gt_parses", [truth.get("gt_parse")]) if isinstance(truth, dict) else None
    if not isinstance(parses, list) or not parses or not isinstance(parses[0], dict) or not parses[0]:
        raise DataError(
            place,
            f"found {text[:57]!r} as 'ground_truth', expected an object with 'gt_parse', an object that is not empty, "
            "or with 'gt_parses', a list of them",
        )


def _check_raven(record: dict[str, Any], place: str) -> None:
    for key, items in (("images", "images"), ("texts", "objects with 'user' and 'assistant'")):
        if not isinstance(record[key], list) or not record[key]:
            found = "an empty list" if record[key] == [] else type(record[key]).__name__
            raise DataError(place, f"found {found} under {key!r}, expected a list of {items}")
    first = record["texts"][0]
    if not isinstance(first, dict):
        raise DataError(place, f"found {type(first).__name__} as the first of 'texts', expected an object")
    for key in ("user", "assistant"):
        _check_text(first.get(key), f"{key!r} of the first of 'texts'", place)


def _check_llava_video(record: dict[str, Any], place: str) -> None:
    turns = record["conversations"]
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise DataError(place, f"found {found} under 'conversations', expected a list of turns")
    for number, turn in enumerate(turns, start=1):
        where = f"{place}: turn {number}"
        speaker = turn.get("from") if isinstance(turn, dict) else None
        if speaker not in _SPEAKERS:
            found = f"the speaker {speaker!r}" if isinstance(turn, dict) else type(turn).__name__
            raise DataError(where, f"found {found}, expected an object with 'from', {' or '.join(_SPEAKERS)}")
        _check_text(turn.get("value"), "'value'", where)


def _check_squad(record: dict[str, Any], place: str) -> None:
    answers = record["answers"]
    texts = answers.get("text") if isinstance(answers, dict) else None
    if not isinstance(texts, list) or not texts:
        raise DataError(place, f"found {str(answers)[:57]} under 'answers', expected an object with 'text', a list")
    _check_text(texts[0], "the first 'text' of 'answers'", place)


_MATH = ("problem", "generated_solution", "expected_answer")
SCHEMAS = {
    schema.name: schema
    for schema in (
        NamedSchema("cord_v2", ("image", "ground_truth"), check=_check_cord_v2),
        NamedSchema("rdr", ("image", "text"), texts=("text",)),
        NamedSchema("medpix", ("image_id", "question", "answer"), texts=("question", "answer")),
        NamedSchema("raven", ("images", "texts"), check=_check_raven),
        NamedSchema("llava_video_178k", ("video", "conversations"), check=_check_llava_video),
        NamedSchema("squad", ("context", "question", "answers"), texts=("context", "question"), check=_check_squad),
        NamedSchema("gsm8k", ("question", "answer"), texts=("question", "answer")),
        NamedSchema("openmathinstruct2", _MATH, texts=_MATH),
        NamedSchema("openmathinstruct2_thinking", _MATH, texts=_MATH),
    )
}


def named_schema(name: str | None) -> NamedSchema | None:
    """The schema of a name; None for records that need none.

    Raises:
        ValueError: an unknown schema, or one whose records the model does not support.
    """
    if name is None:
        return None
    known = f"expected one of {', '.join(SCHEMAS)}, or none"
    if name in _SOUND:
        raise ValueError(
            f"schema_adapter is {name!r}, whose records contain audio, which the model does not support; {known}"
        )
    if name not in SCHEMAS:
        raise ValueError(f"schema_adapter is {name!r}, {known}")
    return SCHEMAS[name]

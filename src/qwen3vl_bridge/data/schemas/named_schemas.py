"""Record formats of published data sets, chosen by the names that Megatron-Bridge has for them.

What lives here: which keys such a record has, what is checked before Megatron-Bridge's adapter translates it, and the
result in our own spelling. What may not: the translations themselves, which are Megatron-Bridge's, so that the target
text of a data set is the same here and there; spellings that need no name (`spellings.py`).

`cord_v2` is the format of `naver-clova-ix/cord-v2`: an image, and "ground_truth", a string of JSON with "gt_parse" (or
"gt_parses", a list whose first entry counts). The answer is that object as tags, keys in reverse alphabetical order,
items of a list with "<sep/>" between: {"total": {"total_price": "45"}} is
"<s_total><s_total_price>45</s_total_price></s_total>". The question is "Describe this image.".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.spellings import messages_of
from qwen3vl_bridge.files.parsing import parse_record


@dataclass(frozen=True)
class NamedSchema:
    """A record format. Picklable, for data-loading workers.

    Attributes:
        name: Megatron-Bridge's.
        keys: that a record must have; others are not read.
        check: refuses values that the adapter could not translate; called with the record and its place.
    """

    name: str
    keys: tuple[str, ...]
    check: Callable[[dict[str, Any], str], None]

    def messages_of(self, record: Any, place: str) -> dict[str, Any]:
        """A record in our own spelling.

        Raises:
            DataError: a record that is not of this format.
        """
        from megatron.bridge.data.sources.hf_adapters import adapt_hf_dataset  # imports much, for who needs it alone

        given = record if isinstance(record, dict) else {}
        missing = [key for key in self.keys if given.get(key) is None]
        if missing:
            found = f"the keys {', '.join(map(str, given)) or 'none'}" if given is record else type(record).__name__
            raise DataError(place, f"found {found}, expected {' and '.join(self.keys)} under schema {self.name}")
        self.check(given, place)
        (adapted,) = adapt_hf_dataset([{key: given[key] for key in self.keys}], adapter_name=self.name)
        return {"messages": adapted["conversation"]}


def _check_cord_v2(record: dict[str, Any], place: str) -> None:
    text = record["ground_truth"]
    if not isinstance(text, str):
        raise DataError(place, f"found {type(text).__name__} under 'ground_truth', expected a string of JSON")
    try:
        truth = parse_record(text)
    except ValueError as error:
        raise DataError(place, f"found a 'ground_truth' that is no JSON ({error}), expected an object") from error
    parses = truth.get("gt_parses", [truth.get("gt_parse")]) if isinstance(truth, dict) else None
    if not isinstance(parses, list) or not parses or not isinstance(parses[0], dict) or not parses[0]:
        raise DataError(
            place,
            f"found {text[:57]!r} as 'ground_truth', expected an object with 'gt_parse', an object that is not empty, "
            "or with 'gt_parses', a list of them",
        )


SCHEMAS = {
    schema.name: schema for schema in (NamedSchema("cord_v2", keys=("image", "ground_truth"), check=_check_cord_v2),)
}


def named_schema(name: str | None) -> NamedSchema | None:
    """The schema of a name; None for records that need none.

    Raises:
        ValueError: no such schema.
    """
    if name is not None and name not in SCHEMAS:
        raise ValueError(f"schema_adapter is {name!r}, expected one of {', '.join(SCHEMAS)}, or none")
    return None if name is None else SCHEMAS[name]


def read_by(schema: NamedSchema | None, record: Any, place: str) -> Any:
    """A record in our own spelling, by a schema or by what its keys are; raises `DataError` as either does."""
    return messages_of(record, place) if schema is None else schema.messages_of(record, place)


def marked(fingerprint: str, schema: NamedSchema | None) -> str:
    """A source's fingerprint with the schema, because it decides what a record's tokens are."""
    return fingerprint if schema is None else f"{fingerprint}, schema {schema.name}"

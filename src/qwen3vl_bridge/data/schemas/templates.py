r"""Texts composed of several columns of a record.

A template contains a brace, or begins with "text:". In it

    {question}           is a column's text, or its number
    {answers[0]}         is the first of a list; {answers[0][answer]} a value of an object there
    {choices:letters}    is a list, one item per line, as "A. ...", "B. ..."; also a list in a text, "['six', 'seven']"
    {answer:letter}      is the letter of a number that counts from 0
    {{ and }}            are braces
    \n                   is the end of a line

A line whose columns are all empty is left out: in "{hint}\n{question}" without a hint, and "{options:letters}" of an
empty list.
"""

from __future__ import annotations

import ast
import string
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.schemas.media_keys import shown

_CONSTANT = "text:"
_LETTERS = string.ascii_uppercase
_MOST_WRITTEN = 1 << 16  # letters of a list that is written as a text


def is_template(value: Any) -> bool:
    """Whether a value of a setting is a template, and not a column's name."""
    return isinstance(value, str) and (value.startswith(_CONSTANT) or "{" in value or "}" in value)


def columns_of(template: str) -> Iterator[str]:
    """The columns that a template uses.

    Raises:
        ValueError: an invalid template.
    """
    for _, field, spec, conversion in string.Formatter().parse(template.removeprefix(_CONSTANT)):
        if field is None:
            continue
        column = field.partition("[")[0]
        if not column or "." in column or conversion or spec not in ("", "letter", "letters"):
            raise ValueError(f"found {{{field}}}, a column stands as {{NAME}}, {{NAME[0]}} or {{NAME:letters}}")
        yield column


def filled(template: str, record: Mapping[str, Any], place: str) -> str:
    """Fill a template with a record's values.

    Raises:
        DataError: a column that the record does not have, or whose value cannot be inserted.
    """
    if missing := [column for column in columns_of(template) if record.get(column) is None]:
        found = ", ".join(map(str, record)) or "none"
        raise DataError(place, f"found the keys {found}, expected {missing[0]!r}, and not null")
    lines = template.removeprefix(_CONSTANT).replace("\\n", "\n").split("\n")
    try:
        return "\n".join(text for line in lines if (text := _line(line, record)) is not None)
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(place, f"{template!r} cannot be filled: {error}") from error


def _line(line: str, record: Mapping[str, Any]) -> str | None:
    """One line of a template; None for one that consists only of empty columns."""
    text = _Filling().vformat(line, (), record)
    return None if line and not text else text


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
        items = _listed(value) if format_spec == "letters" else None
        if items is not None and len(items) <= len(_LETTERS):
            return "\n".join(f"{letter}. {_word(one)}" for letter, one in zip(_LETTERS, items, strict=False))
        if format_spec:
            kinds = {"letter": "a whole number", "letters": f"a list of up to {len(_LETTERS)}"}
            raise ValueError(f"found {shown(value)}, expected {kinds[format_spec]}")
        return _word(value)


def _listed(value: Any) -> list[Any] | None:
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

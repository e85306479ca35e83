"""docs/troubleshooting.md quotes messages that are in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = [block.strip() for block in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)]
HOLE = "\0"


def text_of(node: ast.expr) -> str | None:
    """A string as it stands in the source, with a hole for each value that is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
    return None


@cache
def messages() -> list[str]:
    """Every string of the package and the recipes that may be a message: not docstrings, and those with several words.

    Where a message is put together of names with strings in them, as `f"{found}, {planned}"`, the names' strings are in
    it.
    """
    found = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        strings = {
            target.id: text
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name)
            if (text := text_of(node.value))
        }
        for node in ast.walk(tree):
            if id(node) in docstrings or not isinstance(node, ast.expr) or not (text := text_of(node)):
                continue
            found.append(text)
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(
                        str(part.value)
                        if isinstance(part, ast.Constant)
                        else strings.get(ast.unparse(part.value), HOLE)  # type: ignore[attr-defined]
                        for part in node.values
                    )
                )
    return [" ".join(text.split(" ")) for text in found if text.count(" ") >= 3]


def is_in_source(quoted: str) -> bool:
    return any(quoted.strip("… ").replace("…", HOLE) in text for text in messages())


def test_there_are_messages_on_the_page():
    assert len(QUOTED) > 40 and len(set(QUOTED)) == len(QUOTED)
    assert all("\n" not in one for one in QUOTED)


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_in_the_source(quoted):
    words = quoted.replace("…", " ").split()
    assert len(words) >= 4, "too few words to tell it by"
    assert is_in_source(quoted), f"no string of src/ or recipes/ has it: {quoted}"


def test_other_words_are_not_found():
    assert not is_in_source("dataset.seq_length is …, expected model.seq_size, …")
    assert not is_in_source("What lives here: these sections as dataclasses")  # a docstring's


def test_each_message_is_explained():
    for after in re.split(r"```text\n.*?```\n", PAGE, flags=re.DOTALL)[1:]:
        assert re.match(r"[A-Z`]", after), after[:80]

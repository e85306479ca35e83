"""docs/troubleshooting.md quotes messages that are in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
QUOTED = re.findall(r"```text\n(.*?)\n```", (ROOT / "docs/troubleshooting.md").read_text(), re.DOTALL)
HOLE = "…"  # for a value that is put in


def text_of(node: ast.expr, strings: dict[str, str]) -> str:
    """A string as it stands in the source; of a name that has a string in it, that string."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, strings) for part in node.values)
    return strings.get(ast.unparse(node.value), HOLE) if isinstance(node, ast.FormattedValue) else HOLE


@cache
def messages() -> list[str]:
    """The strings of the package and the recipes: as they are, and with the strings of names that are put in."""
    found = []
    for path in [*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")]:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        assigned = (node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name))
        strings = {ast.unparse(node.targets[0]): text_of(node.value, {}) for node in assigned}
        texts = [node for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)]
        found += [text_of(node, named) for node in texts for named in ({}, strings)]
    return found


@pytest.mark.parametrize("quoted", QUOTED)
def test_a_quoted_message_is_in_the_source(quoted):
    assert any(quoted.strip("… ") in text for text in messages())


def test_other_words_are_not_found():
    assert not any("dataset.seq_length is …, expected model.seq_size, …" in text for text in messages())

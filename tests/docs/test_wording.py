"""Pages, docstrings, comments and messages use the field's terms: words that readers had to guess are not in them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "recipes").rglob("*.py")])
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
IN_PAGES = re.compile(r"\b(anew|nobody|for good|goe?s? round|what rests|dealt)\b", re.IGNORECASE)
IN_CODE = re.compile(
    r"\b(pictures?|besides?|alone|anew|behind|nobody|somebody|whoever|for good|goe?s? round|what rests|dealt)\b",
    re.IGNORECASE,
)
# Names of arguments and fields, such as `pictures: keep images to show`, and names in backticks.
NAMES = re.compile(r"`[^`]*`|^\s*\*{0,2}\w+(, \*{0,2}\w+)*:", re.MULTILINE)


def prose(source: str) -> Iterator[str]:
    """Docstrings, comments, and strings with several words, most of which are messages."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 2:
            yield node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def found(pattern: re.Pattern[str], text: str) -> list[str]:
    return [line.strip() for line in NAMES.sub("", text).splitlines() if pattern.search(line)]


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_code_uses_the_fields_terms(path):
    assert [line for text in prose(path.read_text()) for line in found(IN_CODE, text)] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_use_the_fields_terms(path):
    assert found(IN_PAGES, re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)) == []


def test_words_are_found():
    text = 'def f(beside):\n    """Rows beside `alone`.\n\n    beside: tokens.\n    """\n    # anew\n'
    assert [line for one in prose(text) for line in found(IN_CODE, one)] == ["Rows beside .", "# anew"]

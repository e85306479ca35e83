"""The site that `make docs` builds."""

import re
import subprocess
from pathlib import Path

import pytest

from scripts.docs_site import hooks, reference
from tests.docs.pages import ROOT
from tests.docs.test_links import pages_of_the_nav

PINS = ROOT / ".venv-docs/.pins-done"


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return ROOT / "site"


@pytest.mark.slow
@pytest.mark.skipif(
    not PINS.is_file() or PINS.read_bytes() != (ROOT / "requirements/docs.txt").read_bytes(),
    reason=".venv-docs is missing or has other pins: run `make docs` once, which needs a package registry",
)
def test_built_site_has_one_top_heading_on_every_page(site):
    for page in pages_of_the_nav():
        text = (site / page).with_suffix(".html").read_text()
        assert len(re.findall(r"<h1\b", text)) == 1, page
        assert "<!-- generated" not in text, page


@pytest.mark.parametrize(("markdown", "expected"), [
    ("words:\n- a\n- b\n", "words:\n\n- a\n- b\n"), ("- a\n  - b\n  words\n", "- a\n    - b\n    words\n"),
    ("words\n| a |\n|---|\n", "words\n\n| a |\n|---|\n"),
    ("a\n```\nb\n- c [d](../README.md)\n```\ne\n", "a\n\n```\nb\n- c [d](../README.md)\n```\n\ne\n"),
    ("[a](../README.md#try-it) [b](train.md)\n", "[a](overview.md#try-it) [b](train.md)\n"),
    ("[a](../tests/docs)\n", '<span title="tests/docs">a</span>\n'),
    ("![a](images/loss.png) [b](https://x.org) [c](#d)\n", "![a](images/loss.png) [b](https://x.org) [c](#d)\n"),
])  # fmt: skip
def test_dialect_converts_github_markdown_for_mkdocs(markdown, expected):
    assert hooks.dialect(markdown, "docs/page.md") == expected


def test_on_page_content_adds_line_break_points_to_names_in_tables():
    html = "<p><code>a_b</code></p><td><code>a_b.c/d</code> e_f</td>"
    expected = "<p><code>a_b</code></p><td><code>a_<wbr>b.<wbr>c/<wbr>d</code> e_f</td>"
    assert hooks.on_page_content(html, None, None, None) == expected


def test_settings_reference_lists_commands_and_options():
    text = reference.commands()
    for expected in ("### qwen3vl convert import", "### qwen3vl train", "### qwen3vl doctor", "--dry-run", "--resume"):
        assert expected in text

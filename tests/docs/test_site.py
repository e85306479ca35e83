"""The site as `make docs` builds it."""

import re
import subprocess
from pathlib import Path

import pytest

from .test_pages import nav

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / ".venv-docs/.pins-done"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PINS.is_file() or PINS.read_bytes() != (ROOT / "requirements/docs.txt").read_bytes(),
        reason=".venv-docs is missing or has other pins: run `make docs` once, which needs a package registry",
    ),
]


@pytest.fixture(scope="module")
def site() -> Path:
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return ROOT / "site"


def test_every_page_is_built_with_its_headings(site):
    for page in nav():
        text = (site / page).with_suffix(".html").read_text()
        assert len(re.findall(r"<h1\b", text)) == 1, page
        assert "<!-- generated" not in text, page

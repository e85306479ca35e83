"""The site as `make docs` builds it, and as a browser shows it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.data import browser

from .test_pages import nav

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / ".venv-docs/.pins-done"
STICKS_OUT = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Images are loaded when they come into view.
BROKEN = """(async () => {
    const all = [...document.images];
    for (const one of all) one.loading = "eager";
    await Promise.all(all.map(one => one.decode().catch(() => {})));
    return all.filter(one => !one.naturalWidth).map(one => one.src).join(" ");
})()"""

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


@pytest.mark.skipif(browser.found() is None, reason="no browser of Chromium's kind is installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_all_pages(site, tmp_path, width):
    with browser.Browser(browser.found(), tmp_path / "profile") as shown:
        for page in nav():
            shown.show((site / page).with_suffix(".html"), width)
            # Chromium takes no screenshot of more than 16,384 pixels.
            folder = os.environ.get("QWEN3VL_SCREENSHOTS")
            if folder and shown.value("document.documentElement.scrollHeight") < 16_000:
                shown.picture(Path(folder) / f"{Path(page).stem}-{width}.png")
            assert shown.value(STICKS_OUT) == 0, f"{page} is wider than {width} pixels"
            broken = shown.ask("Runtime.evaluate", expression=BROKEN, awaitPromise=True, returnByValue=True)
            assert broken["result"].get("value") == "", page
            assert shown.value("document.querySelector('h1').getBoundingClientRect().height") > 0, page

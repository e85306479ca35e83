"""The reproductions of docs/upstream print what the pages say, with the installed releases."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "upstream").glob("*.md") if path.name != "index.md")


@pytest.mark.slow  # each in a process of its own, as its reader runs it
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_it_shows_the_defect(page, untied_folder, tmp_path):
    (code,), (expected,) = (
        re.findall(rf"```{kind}\n(.*?)```", page.read_text(), re.DOTALL) for kind in ("python", "text")
    )
    (tmp_path / "shown.py").write_text(code.replace("HF_FOLDER", str(untied_folder)))
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "shown.py"], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-expected.count("\n") :] == expected.splitlines(), done.stdout


def test_what_they_make_needless_is_there():
    index = (ROOT / "docs" / "upstream" / "index.md").read_text()
    for page in PAGES:
        assert f"]({page.name})" in index
        for name, file in re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", page.read_text()):
            if (path := ROOT / "src" / "qwen3vl_bridge" / file).exists() or name[0].isupper():
                assert name in path.read_text(), f"{page.name}: {name}"

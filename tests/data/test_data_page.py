"""The examples of docs/data.md: its records are read, its commands run, its settings exist."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from qwen3vl_bridge.cli import data as command
from qwen3vl_bridge.data import DataError, open_source
from qwen3vl_bridge.data.schemas.named_schemas import SCHEMAS
from qwen3vl_bridge.data.sources.mixture import mixed_sets

import pytest
from qwen3vl_recipes import qwen3_vl_8b_sft_config
from qwen3vl_recipes.overrides import apply

from .conftest import picture, write
from .schemas.test_published_formats import FORMATS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "data.md").read_text("utf-8")
BLOCKS = re.findall(r"```(json|bash|console)\n(.*?)```", PAGE, re.DOTALL)
# A record, and the command that follows it, if one does.
EXAMPLES = [
    (json.loads(text), following[1] if following[0] == "bash" else None)
    for (kind, text), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True)
    if kind == "json"
]


def words_of(text: str) -> list[str]:
    """The words of one command, as a shell gives them."""
    return shlex.split(text.replace("\\\n", " "))


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    picture(tmp_path / "images" / "1.png", 32, 32)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("record", "text"), EXAMPLES, ids=[str(number) for number in range(len(EXAMPLES))])
def test_a_record_is_read(folder, checkpoint, capsys, record, text):
    """With the command behind it, if there is one; then not without its settings."""
    path = write(folder / "train.jsonl", [record])
    if text is None:
        sample = open_source(path)[0]
        assert len(sample.images) == json.dumps(record).count("images/1.png")
        return
    words = words_of(text.replace("HF_FOLDER", str(checkpoint)))
    assert words[:3] == ["qwen3vl", "data", "inspect"]
    assert command.main([*words[2:], "--json", "--no-progress"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 1
    with pytest.raises(DataError):
        open_source(path)[0]


def test_there_are_examples():
    assert len(EXAMPLES) >= 12 and sum(text is not None for _, text in EXAMPLES) >= 5


def commands() -> list[Any]:
    texts = "".join(text for kind, text in BLOCKS if kind == "console").replace("\\\n", " ").splitlines()
    return [shlex.split(text) for text in texts]


def test_settings_of_runs_exist():
    settings = [[word for word in words if word.startswith("dataset.")] for words in commands()]
    assert sum(map(len, settings)) >= 8
    for words in settings:
        apply(qwen3_vl_8b_sft_config(), words)
    cfg = apply(qwen3_vl_8b_sft_config(), settings[0])
    assert (cfg.dataset.columns.question, cfg.dataset.columns.answer) == (r"{query}\nAnswer briefly.", "{label[0]}")


def test_formats_with_a_name_are_all_there():
    section = PAGE.split("## Formats with a name", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in re.findall("`(.*?)`", row)} == set(SCHEMAS)


def test_public_sets_and_their_settings_are_those_that_are_tried():
    """A record of each set's format is read with them, and not without, in `schemas/test_published_formats.py`."""
    section = PAGE.split("## Public sets", 1)[1].split("\n## ", 1)[0]
    found = dict(re.findall(r"^\| ([^|]+?) \| (.*?) ?\|$", section, re.MULTILINE))
    assert found.pop("set") == "setting" and len(found) >= 12

    def settings(one) -> str:
        named = [f"columns.{key}={value}" for key, value in one.columns.items()]
        named += [f"schema_adapter={one.schema_adapter}"] if one.schema_adapter else []
        return ", ".join(f"`{setting}`" for setting in named).replace("\n", r"\n")

    published = {one.name: settings(one) for one in FORMATS if not one.name.startswith("ms-swift")}
    assert {name: words for name, words in found.items() if name != "---"} == published


def test_sets_of_a_mixture_are_ones(tmp_path):
    found = []
    for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL):
        (tmp_path / "mixture.yaml").write_text(text)
        found.append(mixed_sets(str(tmp_path / "mixture.yaml")))
    (first, second), shares = found
    assert first.schema_adapter == "cord_v2" and second.columns.answer == "{label[0]}"
    assert [(one.name, one.weight) for one in shares] == [("llava", 3), ("docs", 1), ("receipts", 0.5)]


def test_options_of_commands_exist():
    for words in commands():
        if words[:2] == ["qwen3vl", "data"]:
            command._parser("qwen3vl data").parse_args(words[2:])

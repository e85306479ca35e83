"""What docs/coming_from.md says of our settings: each exists, and the values on the page are of its kind."""

import re
from pathlib import Path

from qwen3vl_bridge.models.rules import named_elsewhere

import pytest
from qwen3vl_recipes import overrides, qwen3_vl_30b_a3b_peft_config, qwen3_vl_30b_a3b_sft_config
from qwen3vl_recipes.cli import _parser

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "coming_from.md").read_text()
ROWS = [line.strip("|").split("|") for line in PAGE.splitlines() if re.match(r"\|.*`", line)]
OURS = [word for row in ROWS for code in re.findall(r"`([^`]+)`", row[-1]) for word in code.split()]
SETTINGS = [word for word in OURS if re.match(r"[a-z_.]+=", word)]


def test_settings_of_the_page_exist():
    assert len(SETTINGS) > 40
    for make in (qwen3_vl_30b_a3b_peft_config, qwen3_vl_30b_a3b_sft_config):
        words = [word for word in SETTINGS if not word.startswith("peft.") or make is qwen3_vl_30b_a3b_peft_config]
        cfg = overrides.apply(make(), words)
        assert cfg.model.recompute_granularity == "full" and cfg.dataset.vision.image_max_pixels == 1003520
    with pytest.raises(ValueError, match="freeze_vit"):
        overrides.apply(qwen3_vl_30b_a3b_sft_config(), ["model.freeze_vit=true"])


def test_the_page_says_what_hints_say():
    """Of every name in its columns that a mistyped option would be helped with."""
    known = 0
    for row in ROWS:
        theirs = re.findall(r"`-{0,2}(\w+)`", " ".join(row[1:-1]))
        for alias in theirs:
            meant = named_elsewhere(alias)
            known += bool(meant)
            for name in re.findall(r"[a-z]+\.[\w.]+", meant or ""):
                assert name in row[-1] or alias == "output_dir", (alias, name)
    assert known > 25


def test_options_of_the_page_exist():
    known = {option for action in _parser("qwen3vl train")._actions for option in action.option_strings}
    assert {word for word in OURS if word.startswith("--") and word not in known} == {"--propose"}

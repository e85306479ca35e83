"""Commands by the names that earlier pages showed: they run, and say what they are called now."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

from qwen3vl_bridge.cli import earlier_names

import pytest

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
EARLIER = {
    "qwen3vl-convert": "qwen3vl convert",
    "qwen3vl-adapters": "qwen3vl adapters",
    "qwen3vl-data": "qwen3vl data",
    "qwen3vl-plan": "qwen3vl plan",
    "qwen3vl-finetune": "qwen3vl train",
    "qwen3vl-pretrain": "qwen3vl train --from-scratch",
}


def called(name: str, monkeypatch, arguments: list[str]) -> None:
    module, _, function = SCRIPTS[name].partition(":")
    assert module == earlier_names.__name__
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        getattr(earlier_names, function)()
    assert not ended.value.code


@pytest.mark.parametrize("name", EARLIER)
def test_a_script_runs_its_command_and_names_it(name, monkeypatch, capsys):
    called(name, monkeypatch, ["--help"])
    printed = capsys.readouterr()
    assert printed.out.startswith("usage: qwen3vl")
    assert printed.err == (f"warning: {name} is deprecated and will go in the next release; use `{EARLIER[name]}`\n")


def test_every_earlier_script_is_tested():
    assert {*EARLIER, "qwen3vl"} == SCRIPTS.keys()


def test_under_torchrun_one_process_warns(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    called("qwen3vl-data", monkeypatch, ["--help"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["qwen3vl_bridge.cli.data", "qwen3vl_bridge.data.cli"])
def test_modules_that_were_commands_warn_too(module):
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "usage: qwen3vl data" in done.stdout
    assert done.stderr.endswith(
        "python -m qwen3vl_bridge.cli.data is deprecated and will go in the next release; use `qwen3vl data`\n"
    )

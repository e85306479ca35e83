"""The command line: quick help, dry runs, readable output."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from qwen3vl_bridge.checkpoint import conversion, import_checkpoint
from qwen3vl_bridge.checkpoint.formats import tensors
from qwen3vl_bridge.cli.convert import main

import pytest

CONVERT = Path(__file__).parents[3] / "conversion" / "convert.py"


def test_help_without_torch():
    code = "import sys; from qwen3vl_bridge.cli import convert as cli; cli._parser(None); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
    for verb in ([], ["import"]):
        found = subprocess.run([sys.executable, CONVERT, *verb, "--help"], capture_output=True, text=True, check=True)
        assert "usage: convert.py" in found.stdout


def test_bad_input_is_one_line_and_status_2(tmp_path):
    command = [sys.executable, CONVERT, "export", "--megatron-path", "/no/such", "--hf-path", tmp_path / "hf"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 2 and not found.stdout
    assert found.stderr == "error: /no/such: there is no such folder, expected the folder of a Megatron checkpoint\n"


def test_a_whole_conversion(untied_folder, tmp_path, capsys):
    megatron, hf = str(tmp_path / "megatron"), str(tmp_path / "hf")
    assert main(["import", "--hf-model", str(untied_folder), "--megatron-path", megatron, "--tp", "2", "--verify"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"{megatron}: ") and "parameters in float32" in out
    assert "import: 100 %" in error and "verify: 100 %" in error
    assert main(["export", "--megatron-path", megatron, "--hf-path", hf, "--no-progress"]) == 0
    assert not capsys.readouterr().err
    assert main(["verify", "--hf-model", hf, "--megatron-path", megatron, "--no-progress"]) == 0
    assert capsys.readouterr().out.startswith("same: ")


def test_a_dry_run_writes_nothing(untied_folder, tmp_path, capsys):
    arguments = ["--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "a" / "b"), "--dry-run"]
    arguments += ["--torch-dtype", "bfloat16"]
    assert main(["import", *arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["dtypes"] == ["bfloat16"] and plan["cast"] == plan["tensors"] and plan["dry_run"]
    assert plan["disk_free"] > plan["disk_needed"] > plan["nbytes"] and plan["estimate"] > 0
    assert main(["import", *arguments]) == 0
    out = capsys.readouterr().out
    assert f"{plan['parameters']:,} parameters in bfloat16" in out and f"{plan['cast']} tensors cast" in out
    assert not list(tmp_path.iterdir())


def test_an_estimate_does_not_count_what_is_done_once(untied_folder, tmp_path, monkeypatch):
    """The first cast imports torch, which takes seconds."""
    original, casts = tensors.cast, []

    def slow_at_first(*arguments):
        casts.append(1)
        if len(casts) == 1:
            time.sleep(1)
        return original(*arguments)

    monkeypatch.setattr(tensors, "cast", slow_at_first)
    monkeypatch.setattr(conversion, "cast", slow_at_first, raising=False)
    report = import_checkpoint(untied_folder, tmp_path / "m", torch_dtype="bfloat16", dry_run=True)
    assert 0 < report.estimate < 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--megatron-path", "--hf-model"])
def test_inspect(option, imported, untied_folder, capsys):
    folder = str(imported if option == "--megatron-path" else untied_folder)
    assert main(["inspect", option, folder]) == 0
    table = capsys.readouterr().out
    assert main(["inspect", option, folder, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"{found['parameters']:,}" in table and found["path"] in table


@pytest.fixture(scope="module")
def full():
    """A disk without room, as standard output."""
    with open("/dev/full", "w") as file:
        yield file


def test_a_report_that_cannot_be_printed_is_no_failure_of_what_is_in_place(full, untied_folder, tmp_path):
    place = tmp_path / "m"
    command = [
        sys.executable,
        CONVERT,
        "import",
        "--no-progress",
        "--hf-model",
        untied_folder,
        "--megatron-path",
        place,
    ]
    for more in ([], ["--json", "--overwrite"]):
        found = subprocess.run([*command, *more], stdout=full, stderr=subprocess.PIPE, text=True)
        why = "standard output cannot be written: No space left on device"
        expected = f"note: {place} is complete and in place, but its report could not be printed: {why}\n"
        assert (found.returncode, found.stderr) == (0, expected)
    assert main(["verify", "--no-progress", "--hf-model", str(untied_folder), "--megatron-path", str(place)]) == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "import"])
def test_what_has_no_result_but_its_text_fails_without_it(command, full, imported, untied_folder, tmp_path):
    arguments = {
        "inspect": ["--megatron-path", imported],
        "verify": ["--hf-model", untied_folder, "--megatron-path", imported, "--no-progress"],
        "import": ["--hf-model", untied_folder, "--megatron-path", tmp_path / "m", "--dry-run"],
    }[command]
    command = [sys.executable, CONVERT, command, *arguments]
    found = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    expected = "error: standard output cannot be written: No space left on device\n"
    assert (found.returncode, found.stderr) == (2, expected)
    if "verify" not in command:  # nor is it a traceback where standard error is full too
        assert subprocess.run(command, stdout=full, stderr=full).returncode == 2


def test_a_reader_that_has_gone_is_no_error(imported):
    command = [sys.executable, CONVERT, "inspect", "--megatron-path", imported]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 0

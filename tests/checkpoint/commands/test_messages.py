"""What users read when something is wrong says what it is, and what to do."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import load_item
from qwen3vl_bridge.checkpoint.formats.tensors import Extent
from qwen3vl_bridge.cli.convert import main

import pytest
import torch

from ..support import expect_error, exporting, importing

CONVERT = Path(__file__).parents[3] / "conversion" / "convert.py"


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize(
    "value", [Hostile(), "legacy", "tar", 3], ids=lambda value: type(value).__name__ + str(value)[:3]
)
def test_nobody_is_advised_to_run_what_a_file_calls_for(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, data = tmp_path / "item", io.BytesIO()
    torch.save(Hostile() if isinstance(value, str) else value, data, _use_new_zipfile_serialization=value != "legacy")
    path.write_bytes(data.getvalue())
    if value == "tar":
        import tarfile

        (tmp_path / "pickle").write_bytes(pickle.dumps(Hostile()))
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
            for name in ("storages", "tensors", "pickle"):
                file.add(tmp_path / "pickle", name)
    with pytest.raises(CheckpointError) as error:
        load_item(Extent(path, 0, path.stat().st_size), "float32", (3,), "a")
    assert str(path) in str(error.value) and "weights_only" not in str(error.value)
    assert not any(advice in str(error.value) for advice in ("can still be loaded", "Re-running", "trust the source"))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(("data", "part"), [(b"", "is empty"), (b"\x80\x04]", "is truncated")])
def test_metadata_that_ends_too_soon(data, part, folder):
    (folder / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match=part):
        read_metadata(folder)


def test_a_user_that_there_is_not(capsys, tmp_path, untied_folder, imported):
    nobody, part = "~nosuchuser/x", "~nosuchuser/x: ~nosuchuser is not the home folder of any user"
    expect_error(capsys, importing(nobody, tmp_path), part)
    expect_error(capsys, exporting(nobody, tmp_path), part)
    for arguments in (
        ["import", "--hf-model", str(untied_folder), "--megatron-path", nobody],
        ["export", "--megatron-path", str(imported), "--hf-path", nobody],
        ["export", "--hf-model", nobody, "--megatron-path", str(imported), "--hf-path", str(tmp_path / "x")],
        ["inspect", "--hf-model", nobody],
        ["inspect", "--megatron-path", nobody],
        ["verify", "--hf-model", nobody, "--megatron-path", str(imported)],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"error: {part} here\n"


@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://hub", "http://"])
def test_an_address_of_a_hub_that_is_none(endpoint, capsys, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    expect_error(
        capsys, importing("Qwen/No-Such", tmp_path), f"Qwen/No-Such is not a folder, and HF_ENDPOINT is {endpoint!r}"
    )


def test_an_address_that_the_hubs_own_library_does_not_survive(tmp_path):
    command = [sys.executable, CONVERT, *importing("Qwen/No-Such", tmp_path)]
    environment = {**os.environ, "HF_ENDPOINT": "http://["}
    found = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert found.returncode == 2 and "HF_ENDPOINT is 'http://['" in found.stderr and "Traceback" not in found.stderr


def piped(arguments: list[str], closed: str) -> subprocess.CompletedProcess:
    """Run the command line with a reader of its output that has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    others = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {closed: writer}
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = subprocess.run([sys.executable, CONVERT, *arguments], text=True, env=buffered, **others)
    os.close(writer)
    return found


def test_a_reader_that_has_gone_takes_nothing_from_what_is_done(untied_folder, tmp_path):
    arguments = ["import", "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "m")]
    found = piped([*arguments, "--no-progress"], "stdout")
    assert (found.returncode, found.stderr) == (0, "")
    found = piped([*arguments, "--overwrite"], "stderr")
    assert found.returncode == 0 and "parameters in float32" in found.stdout
    assert piped([*arguments, "--no-progress"], "stderr").returncode == 2  # it is there already


@pytest.mark.parametrize("variables", [{}, {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}])
def test_inspect_waits_for_nobody(variables, capsys, monkeypatch, imported):
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(["inspect", "--megatron-path", str(imported)]) == 0
    assert "fsdp_dtensor" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("variables", "part"),
    [
        ({}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT are not set"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "but MASTER_PORT are not set"),
        ({"RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, "RANK is '2', expected 0 to 1"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x', expected a port number"),
    ],
)
def test_processes_that_cannot_find_each_other_do_not_wait(
    variables, part, capsys, monkeypatch, untied_folder, tmp_path, no_groups
):
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    expect_error(capsys, importing(untied_folder, tmp_path), part)

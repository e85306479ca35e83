"""--resume goes on from what is proven to be there; the first signal ends a conversion, the next leave its tidying."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, conversion, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.formats import planned_files
from qwen3vl_bridge.cli.convert import main

import pytest

from ..support import before_each_unit, broken_disk, contents


@pytest.fixture
def begun(untied_folder, tmp_path, monkeypatch) -> Path:
    """An import to `tmp_path / "m"` that was to be continued and got as far as five units."""
    monkeypatch.setattr(planned_files, "UNIT_BYTES", 1 << 14)
    with broken_disk(5), pytest.raises(CheckpointError, match="stays in"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True)
    (folder,) = tmp_path.glob(".m.partial-*")
    return folder


def damage(folder: Path) -> str:
    line = (folder / planned_files.PRIVATE / "rank-0").read_text().splitlines()[0]
    name, start, end, _ = line.split(" ")
    path = folder / "iter_0000000" / name
    data = bytearray(path.read_bytes())
    data[(int(start) + int(end)) // 2] ^= 4
    path.write_bytes(data)
    return name


@pytest.mark.parametrize("verify", [False, True])
def test_a_damaged_part_is_written_once_more(begun, untied_folder, tmp_path, verify):
    damage(begun)
    report = import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=verify)
    assert any(note.startswith("1 of 5 parts") for note in report.notes) and report.resumed
    import_checkpoint(untied_folder, tmp_path / "whole")
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_a_result_that_fails_to_verify_again_and_again_says_how_to_go_on(begun, untied_folder, tmp_path, monkeypatch):
    damage(begun)  # and in such a way that it is not noticed
    monkeypatch.setattr(planned_files, "intact", lambda _, __, units, ___: [unit for unit, _ in units])
    with pytest.raises(CheckpointError, match=r"not written correctly.* is unusable: run without --resume"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=True)
    assert import_checkpoint(untied_folder, tmp_path / "m", verify=True).resumed == 0


def test_a_file_that_grew_says_how_to_go_on(begun, untied_folder, tmp_path):
    with (begun / "iter_0000000" / damage(begun)).open("ab") as file:
        file.write(b"x" * (1 << 20))
    with pytest.raises(CheckpointError, match=r"bytes, expected .* is unusable: run without --resume"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True)


def test_other_options_do_not_cost_what_was_to_be_continued(begun, untied_folder, tmp_path, capsys):
    arguments = ["import", "--no-progress", "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "m")]
    before = contents(begun)
    assert main([*arguments, "--resume", "--torch-dtype", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert str(begun) in error and "options or version" in error and "omit --resume" in error
    assert contents(begun) == before and not (tmp_path / "m").exists()
    assert main([*arguments, "--resume"]) == 0
    assert "GB of its files existed already" in capsys.readouterr().out


@pytest.fixture
def whole(untied_folder, tmp_path, monkeypatch) -> Path:
    """An import to `tmp_path / "m"`, whole but not in place, in a model folder of its own: `tmp_path / "model"`."""
    model = shutil.copytree(untied_folder, tmp_path / "model")

    def refuse(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the whole result stays in"):
        patch.setattr(os, "rename", refuse)
        import_checkpoint(model, tmp_path / "m", resume=True)
    return model


def test_a_process_that_dies_while_it_moves_the_result_loses_nothing(whole, tmp_path):
    (folder,) = tmp_path.glob(".m.partial-*")
    os.rename(folder / planned_files.PRIVATE, folder.with_name(folder.name + planned_files.PRIVATE))
    report = import_checkpoint(whole, tmp_path / "m", resume=True)
    assert report.resumed and not report.written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "model"]


def test_an_error_that_is_none_of_the_files_gives_no_advice(begun, untied_folder, tmp_path, monkeypatch):
    def fail(*_):
        raise CheckpointError("the disk is gone")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError) as error:
        patch.setattr(conversion, "differences", fail)
        import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=True)
    assert "is unusable" not in str(error.value)
    assert import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=True).resumed


def test_what_lies_beside_the_tensors_is_written_anew(whole, tmp_path):
    """The model's own files may have changed, and an earlier run may have left others."""
    (folder,) = tmp_path.glob(".m.partial-*")
    (folder / "iter_0000000" / "hf" / "stray.json").write_text("{}")
    (whole / "generation_config.json").write_text('{"temperature": 0.5}')
    assert import_checkpoint(whole, tmp_path / "m", resume=True).resumed
    import_checkpoint(whole, tmp_path / "other")
    assert contents(tmp_path / "m") == contents(tmp_path / "other")
    assert (tmp_path / "m" / "iter_0000000" / "hf" / "generation_config.json").exists()


def test_without_resume_a_conversion_starts_anew(begun, untied_folder, tmp_path):
    report = import_checkpoint(untied_folder, tmp_path / "m", torch_dtype="bfloat16")
    assert not report.resumed and str(begun) in report.notes[0] and "removed" in report.notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_what_never_got_as_far_as_a_plan_is_in_nobodys_way(begun, untied_folder, tmp_path):
    (begun / planned_files.PRIVATE / "plan").write_text("")
    report = import_checkpoint(untied_folder, tmp_path / "m", resume=True)
    assert not report.resumed and verify_checkpoint(untied_folder, tmp_path / "m").same


def test_all_that_is_left_to_do_takes_no_time(begun, untied_folder, tmp_path, capsys):
    def intrude(*_):
        (tmp_path / "m").mkdir(exist_ok=True)
        (tmp_path / "m" / "precious").write_text("x")

    arguments = ["import", "--no-progress", "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "m")]
    with before_each_unit(intrude):
        assert main([*arguments, "--resume"]) == 2
    assert "the whole result stays in" in capsys.readouterr().err
    (tmp_path / "m" / "precious").unlink()
    assert main([*arguments, "--resume"]) == 0
    out = capsys.readouterr().out
    assert "0.00 GB written" in out and "(0.00 GB/s)" in out and "-" not in out.partition("written")[2]


# Writing a unit takes a second and removing what was written another one; both say so when they begin.
SLOW = """
import shutil, sys, time
from qwen3vl_bridge.cli import convert as cli; from qwen3vl_bridge.checkpoint.formats import planned_files

write, remove = planned_files._write_unit, shutil.rmtree

def slowly(*arguments):
    print("writing", flush=True)
    time.sleep(1.5)
    write(*arguments)

def removed(*arguments, **options):
    print("removing", flush=True)
    time.sleep(1.5)
    remove(*arguments, **options)

planned_files._write_unit, shutil.rmtree = slowly, removed
sys.exit(cli.main())
"""


@pytest.fixture
def started(untied_folder, tmp_path) -> Iterator[subprocess.Popen]:
    arguments = ["import", "--no-progress", "--hf-model", untied_folder, "--megatron-path", tmp_path / "out" / "m"]
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "writing\n"
    yield process
    process.kill()
    process.communicate()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_break_off_the_tidying(number, started, tmp_path):
    started.send_signal(number)
    time.sleep(0.1)
    started.send_signal(signal.SIGTERM)  # of the same Ctrl-C
    time.sleep(1.1)
    started.send_signal(number)  # while the threads end, or what they wrote is removed
    out, error = started.communicate(timeout=30)
    assert error == (
        "interrupted, cleaning up; interrupt again to stop at once and leave the cleanup to the next run\ninterrupted\n"
    )
    assert started.returncode == 130 and out.endswith("removing\n")
    assert left(tmp_path) == []


def test_a_third_signal_ends_at_once(started, untied_folder, tmp_path):
    for _ in range(3):
        started.send_signal(signal.SIGINT)
        time.sleep(1.05)
    _, error = started.communicate(timeout=30)
    assert started.returncode == 130 and error.count("\n") == 1 and "interrupt again to stop at once" in error
    assert all(path.name.startswith(".m.partial-") for path in (tmp_path / "out").iterdir())
    assert not (tmp_path / "out" / "m").exists()


def test_what_nohup_ignores_stays_ignored(untied_folder, tmp_path):
    arguments = ["import", "--no-progress", "--hf-model", untied_folder, "--megatron-path", tmp_path / "m"]
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", SLOW, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "writing\n"
    os.kill(process.pid, signal.SIGHUP)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and str(tmp_path / "m") in out, error

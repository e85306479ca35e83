"""A result is complete or absent; --overwrite replaces an earlier result, --resume keeps intact byte ranges."""

import errno
import fcntl
import functools
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.conversion import EarlierResult
from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.stored_models import MANIFEST, describe_tool
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.core import atomic
from qwen3vl_bridge.core.files import read_object, write_object

import pytest

from tests.checkpoint.support import before_each_unit, broken_disk, contents, expect_error, exporting, importing


@pytest.mark.parametrize("empty", [False, True])
def test_atomic_directory_moves_files_to_target_only_at_end_of_block(empty, tmp_path):
    target = tmp_path / "a" / "b" / "target"
    if empty:
        target.mkdir(parents=True)
    with atomic.atomic_directory(target, print) as work:
        (work / "file").write_text("x")
        assert work.parent == target.parent and work.name.startswith(".target.partial-")
        assert target.exists() == empty and not list(target.glob("*"))
    assert [path.name for path in target.parent.rglob("*")] == ["target", "file"]
    assert (target / "file").read_text() == "x"


@pytest.mark.parametrize("error", [KeyboardInterrupt, CheckpointError, OSError])
def test_atomic_directory_leaves_no_files_if_block_raises(error, tmp_path):
    with (
        pytest.raises(CheckpointError if error is OSError else error),
        atomic.atomic_directory(tmp_path / "a" / "b" / "target", print) as work,
    ):
        (work / "file").write_text("x")
        raise error
    assert not list(tmp_path.iterdir())


def test_atomic_directory_removes_leftover_partial_folders(tmp_path):
    stale = tmp_path / ".target.partial-0123456789ab"
    (stale / "iter_0000000").mkdir(parents=True)
    for folder in (stale, tmp_path / ".target.partial-ba9876543210"):  # that of the second is in place already
        (atomic.scratch_folder(folder) / "plan").mkdir(parents=True)
    said: list[str] = []
    with atomic.atomic_directory(tmp_path / "target", said.append):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
    assert len(said) == 1 and str(stale) in said[0]


@pytest.mark.parametrize("name", [".target.partial-backup", ".target.replaced-yesterday"])
def test_atomic_directory_keeps_user_folders_with_similar_names(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "precious").touch()
    with atomic.atomic_directory(tmp_path / "target", print):
        pass
    assert (tmp_path / name / "precious").exists()


def test_atomic_directory_raises_if_target_is_being_written(tmp_path):
    with atomic.atomic_directory(tmp_path / "target", print) as work:
        refused = pytest.raises(CheckpointError, match="is being written by another process")
        with refused, atomic.atomic_directory(tmp_path / "target", print):
            pass
        assert work.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("keep", [False, True])
def test_atomic_directory_holds_lock_before_and_after_final_rename(tmp_path, monkeypatch, keep):
    target, original, refused = tmp_path / "target", atomic._move_into_place, []

    def meet(*arguments, **named):
        for moment in (lambda: None, lambda: original(*arguments, **named)):
            moment()
            with pytest.raises(CheckpointError, match="is being written by another process") as found:
                atomic.atomic_directory(target, print).__enter__()
            refused.append(found)

    monkeypatch.setattr(atomic, "_move_into_place", meet)
    with atomic.atomic_directory(target, print, keep=keep) as work:
        atomic.scratch_folder(work).mkdir()
    assert len(refused) == 2 and [path.name for path in tmp_path.iterdir()] == ["target"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("earlier", [False, True])
def test_atomic_directory_keeps_result_if_interrupted_after_final_rename(tmp_path, monkeypatch, keep, earlier):
    target, original = tmp_path / "target", atomic._move_into_place
    if earlier:
        target.mkdir()
        (target / "old").touch()

    def interrupted(*arguments, **named):
        original(*arguments, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "_move_into_place", interrupted)
    with atomic.atomic_directory(target, print, keep=keep, check_replaceable=lambda _: None) as work:
        atomic.scratch_folder(work).mkdir()
        (atomic.scratch_folder(work) / "plan").touch()
        (work / "new").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "target"]


def test_atomic_directory_recreates_lock_file_that_was_removed_before_flock(tmp_path, monkeypatch):
    """The process that held the lock removes the lock file after this process has opened it."""
    path, flock, once = tmp_path / ".target.partial-lock", fcntl.flock, []

    def late(*arguments):
        if not once:
            once.append(path.unlink())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", late)
    with atomic.atomic_directory(tmp_path / "target", print):
        assert path.exists()
        with pytest.raises(CheckpointError, match="another process"):
            atomic.atomic_directory(tmp_path / "target", print).__enter__()
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_atomic_directory_raises_and_keeps_target_that_appears_during_block(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(CheckpointError, match="not empty"), atomic.atomic_directory(target, print):
        target.mkdir()
        (target / "other").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "other"]


@pytest.mark.parametrize("swap", [True, False])
def test_atomic_directory_replaces_existing_target_at_end_of_block(tmp_path, monkeypatch, swap):
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("x")
    if not swap:  # as on a file system that has no such operation
        monkeypatch.setattr(atomic, "_RENAME_EXCHANGE", 1 << 20)
    with atomic.atomic_directory(target, print, check_replaceable=lambda _: True) as work:
        (work / "new").write_text("x")
        assert (target / "old").exists()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["new", "target"]


refused = functools.partial(expect_error, options=["--overwrite"])


def test_overwrite_raises_if_folder_was_not_written_by_conversion(capsys, tmp_path, imported, untied_folder):
    project = tmp_path / "new" / "hf"
    (project / "src").mkdir(parents=True)
    shutil.copyfile(untied_folder / "config.json", project / "config.json")
    (project / "src" / "train.py").write_text("precious")
    refused(capsys, exporting(imported, tmp_path), "was not written by a conversion", MANIFEST, "remove it yourself")
    # A model that something else wrote is not ours to replace either.
    shutil.rmtree(project)
    shutil.copytree(untied_folder, project)
    refused(capsys, exporting(imported, tmp_path), "was not written by a conversion", MANIFEST)


def test_overwrite_raises_if_folder_belongs_to_training_run(capsys, tmp_path, untied_folder, imported):
    run = shutil.copytree(imported, tmp_path / "new" / "megatron")
    (run / "iter_0000100").mkdir()
    (run / "iter_0000100" / ".metadata").write_text("precious")
    error = refused(capsys, importing(untied_folder, tmp_path), "holds 1 files that are not part of our checkpoint")
    assert "iter_0000100/.metadata" in error
    # What a trainer of ours has written in the first iteration's place has a manifest, but not a conversion's.
    shutil.rmtree(run / "iter_0000100")
    write_object(run / "iter_0000000" / MANIFEST, {**describe_tool(), "source": "x", "expert_layout": None})
    refused(capsys, importing(untied_folder, tmp_path), "was not written by a conversion", MANIFEST)


def test_overwrite_error_lists_user_files_that_would_be_deleted(capsys, tmp_path, imported):
    target = tmp_path / "new" / "hf"
    export_checkpoint(imported, target)
    for number in range(25):
        (target / f"notes-{number:02d}.txt").write_text("precious")
    (target / "data").symlink_to(tmp_path)
    error = refused(capsys, exporting(imported, tmp_path), "holds 26 files that are not part of our checkpoint")
    assert "data, notes-00.txt" in error and "notes-18.txt and 6 more" in error and "notes-19" not in error


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_overwrite_replaces_earlier_conversion(ckpt_format, tmp_path, tied_folder, moe_folder, monkeypatch):
    monkeypatch.setattr(output_files, "RANGE_BYTES", 1 << 14)
    import_checkpoint(moe_folder, tmp_path / "m", ckpt_format=ckpt_format)
    import_checkpoint(tied_folder, tmp_path / "m", overwrite=True)
    export_checkpoint(tmp_path / "m", tmp_path / "hf", max_shard_bytes=300_000)
    export_checkpoint(tmp_path / "m", tmp_path / "hf", overwrite=True)
    assert verify_checkpoint(tmp_path / "hf", tmp_path / "m").same
    assert not list((tmp_path / "hf").glob("model-*"))


def test_overwrite_raises_if_manifest_lacks_digests_or_kind_differs(tmp_path, imported):
    export_checkpoint(imported, tmp_path / "hf")
    EarlierResult(".", "huggingface").check(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="conversion of this kind"):
        EarlierResult(".", "peft").check(tmp_path / "hf")
    said = read_object(tmp_path / "hf" / MANIFEST)
    for files_then in (None, sorted(said["files"])):
        write_object(tmp_path / "hf" / MANIFEST, said | {"files": files_then})
        with pytest.raises(CheckpointError, match=r"lists no digests of the files.* does not replace"):
            export_checkpoint(imported, tmp_path / "hf", overwrite=True)


def put_weights(target: Path) -> str:
    path = target / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return path.name


def put_settings(target: Path) -> str:
    (target / "generation_config.json").write_text("{}")
    return "generation_config.json"


def put_link(target: Path) -> str:
    path = target / "model.safetensors"
    path.rename(target.parent / "elsewhere")
    path.symlink_to(target.parent / "elsewhere")
    with path.open("ab") as file:
        file.write(b" ")
    return path.name


@pytest.mark.parametrize("put", [put_weights, put_settings, put_link])
def test_overwrite_raises_if_files_changed_since_conversion(put, capsys, tmp_path, untied_folder, imported):
    target = tmp_path / "new" / "hf"
    export_checkpoint(imported, target)
    name = put(target)
    before = (target / name).read_bytes()
    error = refused(capsys, exporting(imported, tmp_path), "holds 1 files changed since")
    assert name in error and (target / name).read_bytes() == before


def test_overwrite_keeps_user_file_written_during_final_rename(tmp_path, tied_folder, untied_folder, monkeypatch):
    import_checkpoint(tied_folder, tmp_path / "m")
    original = atomic._move_into_place

    def intrude(*arguments, **named):
        (tmp_path / "m" / "precious").write_text("x")
        original(*arguments, **named)

    monkeypatch.setattr(atomic, "_move_into_place", intrude)
    report = import_checkpoint(untied_folder, tmp_path / "m", overwrite=True)
    (kept,) = tmp_path.glob("m.replaced-*")
    assert (kept / "precious").exists() and any(str(kept) in note for note in report.notes)
    assert verify_checkpoint(untied_folder, tmp_path / "m").same and verify_checkpoint(tied_folder, kept).same
    # The next run does not take it for its own.
    monkeypatch.setattr(atomic, "_move_into_place", original)
    import_checkpoint(tied_folder, tmp_path / "m", overwrite=True)
    assert (kept / "precious").exists()


def test_overwrite_raises_and_keeps_user_file_written_during_conversion(tmp_path, untied_folder):
    import_checkpoint(untied_folder, tmp_path / "m")
    intruded = before_each_unit(lambda *_: (tmp_path / "m" / "precious").write_text("x"))
    lost = "that are not part of our checkpoint, which would be deleted: precious;"
    with intruded, pytest.raises(CheckpointError, match=lost):
        import_checkpoint(untied_folder, tmp_path / "m", overwrite=True)
    assert (tmp_path / "m" / "precious").exists() and verify_checkpoint(untied_folder, tmp_path / "m").same
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    # With --resume what is written stays, and it is enough when the way is free.
    with pytest.raises(CheckpointError, match="precious"):
        import_checkpoint(untied_folder, tmp_path / "m", overwrite=True, resume=True)
    (tmp_path / "m" / "precious").unlink()
    assert not import_checkpoint(untied_folder, tmp_path / "m", overwrite=True, resume=True).resumed


@pytest.mark.parametrize("earlier", [True, False])
def test_overwrite_keeps_permission_bits_of_target_folder(earlier, tmp_path, untied_folder):
    target, before = tmp_path / "m", os.umask(0o027)
    try:
        if earlier:
            import_checkpoint(untied_folder, target)
        else:
            target.mkdir()  # an empty folder somebody prepared
        target.chmod(0o2770)
        import_checkpoint(untied_folder, target, overwrite=True)
        assert stat.S_IMODE(target.stat().st_mode) == 0o2770
        # What is in it follows the umask, and the group that setgid hands down.
        assert stat.S_IMODE((target / "iter_0000000").stat().st_mode) == 0o2750
        import_checkpoint(untied_folder, tmp_path / "other")
        assert stat.S_IMODE((tmp_path / "other").stat().st_mode) == 0o750
    finally:
        os.umask(before)


def test_overwrite_reports_old_result_that_cannot_be_removed(tmp_path, tied_folder, untied_folder, monkeypatch):
    import_checkpoint(tied_folder, tmp_path / "m")
    original = shutil.rmtree

    def refuse(path, **named):
        if Path(path).match(".m.partial-????????????"):
            raise OSError(errno.EINVAL, "Invalid argument")
        original(path, **named)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    report = import_checkpoint(untied_folder, tmp_path / "m", overwrite=True)
    (left,) = tmp_path.glob(".m.partial-*")
    assert any("is complete and in place" in note and str(left) in note for note in report.notes)
    assert verify_checkpoint(untied_folder, tmp_path / "m").same and verify_checkpoint(tied_folder, left).same


@pytest.fixture
def begun(untied_folder, tmp_path, monkeypatch) -> Path:
    """An import to `tmp_path / "m"` that was to be continued and got as far as five units."""
    monkeypatch.setattr(output_files, "RANGE_BYTES", 1 << 14)
    with broken_disk(5), pytest.raises(CheckpointError, match="stays in"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True)
    (folder,) = tmp_path.glob(".m.partial-????????????")
    return folder


def damage(folder: Path) -> str:
    line = (atomic.scratch_folder(folder) / "rank-0").read_text().splitlines()[0]
    name, start, end, _ = line.split(" ")
    path = folder / "iter_0000000" / name
    data = bytearray(path.read_bytes())
    data[(int(start) + int(end)) // 2] ^= 4
    path.write_bytes(data)
    return name


@pytest.mark.parametrize("verify", [False, True])
def test_resume_rewrites_damaged_byte_range(begun, untied_folder, tmp_path, verify):
    damage(begun)
    report = import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=verify)
    assert any(note.startswith("1 of 5 parts") for note in report.notes) and report.resumed
    import_checkpoint(untied_folder, tmp_path / "whole")
    assert contents(tmp_path / "m") == contents(tmp_path / "whole")


def test_import_resume_suggests_omitting_resume_if_verify_fails(begun, untied_folder, tmp_path, monkeypatch):
    damage(begun)  # and in such a way that it is not noticed
    monkeypatch.setattr(output_files, "find_unchanged", lambda _, recorded, __: [part for part, _ in recorded])
    with pytest.raises(CheckpointError, match=r"not written correctly.*; if --resume fails again, omit it"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True, verify=True)
    assert import_checkpoint(untied_folder, tmp_path / "m", verify=True).resumed == 0


def test_import_resume_suggests_omitting_resume_if_file_is_too_long(begun, untied_folder, tmp_path):
    with (begun / "iter_0000000" / damage(begun)).open("ab") as file:
        file.write(b"x" * (1 << 20))
    with pytest.raises(CheckpointError, match=r"bytes, expected .*; if --resume fails again, omit it"):
        import_checkpoint(untied_folder, tmp_path / "m", resume=True)


def test_resume_with_different_options_fails_and_keeps_partial_result(begun, untied_folder, tmp_path, capsys):
    arguments = ["import", "--no-progress", "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "m")]
    before = contents(begun)
    assert main([*arguments, "--resume", "--torch-dtype", "bfloat16"]) == 2
    error = capsys.readouterr().err
    assert str(begun) in error and "options or version" in error and "omit --resume" in error
    assert contents(begun) == before and not (tmp_path / "m").exists()
    assert main([*arguments, "--resume"]) == 0
    assert "MB of its files existed already" in capsys.readouterr().out


@pytest.fixture
def whole(untied_folder, tmp_path, monkeypatch) -> Path:
    """An import to `tmp_path / "m"`, whole but not in place, in a model folder of its own: `tmp_path / "model"`."""
    model = shutil.copytree(untied_folder, tmp_path / "model")

    def refuse(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="the complete result stays in"):
        patch.setattr(os, "rename", refuse)
        import_checkpoint(model, tmp_path / "m", resume=True)
    return model


def test_resume_writes_no_tensors_if_all_were_written_before(whole, tmp_path):
    report = import_checkpoint(whole, tmp_path / "m", resume=True)
    assert report.resumed and not report.written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "model"]


def test_resume_replaces_config_files_of_earlier_attempt(whole, tmp_path):
    """Config files of the source may have changed, and the earlier attempt may have left files that it has no more."""
    (folder,) = tmp_path.glob(".m.partial-????????????")
    (folder / "iter_0000000" / "hf" / "stray.json").write_text("{}")
    (whole / "generation_config.json").write_text('{"temperature": 0.5}')
    assert import_checkpoint(whole, tmp_path / "m", resume=True).resumed
    import_checkpoint(whole, tmp_path / "other")
    assert contents(tmp_path / "m") == contents(tmp_path / "other")
    assert (tmp_path / "m" / "iter_0000000" / "hf" / "generation_config.json").exists()


def test_import_without_resume_deletes_partial_result_and_starts_over(begun, untied_folder, tmp_path):
    report = import_checkpoint(untied_folder, tmp_path / "m", torch_dtype="bfloat16")
    assert not report.resumed and str(begun) in report.notes[0] and "removed" in report.notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_resume_with_empty_plan_file_starts_over(begun, untied_folder, tmp_path):
    (atomic.scratch_folder(begun) / "plan").write_text("")
    report = import_checkpoint(untied_folder, tmp_path / "m", resume=True)
    assert not report.resumed and verify_checkpoint(untied_folder, tmp_path / "m").same


# Writing a unit takes a second and removing what was written another one; both say so when they begin.
SLOW = """
import shutil, sys, time
from qwen3vl_bridge.cli import convert as cli; from qwen3vl_bridge.checkpoint.formats import output_files

write, remove = output_files._write_range, shutil.rmtree

def slowly(*arguments):
    print("writing", flush=True)
    time.sleep(1.5)
    write(*arguments)

def removed(*arguments, **options):
    print("removing", flush=True)
    time.sleep(1.5)
    remove(*arguments, **options)

output_files._write_range, shutil.rmtree = slowly, removed
sys.exit(cli.main())
"""


def start(source: Path, target: Path, *before: str) -> subprocess.Popen:
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    arguments = ["import", "--no-progress", "--hf-model", source, "--megatron-path", target]
    process = subprocess.Popen([*before, sys.executable, "-c", SLOW, *arguments], **pipes)
    assert process.stdout.readline() == "writing\n"
    return process


@pytest.fixture
def started(untied_folder, tmp_path) -> Iterator[subprocess.Popen]:
    yield (process := start(untied_folder, tmp_path / "out" / "m"))
    process.kill()
    process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_import_continues_cleanup_after_second_signal(number, started, tmp_path):
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
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_import_exits_without_cleanup_after_third_sigint(started, untied_folder, tmp_path):
    for _ in range(3):
        started.send_signal(signal.SIGINT)
        time.sleep(1.05)
    _, error = started.communicate(timeout=30)
    assert started.returncode == 130 and error.count("\n") == 1 and "interrupt again to stop at once" in error
    assert all(path.name.startswith(".m.partial-") for path in (tmp_path / "out").iterdir())
    assert not (tmp_path / "out" / "m").exists()


@pytest.mark.slow
def test_import_under_nohup_ignores_sighup(untied_folder, tmp_path):
    process = start(untied_folder, tmp_path / "m", "nohup")
    os.kill(process.pid, signal.SIGHUP)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and str(tmp_path / "m") in out, error

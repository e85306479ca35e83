"""--overwrite replaces an earlier result and nothing else, and leaves the folder to whoever might use it before."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    copying,
    export_checkpoint,
    import_checkpoint,
    manifest,
    staging,
    verify_checkpoint,
)
from qwen3vl_bridge.checkpoint.json_files import read_object, write_object
from qwen3vl_bridge.checkpoint.manifest import MANIFEST, tool

import pytest

from .support import expect_error, exporting, importing


def written_over(arguments: list[str]) -> list[str]:
    return [arguments[0], "--overwrite", *arguments[1:]]


def of_an_earlier_version(folder: Path) -> None:
    """Make a result one whose manifest does not say which files it has."""
    said = read_object(folder / MANIFEST)
    del said["files"]
    write_object(folder / MANIFEST, said)


def test_a_project_that_holds_a_configuration_is_no_result(capsys, tmp_path, imported, untied_folder):
    project = tmp_path / "new" / "hf"
    (project / "src").mkdir(parents=True)
    shutil.copyfile(untied_folder / "config.json", project / "config.json")
    (project / "src" / "train.py").write_text("precious")
    expect_error(
        capsys, written_over(exporting(imported, tmp_path)), "is no checkpoint", MANIFEST, "remove it yourself"
    )
    # A model that something else wrote is not ours to replace either.
    shutil.rmtree(project)
    shutil.copytree(untied_folder, project)
    expect_error(capsys, written_over(exporting(imported, tmp_path)), "is no checkpoint", MANIFEST)


def test_a_run_that_holds_other_iterations_is_no_result(capsys, tmp_path, untied_folder, imported):
    run = shutil.copytree(imported, tmp_path / "new" / "megatron")
    (run / "iter_0000100").mkdir()
    (run / "iter_0000100" / ".metadata").write_text("precious")
    error = expect_error(capsys, written_over(importing(untied_folder, tmp_path)), "holds 1 files beside a checkpoint")
    assert "iter_0000100/.metadata" in error
    # What a trainer of ours has written in the first iteration's place has a manifest, but not a conversion's.
    shutil.rmtree(run / "iter_0000100")
    write_object(run / "iter_0000000" / MANIFEST, {**tool(), "source": "x", "expert_layout": None})
    expect_error(capsys, written_over(importing(untied_folder, tmp_path)), "is no checkpoint", MANIFEST)


@pytest.mark.parametrize("earlier", [False, True])
def test_what_lies_beside_a_result_is_listed(capsys, tmp_path, imported, earlier):
    target = tmp_path / "new" / "hf"
    export_checkpoint(imported, target)
    if earlier:
        of_an_earlier_version(target)
    for number in range(25):
        (target / f"notes-{number:02d}.txt").write_text("precious")
    (target / "data").symlink_to(tmp_path)
    error = expect_error(capsys, written_over(exporting(imported, tmp_path)), "holds 26 files beside a checkpoint")
    assert "data, notes-00.txt" in error and "notes-18.txt and 6 more" in error and "notes-19" not in error


def test_the_manifest_tells_files_apart_that_look_alike(capsys, tmp_path, imported):
    target = tmp_path / "new" / "hf"
    export_checkpoint(imported, target)
    (target / "tokenizer_of_mine.json").write_text("{}")
    expect_error(capsys, written_over(exporting(imported, tmp_path)), "tokenizer_of_mine.json")


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_a_result_of_an_earlier_version_is_replaced(ckpt_format, tmp_path, tied_folder, untied_folder, moe_folder):
    import_checkpoint(moe_folder, tmp_path / "m", ckpt_format=ckpt_format)
    of_an_earlier_version(tmp_path / "m" / "iter_0000000")
    import_checkpoint(tied_folder, tmp_path / "m", overwrite=True)
    export_checkpoint(tmp_path / "m", tmp_path / "hf", max_shard_bytes=300_000)
    of_an_earlier_version(tmp_path / "hf")
    export_checkpoint(tmp_path / "m", tmp_path / "hf", overwrite=True)
    assert verify_checkpoint(tmp_path / "hf", tmp_path / "m").same
    assert not list((tmp_path / "hf").glob("model-*"))
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    write_object(adapters / MANIFEST, {**tool(), "format": "peft"})
    (adapters / "adapter_config.json").write_text("{}")
    manifest.check_replaceable(adapters, ".", lambda _: ("adapter_model.safetensors", "adapter_config.json"))


def test_what_came_to_a_result_meanwhile_is_kept(tmp_path, untied_folder, monkeypatch):
    import_checkpoint(untied_folder, tmp_path / "m")
    original = copying._commit

    def intrude(*arguments):
        (tmp_path / "m" / "precious").write_text("x")
        original(*arguments)

    monkeypatch.setattr(copying, "_commit", intrude)
    with pytest.raises(CheckpointError, match="beside a checkpoint of ours, which would be lost: precious;"):
        import_checkpoint(untied_folder, tmp_path / "m", overwrite=True)
    assert (tmp_path / "m" / "precious").exists() and verify_checkpoint(untied_folder, tmp_path / "m").same
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    # With --resume what is written stays, and it is enough when the way is free.
    with pytest.raises(CheckpointError, match="precious"):
        import_checkpoint(untied_folder, tmp_path / "m", overwrite=True, resume=True)
    monkeypatch.setattr(copying, "_commit", original)
    (tmp_path / "m" / "precious").unlink()
    assert not import_checkpoint(untied_folder, tmp_path / "m", overwrite=True, resume=True).resumed


@pytest.mark.parametrize("earlier", [True, False])
def test_the_mode_of_the_target_stays(earlier, tmp_path, untied_folder):
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


def refuse(monkeypatch, name: str, refused: Path):
    """Have the disk refuse one thing in one place."""
    original = getattr(staging, name) if hasattr(staging, name) else getattr(shutil, name)

    def instead(path, *arguments, **named):
        if Path(path) == refused or (name == "rmtree" and Path(path).match(str(refused))):
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(path, *arguments, **named)

    monkeypatch.setattr(staging if hasattr(staging, name) else shutil, name, instead)


def test_a_result_is_in_place_when_its_parent_cannot_be_synced(tmp_path, untied_folder, monkeypatch):
    refuse(monkeypatch, "_sync", tmp_path)
    report = import_checkpoint(untied_folder, tmp_path / "m")
    assert any("is whole and in place" in note and "cannot be synced (Invalid arg" in note for note in report.notes)
    assert verify_checkpoint(untied_folder, tmp_path / "m").same


def test_a_result_is_in_place_when_the_earlier_one_cannot_be_removed(tmp_path, tied_folder, untied_folder, monkeypatch):
    import_checkpoint(tied_folder, tmp_path / "m")
    refuse(monkeypatch, "rmtree", Path(".m.partial-*"))
    report = import_checkpoint(untied_folder, tmp_path / "m", overwrite=True)
    (left,) = tmp_path.glob(".m.partial-*")
    assert any("is whole and in place" in note and str(left) in note for note in report.notes)
    assert verify_checkpoint(untied_folder, tmp_path / "m").same and verify_checkpoint(tied_folder, left).same

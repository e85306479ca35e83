"""Bad checkpoints, targets and options get one clear error each and leave nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.cli.convert import main

import pytest
import torch
import torch.distributed.checkpoint as dcp

from .support import (
    NORM,
    Q_PROJ,
    change_extra,
    change_misshapen,
    change_missing,
    expect_error,
    exporting,
    importing,
    model_with,
    stock_load,
)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (change_missing, ("final_layernorm.weight: found nothing, expected [80]",)),
        (change_extra, ("1 unexpected", "found [3] float32, expected no such tensor")),
        (change_misshapen, ("1 misshapen", "linear_proj.weight: found [5, 128], expected [80, 128]")),
    ],
)
def test_a_checkpoint_whose_tensors_are_not_as_they_should(capsys, tmp_path, imported, untied_folder, change, parts):
    names = {NORM: "language_model.decoder.final_layernorm.weight", "model.language_model.layers.9.x": "extra",
             Q_PROJ: "language_model.decoder.layers.1.self_attention.linear_proj.weight"}  # fmt: skip
    stored = {k: v for k, v in stock_load(imported / "iter_0000000").items() if isinstance(v, torch.Tensor)}
    view = {name: stored.get(f"model.module.{key}", torch.zeros(1)) for name, key in names.items()}
    known = set(view) - {"model.language_model.layers.9.x"}
    view = {name: view[name] for name in known}
    change(view)
    stored = {k: v for k, v in stored.items() if k.removeprefix("model.module.") not in names.values()}
    stored |= {f"model.module.{names[name]}": tensor for name, tensor in view.items()}
    dcp.save(stored, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    arguments = exporting(tmp_path / "checkpoint", tmp_path)
    expect_error(capsys, [arguments[0], "--hf-model", str(untied_folder), *arguments[1:]], *parts)


def test_a_truncated_checkpoint(capsys, tmp_path, imported):
    shutil.copytree(imported, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "iter_0000000" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)
    expect_error(capsys, exporting(tmp_path / "checkpoint", tmp_path), str(path), "expected")
    path.unlink()
    expect_error(capsys, exporting(tmp_path / "checkpoint", tmp_path), str(path), "found nothing, expected a file")


def test_an_item_overwritten_with_something_else(capsys, tmp_path, imported):
    shutil.copytree(imported, tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "iter_0000000" / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    expect_error(capsys, exporting(tmp_path / "checkpoint", tmp_path), str(path), "cannot be read")


@pytest.mark.parametrize("text", ["", "x", "-1", "9" * 5000, "3"])
def test_a_tracker_that_names_no_iteration(capsys, tmp_path, imported, text):
    shutil.copytree(imported, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "latest_checkpointed_iteration.txt").write_text(text)
    expect_error(
        capsys, exporting(tmp_path / "checkpoint", tmp_path), "expected an iteration number" if text != "3" else "iter_"
    )


@pytest.mark.parametrize(
    ("text", "part"),
    [("{}", "sharded_backend is None"), ('{"sharded_backend": "zarr"}', "is 'zarr'"), ("x", "as JSON")],
)
def test_a_checkpoint_of_another_format(capsys, tmp_path, imported, text, part):
    shutil.copytree(imported, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "iter_0000000" / "metadata.json").write_text(text)
    expect_error(capsys, exporting(tmp_path / "checkpoint", tmp_path), "metadata.json", part)


def test_a_checkpoint_that_says_it_is_of_the_other_format(capsys, tmp_path, imported):
    shutil.copytree(imported, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "iter_0000000" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    expect_error(capsys, exporting(tmp_path / "checkpoint", tmp_path), "holds no model", "model.module.")


def test_an_existing_target(capsys, tmp_path, untied_folder, imported):
    for arguments in (importing(untied_folder, tmp_path), exporting(imported, tmp_path)):
        target = Path(arguments[-1])
        target.mkdir(parents=True)
        (target / "precious").write_text("x")
        expect_error(capsys, arguments, str(target), "exists already", "--overwrite")
        expect_error(
            capsys,
            [arguments[0], "--overwrite", *arguments[1:]],
            "was not written by a conversion",
            "remove it yourself",
        )
        assert (target / "precious").read_text() == "x"


def test_overwrite_replaces_an_earlier_result(tmp_path, untied_folder, tied_folder):
    import_checkpoint(tied_folder, tmp_path / "megatron")
    import_checkpoint(untied_folder, tmp_path / "megatron", overwrite=True)
    assert verify_checkpoint(untied_folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "megatron"]


def test_a_target_inside_the_source(capsys, tmp_path, untied_folder):
    shutil.copytree(untied_folder, tmp_path / "model")
    target = str(tmp_path / "model" / "megatron")
    expect_error(capsys, ["import", "--hf-model", str(tmp_path / "model"), "--megatron-path", target], "overlap")


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--ep", "2"], ("--ep is 2", "no experts")),
        (["--etp", "2"], ("--etp is 2", "no experts")),
        (["--pp", "2"], ("--pp is 2", "no pipeline stages")),
        (["--tp", "3"], ("--tp is 3", "divisor of heads, which is 4")),
        (["--tp", "0"], ("--tp is 0", "expected 1 or more")),
    ],
)
def test_parallel_sizes_that_cannot_be(capsys, tmp_path, untied_folder, options, parts):
    arguments = importing(untied_folder, tmp_path)
    expect_error(capsys, [arguments[0], *options, *arguments[1:]], *parts)


def test_a_disk_without_room(capsys, tmp_path, untied_folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 5, 5))
    expect_error(capsys, importing(untied_folder, tmp_path), "has 5 bytes free, expected")


def test_a_disk_that_fills_up_meanwhile(capsys, tmp_path, untied_folder):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # Python turns the signal into an OSError
    try:
        expect_error(capsys, importing(untied_folder, tmp_path), "File too large", "nothing was left")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_verify_names_what_differs(capsys, tmp_path, untied_folder, imported):
    def change(tensors):
        tensors[Q_PROJ][7, 5] += 1
        tensors[NORM].neg_()

    folder = model_with(tmp_path / "model", untied_folder, change)
    report = verify_checkpoint(folder, imported)
    assert {(d.name, d.elements, d.first) for d in report.differences} == {(Q_PROJ, 1, 7 * 80 + 5), (NORM, 80, 0)}
    assert main(["verify", "--no-progress", "--hf-model", str(folder), "--megatron-path", str(imported)]) == 1
    assert f"{Q_PROJ}: 1 of 10240 elements differ" in capsys.readouterr().err


def test_verify_during_import_catches_a_wrong_byte(tmp_path, untied_folder, monkeypatch):
    from qwen3vl_bridge.checkpoint.formats import tensors

    original = tensors.SegmentReader._read

    def damage(self, file, into, offset, path, name):
        original(self, file, into, offset, path, name)
        if name == NORM and path.suffix == ".safetensors" and not damaged:
            into[0] ^= 1
            damaged.append(True)

    damaged: list[bool] = []
    monkeypatch.setattr(tensors.SegmentReader, "_read", damage)
    with pytest.raises(CheckpointError, match="not written correctly"):
        import_checkpoint(untied_folder, tmp_path / "megatron", verify=True)
    assert not list(tmp_path.iterdir())

"""Options: what is left aside, what comes along, what is refused, in one process and in several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.io.files import write_object

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ..support import (
    change_extra,
    change_missing,
    expect_error,
    exporting,
    importing,
    model_with,
    model_with_config,
    stock_load,
)

CONVERT = Path(__file__).parents[3] / "conversion" / "convert.py"


@pytest.mark.slow
def test_several_processes_write_what_one_writes(moe_folder, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", str(CONVERT)]
    arguments = ["import", "--hf-model", str(moe_folder), "--megatron-path", str(tmp_path / "two"), "--ep", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run([*command, *arguments, "--verify"], capture_output=True, text=True, env=environment)
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("parameters in float32") == 1
    assert "import, process 0 of 2: 100 %" in found.stderr and "verify, process 0 of 2: 100 %" in found.stderr
    assert main([*arguments[:3], "--megatron-path", str(tmp_path / "one"), "--ep", "2", "--no-progress"]) == 0
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            assert (tmp_path / "two" / path.relative_to(tmp_path / "one")).read_bytes() == path.read_bytes(), path
    found = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment)
    assert found.returncode and found.stderr.count("error: ") == 1 and "exists already" in found.stderr


def test_tensors_that_the_model_does_not_call_for(tmp_path, untied_folder, imported):
    folder = model_with(tmp_path / "model", untied_folder, change_extra)
    with pytest.raises(CheckpointError, match="1 unexpected"):
        import_checkpoint(folder, tmp_path / "megatron")
    report = import_checkpoint(folder, tmp_path / "megatron", strict=False, verify=True)
    assert report.notes == (
        "model.language_model.layers.9.x [3] float32 is not a tensor of this model; it was ignored",
    )
    assert verify_checkpoint(untied_folder, tmp_path / "megatron").same
    folder = model_with(tmp_path / "lacking", untied_folder, change_missing)
    with pytest.raises(CheckpointError, match="1 missing"):
        import_checkpoint(folder, tmp_path / "lacking-megatron", strict=False)
    stored = {k: v for k, v in stock_load(imported / "iter_0000000").items() if isinstance(v, torch.Tensor)}
    stored["model.module.language_model.extra"] = torch.zeros(3)
    dcp.save(stored, checkpoint_id=tmp_path / "trained", no_dist=True)
    with pytest.raises(CheckpointError, match="1 unexpected"):
        export_checkpoint(tmp_path / "trained", tmp_path / "hf", hf_model=untied_folder)
    report = export_checkpoint(tmp_path / "trained", tmp_path / "hf", hf_model=untied_folder, strict=False)
    assert "language_model.extra [3] float32 is not a tensor" in report.notes[0]


def test_code_that_a_model_brings_comes_along_only_when_trusted(capsys, tmp_path, untied_folder):
    code = {"auto_map": {"AutoModel": "modeling.Model"}}
    folder = model_with_config(tmp_path / "model", untied_folder, code)
    (folder / "modeling.py").write_text("raise SystemExit('never run here')\n")
    expect_error(capsys, importing(folder, tmp_path), "config.json", "auto_map", "--trust-remote-code")
    import_checkpoint(folder, tmp_path / "megatron", trust_remote_code=True)
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", trust_remote_code=True)
    assert (tmp_path / "hf" / "modeling.py").read_text() == (folder / "modeling.py").read_text()
    import_checkpoint(untied_folder, tmp_path / "plain")
    named = ["--hf-model", str(folder)]
    expect_error(capsys, exporting(tmp_path / "plain", tmp_path), "--trust-remote-code", options=named)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"text_config": {"_target_": "os.system", "_args_": ["true"]}}, "the key '_target_'"),
        ({"note": [{"deep": "${oc.env:HOME}"}]}, "would replace"),
    ],
)
def test_a_configuration_that_megatron_bridge_would_act_on(capsys, tmp_path, untied_folder, change, part):
    folder = model_with_config(tmp_path / "model", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), "config.json", part)


def test_a_manifest_that_lies(capsys, tmp_path, moe_folder):
    import_checkpoint(moe_folder, tmp_path / "megatron")
    path = tmp_path / "megatron" / "iter_0000000" / "qwen3vl_bridge.json"
    for name, value in (("expert_layout", "SIDEWAYS"), ("expert_layout", ["x"]), ("sha256", {"a": "b"})):
        original = path.read_text()
        write_object(path, json.loads(original) | {name: value})
        if name == "sha256":
            assert main(["verify", "--no-progress", "--megatron-path", str(tmp_path / "megatron")]) == 2
            assert "checksums of other tensors" in capsys.readouterr().err
        else:
            expect_error(capsys, exporting(tmp_path / "megatron", tmp_path), str(path), "expert_layout")
        path.write_text(original)


@pytest.mark.parametrize("ckpt_format", ["fsdp_dtensor", "torch_dist"])
def test_inspect_says_what_the_manifest_says(ckpt_format, moe_folder, tmp_path, capsys):
    import_checkpoint(moe_folder, tmp_path / "megatron", ckpt_format=ckpt_format, checksums=True)
    found = inspect_checkpoint(tmp_path / "megatron")
    assert (found["format"], found["model"], found["checksums"]) == (ckpt_format, "qwen3_vl_moe", True)
    assert found["topology"]["ep"] == 1 and found["layer_spec"] == "transformer_engine"
    assert main(["inspect", "--megatron-path", str(tmp_path / "megatron")]) == 0
    table = capsys.readouterr().out
    assert "tp 1, pp 1, cp 1, ep 1, chunk_bytes 33554432" in table and "checksums      yes" in table
    assert inspect_checkpoint(moe_folder)["experts"] == "output_major"

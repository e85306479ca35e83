"""The command line: quick help, dry runs, options, readable output, errors that say what is wrong and what to do."""

import json
import os
import subprocess
import sys

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.core.files import write_object

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.support import (
    CHANGES,
    expect_error,
    exporting,
    importing,
    model_with,
    model_with_config,
    stock_load,
)
from tests.helpers.forked import ROOT

CONVERT = ROOT / "conversion" / "convert.py"


def convert(*arguments: object, **how) -> subprocess.CompletedProcess:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return subprocess.run([sys.executable, CONVERT, *map(str, arguments)], **pipes | how)


def test_convert_export_exits_with_code_2_if_checkpoint_folder_is_missing(tmp_path):
    found = convert("export", "--megatron-path", "/no/such", "--hf-path", tmp_path / "hf")
    assert found.returncode == 2 and not found.stdout
    assert found.stderr == "error: /no/such: there is no such folder, expected the folder of a Megatron checkpoint\n"


def test_convert_verify_reports_same_model_after_import_and_export(untied_folder, tmp_path, capsys):
    megatron, hf = str(tmp_path / "megatron"), str(tmp_path / "hf")
    assert main(["import", "--hf-model", str(untied_folder), "--megatron-path", megatron, "--tp", "2", "--verify"]) == 0
    out, error = capsys.readouterr()
    assert out.startswith(f"{megatron}: ") and "parameters in float32" in out
    assert "import: 100 %" in error and "verify: 100 %" in error
    assert main(["export", "--megatron-path", megatron, "--hf-path", hf, "--no-progress"]) == 0
    assert not capsys.readouterr().err
    assert main(["verify", "--hf-model", hf, "--megatron-path", megatron, "--no-progress"]) == 0
    assert capsys.readouterr().out.startswith("same: ")


def test_convert_dry_run_writes_nothing(untied_folder, tmp_path, capsys):
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


@pytest.fixture(scope="module")
def full():
    with open("/dev/full", "w") as file:
        yield file


@pytest.mark.slow
def test_import_with_unwritable_stdout_keeps_converted_checkpoint(full, untied_folder, tmp_path):
    place = tmp_path / "m"
    arguments = ["import", "--no-progress", "--hf-model", untied_folder, "--megatron-path", place]
    for more in ([], ["--json", "--overwrite"]):
        found = convert(*arguments, *more, stdout=full)
        why = "standard output cannot be written: No space left on device"
        expected = f"note: {place} is complete and in place, but its report could not be printed: {why}\n"
        assert (found.returncode, found.stderr) == (0, expected)
    assert main(["verify", "--no-progress", "--hf-model", str(untied_folder), "--megatron-path", str(place)]) == 0


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("command", ["inspect", "verify", pytest.param("import", marks=pytest.mark.slow)])
def test_read_only_convert_commands_exit_with_code_2_if_stdout_is_full(
    command, full, imported, untied_folder, tmp_path
):
    arguments = {
        "inspect": ["--megatron-path", imported],
        "verify": ["--hf-model", untied_folder, "--megatron-path", imported, "--no-progress"],
        "import": ["--hf-model", untied_folder, "--megatron-path", tmp_path / "m", "--dry-run"],
    }[command]
    found = convert(command, *arguments, stdout=full)
    expected = "error: standard output cannot be written: No space left on device\n"
    assert (found.returncode, found.stderr) == (2, expected)
    if command != "verify":  # nor is it a traceback where standard error is full too
        assert convert(command, *arguments, stdout=full, stderr=full).returncode == 2


def test_convert_exits_with_code_2_if_tilde_path_names_unknown_user(capsys, tmp_path, untied_folder, imported):
    nobody, part = "~nosuchuser/x", "~nosuchuser/x: ~nosuchuser is not the home folder of any user"
    expect_error(capsys, importing(nobody, tmp_path), part)
    expect_error(capsys, exporting(nobody, tmp_path), part)
    for arguments in (
        ["import", "--hf-model", str(untied_folder), "--megatron-path", nobody],
        ["export", "--megatron-path", str(imported), "--hf-path", nobody],
        ["inspect", "--hf-model", nobody],
    ):
        assert main(arguments) == 2
        assert capsys.readouterr().err == f"error: {part} here\n"


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["nonsense", "ftp://hub", "http://["])
def test_convert_exits_with_code_2_if_hf_endpoint_variable_is_invalid(endpoint, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    found = convert(*importing("Qwen/No-Such", tmp_path), env=environment)
    assert found.returncode == 2 and f"HF_ENDPOINT is {endpoint!r}" in found.stderr and "Traceback" not in found.stderr


def piped(arguments: list[str], closed: str) -> subprocess.CompletedProcess:
    reader, writer = os.pipe()
    os.close(reader)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    found = convert(*arguments, env=buffered, **{closed: writer})
    os.close(writer)
    return found


@pytest.mark.slow
def test_import_with_closed_output_pipe_keeps_converted_checkpoint(untied_folder, tmp_path):
    arguments = ["import", "--hf-model", str(untied_folder), "--megatron-path", str(tmp_path / "m")]
    found = piped([*arguments, "--no-progress"], "stdout")
    assert (found.returncode, found.stderr) == (0, "")
    found = piped([*arguments, "--overwrite"], "stderr")
    assert found.returncode == 0 and "parameters in float32" in found.stdout
    assert piped([*arguments, "--no-progress"], "stderr").returncode == 2  # it is there already


@pytest.mark.parametrize("variables", [{}, {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}])
def test_inspect_ignores_world_size_and_rank_variables(variables, capsys, monkeypatch, imported):
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    assert main(["inspect", "--megatron-path", str(imported)]) == 0
    assert "fsdp_dtensor" in capsys.readouterr().out


@pytest.mark.parametrize(("variables", "part"), [
    ({"WORLD_SIZE": "x"}, "WORLD_SIZE is 'x'"),
    ({}, "WORLD_SIZE is 2, but the processes cannot connect to each other: "),
    ({"RANK": "0", "MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT expected, but not set; expected processes"),
    ({"RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}, "RANK is '2', expected 0 to 1"),
    ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}, "to each other: invalid literal"),
])  # fmt: skip
def test_convert_exits_with_code_2_if_torchrun_variables_are_invalid(
    variables, part, capsys, monkeypatch, untied_folder, tmp_path, no_groups
):
    for name, value in {"WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)
    expect_error(capsys, importing(untied_folder, tmp_path), part)


@pytest.mark.slow
def test_import_by_two_processes_writes_same_bytes_as_one_process(moe_folder, tmp_path):
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


def test_convert_with_strict_false_ignores_unexpected_tensors(tmp_path, untied_folder, imported):
    folder = model_with(tmp_path / "model", untied_folder, CHANGES["extra"])
    with pytest.raises(CheckpointError, match="1 unexpected"):
        import_checkpoint(folder, tmp_path / "megatron")
    report = import_checkpoint(folder, tmp_path / "megatron", strict=False, verify=True)
    assert report.notes == (
        "model.language_model.layers.9.x [3] float32 is not a tensor of this model; it was ignored",
    )
    assert verify_checkpoint(untied_folder, tmp_path / "megatron").same
    folder = model_with(tmp_path / "lacking", untied_folder, CHANGES["missing"])
    with pytest.raises(CheckpointError, match="1 missing"):
        import_checkpoint(folder, tmp_path / "lacking-megatron", strict=False)
    stored = stock_load(imported / "iter_0000000")
    stored["model.module.language_model.extra"] = torch.zeros(3)
    dcp.save(stored, checkpoint_id=tmp_path / "trained", no_dist=True)
    with pytest.raises(CheckpointError, match="1 unexpected"):
        export_checkpoint(tmp_path / "trained", tmp_path / "hf", hf_model=untied_folder)
    report = export_checkpoint(tmp_path / "trained", tmp_path / "hf", hf_model=untied_folder, strict=False)
    assert "language_model.extra [3] float32 is not a tensor" in report.notes[0]


def test_convert_of_model_with_remote_code_requires_trust_remote_code(capsys, tmp_path, untied_folder):
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


@pytest.mark.parametrize(("change", "part"), [
    ({"text_config": {"_target_": "os.system", "_args_": ["true"]}}, "the key '_target_'"),
    ({"note": [{"deep": "${oc.env:HOME}"}]}, "would replace"),
])  # fmt: skip
def test_import_raises_if_config_json_has_hydra_target_or_interpolation(capsys, tmp_path, untied_folder, change, part):
    folder = model_with_config(tmp_path / "model", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), "config.json", part)


def test_export_and_verify_raise_if_manifest_is_invalid(capsys, tmp_path, moe_folder):
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
def test_inspect_prints_format_parameter_count_and_parallel_sizes(ckpt_format, moe_folder, tmp_path, capsys):
    import_checkpoint(moe_folder, tmp_path / "megatron", ckpt_format=ckpt_format, checksums=True)
    arguments = ["inspect", "--megatron-path", str(tmp_path / "megatron")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["model"], found["checksums"]) == (ckpt_format, "qwen3_vl_moe", True)
    assert found["topology"]["ep"] == 1 and found["layer_spec"] == "transformer_engine"
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert f"{found['parameters']:,}" in table and found["path"] in table
    assert "tp 1, pp 1, cp 1, ep 1, chunk_bytes 33554432" in table and "checksums      yes" in table
    assert main(["inspect", "--hf-model", str(moe_folder), "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["experts"] == "output_major" and other["parameters"] == found["parameters"]

"""Errors that could go unnoticed: mixed dtypes, a source or target that changes meanwhile, huge pickles and configs."""

import contextlib
import json
import os
import pickle
import shutil
import time

from qwen3vl_bridge.checkpoint import CheckpointError, export_checkpoint, import_checkpoint, verify_checkpoint
from qwen3vl_bridge.checkpoint.formats import output_files
from qwen3vl_bridge.checkpoint.formats.dcp import read_metadata
from qwen3vl_bridge.core import atomic
from qwen3vl_bridge.core.files import read_object, write_object
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.checkpoint.support import (
    assert_same,
    before_each_unit,
    broken_disk,
    expect_error,
    hf_tensors,
    importing,
    model_with_config,
    stock_load,
)
from tests.helpers.expert_layouts import relayout

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("gate", DTYPES)
@pytest.mark.parametrize("up", DTYPES)
@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_export_of_mixed_dtype_experts_is_equal_in_both_layouts(gate, up, target, moe_folder, tmp_path):
    import_checkpoint(moe_folder, tmp_path / "m")
    stored = stock_load(tmp_path / "m" / "iter_0000000")
    for name, tensor in stored.items():
        if ".experts." in name and name.endswith(("_w", "_v")):
            stored[name] = tensor.to(gate if name.endswith("_w") else up)
    dcp.save(stored, checkpoint_id=tmp_path / "mixed", no_dist=True)
    how = dict(hf_model=moe_folder, torch_dtype=target, verify=True)
    export_checkpoint(tmp_path / "mixed", tmp_path / "packed", expert_layout="input_major", **how)
    export_checkpoint(tmp_path / "mixed", tmp_path / "apart", expert_layout="per_expert", **how)
    # One tensor per expert is never transposed.
    packed = hf_tensors(tmp_path / "packed")
    outward = {n: t.transpose(1, 2).contiguous() if ".mlp.experts." in n else t for n, t in packed.items()}
    assert_same(relayout(outward, ExpertLayout.PER_EXPERT), hf_tensors(tmp_path / "apart"))


@pytest.fixture
def small_units(monkeypatch):
    monkeypatch.setattr(output_files, "RANGE_BYTES", 1 << 18)


def test_import_writes_at_most_two_byte_ranges_at_a_time(untied_folder, tmp_path, small_units):
    """The limit of two is reached, and never exceeded."""
    running, most = [], []

    def wait(file, *_):
        running.append(file)
        most.append(len(running))
        time.sleep(0.05)
        running.remove(file)

    with before_each_unit(wait):
        import_checkpoint(untied_folder, tmp_path / "m", verify=True)
    assert len(most) > 5 and max(most) == 2


def test_resume_raises_if_model_config_changed(untied_folder, tmp_path, small_units):
    model = shutil.copytree(untied_folder, tmp_path / "model")
    with broken_disk(5), pytest.raises(CheckpointError, match="stays in"):
        import_checkpoint(model, tmp_path / "m", resume=True)
    config = read_object(model / "config.json")
    config["vision_config"]["num_heads"] //= 2  # the same shapes, interleaved in another way
    write_object(model / "config.json", config)
    with pytest.raises(CheckpointError, match="another source, options or version"):
        import_checkpoint(model, tmp_path / "m", resume=True)
    import_checkpoint(model, tmp_path / "m")
    assert verify_checkpoint(model, tmp_path / "m").same
    with pytest.raises(CheckpointError, match="describes another model"):
        verify_checkpoint(untied_folder, tmp_path / "m")


def test_resume_continues_if_source_path_is_spelled_differently(untied_folder, tmp_path, small_units):
    with broken_disk(5), pytest.raises(CheckpointError, match="stays in"):
        import_checkpoint(str(untied_folder), tmp_path / "m", resume=True)
    assert import_checkpoint(f"{untied_folder}/", tmp_path / "m", resume=True).resumed


def test_import_raises_if_source_changes_while_it_is_read(untied_folder, tmp_path):
    model = shutil.copytree(untied_folder, tmp_path / "model")
    touched = before_each_unit(lambda *_: os.utime(model / "model.safetensors"))
    with touched, pytest.raises(CheckpointError, match="changed while it was being read"):
        import_checkpoint(model, tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.fixture
def target(tmp_path, monkeypatch):
    """An earlier result, on a file system without a swap."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "old").write_text("x")
    monkeypatch.setattr(atomic, "_RENAME_EXCHANGE", 1 << 20)
    return tmp_path / "target"


def test_move_into_place_restores_old_result_if_rename_fails(target, tmp_path, monkeypatch):
    rename = os.rename

    def refuse(one, other):
        if ".partial-" in str(one):
            raise OSError(5, "Input/output error")
        rename(one, other)

    monkeypatch.setattr(atomic.os, "rename", refuse)
    with (
        pytest.raises(CheckpointError, match="nothing was left"),
        atomic.atomic_directory(target, print, check_replaceable=lambda _: True),
    ):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["target", "old"]
    monkeypatch.setattr(atomic.os, "rename", rename)
    rename(target, tmp_path / ".target.replaced-0123456789ab")  # as a process leaves it that dies between the two steps
    said: list[str] = []
    with pytest.raises(CheckpointError, match="just restored"), atomic.atomic_directory(target, said.append):
        pass
    assert "restored" in said[0] and (target / "old").exists()
    # Where somebody has made a folder in its place, that is replaced if it is empty, and else what was there stays.
    for number, found in enumerate((["old"], ["mine"])):
        rename(target, tmp_path / ".target.replaced-0123456789ab")
        target.mkdir()
        if number:
            (target / "mine").touch()
        with pytest.raises(KeyError), atomic.atomic_directory(target, said.append, check_replaceable=lambda _: True):
            raise KeyError
        assert [path.name for path in target.iterdir()] == found
    assert (tmp_path / "target.replaced-0123456789ab" / "old").exists() and "remove it yourself" in said[-1]


@pytest.mark.parametrize("step", [1, 2, 3])
def test_move_into_place_interrupted_leaves_complete_old_or_new_result(step, target, tmp_path, monkeypatch):
    rename, steps = os.rename, []

    def interrupted(one, other):
        rename(one, other)
        if ".replaced-" in f"{one}{other}" or ".partial-" in str(one):
            steps.append(other)
            if len(steps) == step:
                raise KeyboardInterrupt

    monkeypatch.setattr(atomic.os, "rename", interrupted)
    with (
        pytest.raises(KeyboardInterrupt) if step == 1 else contextlib.nullcontext(),
        atomic.atomic_directory(target, print, check_replaceable=lambda _: True) as work,
    ):
        (work / "new").touch()
    assert [path.name for path in target.iterdir()] == ["old" if step == 1 else "new"]
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_import_raises_if_target_is_a_symlink(capsys, tmp_path, untied_folder):
    (tmp_path / "real").mkdir()
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "megatron").symlink_to(tmp_path / "real")
    expect_error(capsys, importing(untied_folder, tmp_path), "is a link, which a renamed folder")


def test_export_raises_if_metadata_maps_two_tensors_to_same_bytes(untied_folder, imported, tmp_path):
    folder = shutil.copytree(imported, tmp_path / "m") / "iter_0000000"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    layers = {i.fqn: i for i in metadata.storage_data if "q_layernorm" in i.fqn or "k_layernorm" in i.fqn}
    one, other = list(layers.values())[:2]
    metadata.storage_data[one] = metadata.storage_data[other]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="expected only one chunk there"):
        export_checkpoint(tmp_path / "m", tmp_path / "hf")


def bomb(levels: int) -> bytes:
    return b"\x80\x04)" + b"2\x86" * levels


@pytest.mark.parametrize("data", [
    bomb(60) + b".", b"\x80\x04}" + bomb(60)[2:] + b"K\x01s.",
    b"\x80\x04ctorch.serialization\n_get_layout\n" + bomb(60)[2:] + b"\x85R.",
    b"\x80\x04ccollections\nOrderedDict\n]" + bomb(60)[2:] + b"K\x01\x86a\x85R.",
    b"\x80\x04]" + b"q\x00h\x00h\x00\x86a" * 3 + b".",
])  # fmt: skip
def test_read_metadata_raises_quickly_if_pickle_is_exponentially_nested(data, saved, tmp_path):
    folder = shutil.copytree(saved, tmp_path / "copy")
    (folder / ".metadata").write_bytes(data)
    begun = time.process_time()
    with pytest.raises(CheckpointError):
        read_metadata(folder)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(("section", "field", "part"), [
    ("text_config", "num_hidden_layers", " is 1000000000, expected a whole number from 1 to 10000"),
    ("vision_config", "depth", " is 1000000000"),
])  # fmt: skip
def test_import_raises_if_layer_count_in_config_is_huge(capsys, tmp_path, untied_folder, section, field, part):
    model = model_with_config(tmp_path / "model", untied_folder, {section: {field: 10**9}})
    expect_error(capsys, importing(model, tmp_path), field + part)


def test_import_raises_if_config_json_is_too_deep_or_too_large(capsys, tmp_path, untied_folder):
    model = shutil.copytree(untied_folder, tmp_path / "model")
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.rstrip()[:-1] + ', "x": ' + '{"x": ' * 600 + "1" + "}" * 601)
    expect_error(capsys, importing(model, tmp_path), "more than 50 deep")
    os.truncate(model / "config.json", 300 << 30)
    expect_error(capsys, importing(model, tmp_path), "bytes, expected")
    (model / "config.json").write_text(json.dumps(json.loads(text) | {"note": "\ud800"}))
    import_checkpoint(model, tmp_path / "m", torch_dtype="bfloat16")
    export_checkpoint(tmp_path / "m", tmp_path / "hf")
    assert read_object(tmp_path / "hf" / "config.json")["note"] == "\ud800"

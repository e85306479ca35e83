"""Import followed by export gives every tensor back, and stock software reads what is in between."""

from __future__ import annotations

import json

from qwen3vl_bridge.checkpoint import (
    Topology,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)

import pytest
import torch
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from .support import hf_tensors

FOLDERS = ("untied_folder", "tied_folder", "sharded_folder", "bf16_folder")


@pytest.mark.parametrize("naming", ["transformer_engine", "local"])
@pytest.mark.parametrize("which", FOLDERS)
def test_every_tensor_comes_back(which, naming, request, tmp_path):
    source = request.getfixturevalue(which)
    topology = Topology(tp=2, chunk_bytes=30_000)
    imported = import_checkpoint(source, tmp_path / "megatron", topology=topology, naming=naming, verify=True)
    exported = export_checkpoint(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=500_000)
    before, after = hf_tensors(source), hf_tensors(tmp_path / "hf")
    assert sorted(before) == sorted(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name], tensor), name
    assert imported.layer_spec == naming and exported.layer_spec is None
    assert imported.parameters == exported.parameters == sum(tensor.numel() for tensor in before.values())
    assert imported.cast == exported.cast == imported.transposed == exported.transposed == 0
    assert verify_checkpoint(source, tmp_path / "megatron").same


@pytest.mark.parametrize("which", FOLDERS)
def test_stock_transformers_loads_the_export(which, request, tmp_path):
    source = request.getfixturevalue(which)
    import_checkpoint(source, tmp_path / "megatron")
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    model, info = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info.values()), info
    reference = Qwen3VLForConditionalGeneration.from_pretrained(source)
    assert model.dtype == reference.dtype
    for (name, one), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    one, other = (AutoProcessor.from_pretrained(path).tokenizer("a b").input_ids for path in (tmp_path / "hf", source))
    assert one == other != []


def test_files_beside_the_weights_come_back_unchanged(untied_folder, imported, tmp_path):
    export_checkpoint(imported, tmp_path / "hf")
    for path in untied_folder.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_export_can_take_the_files_of_another_folder(untied_folder, imported, tmp_path):
    export_checkpoint(imported / "iter_0000000", tmp_path / "hf", hf_model=untied_folder)
    assert (tmp_path / "hf" / "config.json").read_bytes() == (untied_folder / "config.json").read_bytes()


def test_the_checkpoint_is_laid_out_as_megatron_writes_it(imported, untied_folder):
    folder = imported / "iter_0000000"
    assert (imported / "latest_checkpointed_iteration.txt").read_text() == "0"
    assert sorted(path.name for path in folder.iterdir()) == [
        ".metadata", "__0_0.distcp", "hf", "qwen3vl_bridge.json", "run_config.yaml", "train_state.pt",
    ]  # fmt: skip
    state = torch.load(folder / "train_state.pt", weights_only=True)
    assert state["step"] == 0 and state.keys() >= {"consumed_train_samples", "do_train"}
    assert (imported / "latest_train_state.pt").read_bytes() == (folder / "train_state.pt").read_bytes()
    assert not list((folder / "hf").glob("*.safetensors"))
    manifest = json.loads((folder / "qwen3vl_bridge.json").read_text())
    assert (manifest["layer_spec"], manifest["source"]) == ("transformer_engine", str(untied_folder))
    assert (
        manifest["tensors"] == 114 and torch.__version__.startswith(manifest["torch"]) and len(manifest["digest"]) == 64
    )


def test_inspect_says_what_is_there(imported, untied_folder):
    tensors = hf_tensors(untied_folder)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    hf, megatron = inspect_checkpoint(untied_folder), inspect_checkpoint(imported)
    assert (hf["format"], hf["tensors"], hf["parameters"]) == ("huggingface", len(tensors), parameters)
    assert (megatron["format"], megatron["parameters"]) == ("fsdp_dtensor", parameters)
    assert megatron["layer_spec"] == "transformer_engine"
    assert megatron["byte_items"] == ["args", "checkpoint_version", "iteration"]


def test_a_copy_of_the_embedding_beside_a_tied_one_is_left_out(tied_folder, tmp_path):
    from safetensors.torch import save_file

    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((tied_folder / "config.json").read_bytes())
    tensors = hf_tensors(tied_folder)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    report = import_checkpoint(tmp_path / "hf", tmp_path / "megatron")
    assert "lm_head.weight is a copy" in report.notes[0]
    assert verify_checkpoint(tmp_path / "hf", tmp_path / "megatron").same

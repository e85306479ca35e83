"""Both formats, every expert layout, there and back and across, bit for bit."""

import json

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    Topology,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
    verify_checksums,
    verify_reformatted,
)
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch

from tests.expert_layouts import LAYOUTS, relayout

from .support import assert_same, hf_tensors, stock_load

FORMATS = ("fsdp_dtensor", "torch_dist")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:This process .* is multi-threaded")


@pytest.mark.parametrize("naming", ["transformer_engine", "local"])
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_expert_comes_back(layout, ckpt_format, naming, moe_folders, tmp_path):
    source = moe_folders[layout]
    topology = Topology(tp=2, ep=2, etp=1, chunk_bytes=5_000)
    imported = import_checkpoint(
        source, tmp_path / "m", ckpt_format=ckpt_format, naming=naming, topology=topology, verify=True
    )
    exported = export_checkpoint(tmp_path / "m", tmp_path / "hf", max_shard_bytes=500_000, verify=True)
    assert_same(hf_tensors(source), hf_tensors(tmp_path / "hf"))
    assert verify_checkpoint(source, tmp_path / "m").same
    turned = layout is ExpertLayout.INPUT_MAJOR
    assert bool(imported.transposed) == bool(exported.transposed) == turned and not imported.cast
    assert json.loads((tmp_path / "hf" / "qwen3vl_bridge.json").read_text())["expert_layout"] == layout.name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_may_have_another_expert_layout(layout, moe_folders, moe_folder, tmp_path):
    import_checkpoint(moe_folders[ExpertLayout.OUTPUT_MAJOR], tmp_path / "m")
    export_checkpoint(tmp_path / "m", tmp_path / "hf", expert_layout=layout.name.lower(), torch_dtype="bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in hf_tensors(moe_folder).items()}
    assert_same(relayout(rounded, layout), hf_tensors(tmp_path / "hf"))
    # Taken from the weights of the model that is named, else as imported, else as released.
    export_checkpoint(tmp_path / "m", tmp_path / "like", hf_model=moe_folders[layout])
    assert_same(hf_tensors(moe_folders[layout]), hf_tensors(tmp_path / "like"))
    with pytest.raises(CheckpointError, match="expert_layout is 'x', expected input_major, output_major, per_expert"):
        export_checkpoint(tmp_path / "m", tmp_path / "x", expert_layout="x")


@pytest.mark.parametrize("which", ["untied_folder", "tied_folder", "moe_folder", "bf16_folder"])
@pytest.mark.parametrize(("first", "second"), [FORMATS, FORMATS[::-1]])
def test_one_format_becomes_the_other(first, second, which, request, tmp_path):
    source = request.getfixturevalue(which)
    import_checkpoint(source, tmp_path / "a", ckpt_format=first, checksums=True)
    report = reformat_checkpoint(tmp_path / "a", tmp_path / "b", ckpt_format=second, verify=True, checksums=True)
    assert report.name == "reformat" and report.format == second and not report.transposed and not report.cast
    assert verify_reformatted(tmp_path / "a", tmp_path / "b").same
    assert verify_checkpoint(source, tmp_path / "b").same and verify_checksums(tmp_path / "b").same
    # What is made of the copy is what was made of the original.
    import_checkpoint(source, tmp_path / "c", ckpt_format=second)
    assert_same(*(stock_load(tmp_path / name / "iter_0000000") for name in "bc"))
    export_checkpoint(tmp_path / "b", tmp_path / "hf")
    assert_same(hf_tensors(source), hf_tensors(tmp_path / "hf"))


def test_layers_are_stacked_where_all_are_alike(all_moe_folder, untied_folder, tmp_path):
    import_checkpoint(all_moe_folder, tmp_path / "moe", ckpt_format="torch_dist")
    hf, stored = hf_tensors(all_moe_folder), stock_load(tmp_path / "moe" / "iter_0000000")
    experts = stored["language_model.decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    packed = [hf[f"model.language_model.layers.{i}.mlp.experts.gate_up_proj"] for i in range(4)]
    assert torch.equal(experts, torch.stack(packed))
    merger = stored["vision_model.decoder.deepstack_merger_list.linear_fc2.weight"]
    assert torch.equal(merger[1], hf["model.visual.deepstack_merger_list.1.linear_fc2.weight"])
    import_checkpoint(untied_folder, tmp_path / "dense", ckpt_format="torch_dist")
    hf, stored = hf_tensors(untied_folder), stock_load(tmp_path / "dense" / "iter_0000000")
    gate_up = stored["language_model.decoder.layers.mlp.linear_fc1.weight"][2]
    parts = (hf[f"model.language_model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(gate_up, torch.cat(tuple(parts)))


@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_a_padded_vocabulary(ckpt_format, untied_folder, tmp_path):
    names = ["language_model.embedding.word_embeddings.weight", "language_model.output_layer.weight"]
    import_checkpoint(
        untied_folder, tmp_path / "m", ckpt_format=ckpt_format, vocab_divisor=100,
        topology=Topology(tp=2, chunk_bytes=9_000), torch_dtype="bfloat16", verify=True, checksums=True,
    )  # fmt: skip
    prefix = "model.module." if ckpt_format == "fsdp_dtensor" else ""
    stored, hf = stock_load(tmp_path / "m" / "iter_0000000"), hf_tensors(untied_folder)
    for name, source in zip(names, ("model.language_model.embed_tokens.weight", "lm_head.weight"), strict=True):
        found = stored[prefix + name]
        assert found.shape == (600, 80) and not found[512:].any()
        assert torch.equal(found[:512], hf[source].bfloat16())
    assert verify_checkpoint(untied_folder, tmp_path / "m").same and verify_checksums(tmp_path / "m").same
    other = FORMATS[ckpt_format == FORMATS[0]]
    reformat_checkpoint(tmp_path / "m", tmp_path / "n", ckpt_format=other)
    assert verify_reformatted(tmp_path / "m", tmp_path / "n").same
    assert inspect_checkpoint(tmp_path / "n")["parameters"] == inspect_checkpoint(tmp_path / "m")["parameters"]
    report = export_checkpoint(tmp_path / "n", tmp_path / "hf")
    assert len(report.notes) == 2 and "88 rows beyond the vocabulary" in report.notes[0]
    assert_same({name: tensor.bfloat16() for name, tensor in hf.items()}, hf_tensors(tmp_path / "hf"))


def test_checksums_tell_which_tensor_was_damaged(untied_folder, tmp_path):
    import_checkpoint(untied_folder, tmp_path / "m", checksums=True)
    assert verify_checksums(tmp_path / "m").same
    path = tmp_path / "m" / "iter_0000000" / "__0_0.distcp"
    name = "language_model.decoder.final_layernorm.weight"
    data = bytearray(path.read_bytes())
    weights = hf_tensors(untied_folder)["model.language_model.norm.weight"].numpy().tobytes()
    data[data.index(weights)] ^= 1
    path.write_bytes(data)
    (found,) = verify_checksums(tmp_path / "m").differences
    assert found.name == name and "80 elements have another checksum" in str(found)
    (found,) = verify_checkpoint(untied_folder, tmp_path / "m").differences
    assert (found.name, found.elements, found.first) == ("model.language_model.norm.weight", 1, 0)
    import_checkpoint(untied_folder, tmp_path / "n")
    with pytest.raises(CheckpointError, match="holds no checksums, expected those of all 114 tensors"):
        verify_checksums(tmp_path / "n")

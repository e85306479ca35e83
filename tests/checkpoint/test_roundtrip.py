"""Import and export keep every tensor, in both formats and every expert layout; transformers loads the result."""

import json

from qwen3vl_bridge.checkpoint import CheckpointError, Topology, inspect_checkpoint
from qwen3vl_bridge.checkpoint.commands import export_checkpoint, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.checkpoint.verification import verify_checkpoint, verify_checksums, verify_reformatted
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.checkpoint.support import EMBEDDING, NORM, assert_same, hf_tensors, model_with, stock_load
from tests.helpers.expert_layouts import LAYOUTS, relayout

FOLDERS = ("untied_folder", "tied_folder", "sharded_folder", "bf16_folder")
FORMATS = ("fsdp_dtensor", "torch_dist")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is", "ignore:This process .* is multi-threaded")


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("naming", ["transformer_engine", "local"])
@pytest.mark.parametrize("which", FOLDERS)
def test_roundtrip_keeps_every_tensor(which, naming, request, tmp_path):
    source = request.getfixturevalue(which)
    topology = Topology(tp=2, chunk_bytes=30_000)
    imported = import_checkpoint(source, tmp_path / "megatron", topology=topology, naming=naming, verify=True)
    exported = export_checkpoint(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=500_000)
    before = hf_tensors(source)
    assert_same(hf_tensors(tmp_path / "hf"), before)
    assert imported.layer_spec == naming and exported.layer_spec is None
    assert imported.parameters == exported.parameters == sum(tensor.numel() for tensor in before.values())
    assert imported.cast == exported.cast == imported.transposed == exported.transposed == 0
    assert verify_checkpoint(source, tmp_path / "megatron").same


# transformers 5.12 has no rule for one tensor per expert in this model.
@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("which", [*FOLDERS, ExpertLayout.INPUT_MAJOR, ExpertLayout.OUTPUT_MAJOR])
def test_exported_model_loads_in_transformers_with_same_weights(which, moe_folders, request, tmp_path):
    source = moe_folders[which] if isinstance(which, ExpertLayout) else request.getfixturevalue(which)
    import_checkpoint(source, tmp_path / "megatron", ckpt_format="torch_dist")
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    model, reference = (
        AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
        for folder in (tmp_path / "hf", source)
    )
    assert not any((*model[1].values(), *reference[1].values()))
    assert model[0].dtype == reference[0].dtype
    assert_same(model[0].state_dict(), reference[0].state_dict())
    one, other = (AutoProcessor.from_pretrained(path).tokenizer("a b").input_ids for path in (tmp_path / "hf", source))
    assert one == other != []


def test_roundtrip_keeps_config_and_tokenizer_files(untied_folder, imported, tmp_path):
    export_checkpoint(imported, tmp_path / "hf")
    for path in untied_folder.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "hf" / path.name).read_bytes() == path.read_bytes(), path.name


def test_import_writes_files_of_megatron_checkpoint(imported, untied_folder):
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
    assert (manifest["tensors"], len(manifest["digest"])) == (114, 64)
    assert torch.__version__.startswith(manifest["torch"])


def test_import_of_tied_model_drops_output_layer_that_copies_embedding(tied_folder, tmp_path):
    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()

    model = model_with(tmp_path / "hf", tied_folder, change)
    report = import_checkpoint(model, tmp_path / "megatron")
    assert "lm_head.weight is a copy" in report.notes[0]
    assert verify_checkpoint(model, tmp_path / "megatron").same


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_import_torch_dtype_rounds_like_torch(dtype, untied_folder, tmp_path):
    report = import_checkpoint(untied_folder, tmp_path / "megatron", torch_dtype=dtype)
    assert report.cast == report.tensors and not report.transposed and report.dtypes == (dtype,)
    assert inspect_checkpoint(tmp_path / "megatron")["dtypes"] == {dtype: report.tensors}
    assert verify_checkpoint(untied_folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    before = hf_tensors(untied_folder)
    assert_same(hf_tensors(tmp_path / "hf"), {name: one.to(getattr(torch, dtype)) for name, one in before.items()})


def test_roundtrip_of_bf16_through_float32_keeps_every_value(bf16_folder, tmp_path):
    import_checkpoint(bf16_folder, tmp_path / "megatron", torch_dtype="float32")
    assert verify_checkpoint(bf16_folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", torch_dtype="bfloat16")
    assert_same(hf_tensors(tmp_path / "hf"), hf_tensors(bf16_folder))
    export_checkpoint(tmp_path / "megatron", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float32", "float32")


@pytest.mark.parametrize("options", [{"torch_dtype": "bf16"}, {"naming": "te"}])
def test_import_raises_if_option_value_is_unknown(options, untied_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"is '(bf16|te)', expected"):
        import_checkpoint(untied_folder, tmp_path / "megatron", **options)


def test_import_raises_if_value_is_too_large_for_float16(untied_folder, tmp_path):
    def change(tensors):
        tensors[NORM][3] = 1e6

    model = model_with(tmp_path / "model", untied_folder, change)
    import_checkpoint(model, tmp_path / "bf16", torch_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=rf"{NORM}: value 1e\+06 is too large for"):
        import_checkpoint(model, tmp_path / "fp16", torch_dtype="float16")
    assert not (tmp_path / "fp16").exists()


@pytest.mark.one_case_in(10)
@pytest.mark.parametrize("naming", ["transformer_engine", "local"])
@pytest.mark.parametrize("ckpt_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_roundtrip_keeps_experts_in_every_expert_layout(layout, ckpt_format, naming, moe_folders, tmp_path):
    source = moe_folders[layout]
    how = dict(ckpt_format=ckpt_format, naming=naming, topology=Topology(tp=2, ep=2, etp=1, chunk_bytes=5_000))
    imported = import_checkpoint(source, tmp_path / "m", verify=True, **how)
    exported = export_checkpoint(tmp_path / "m", tmp_path / "hf", max_shard_bytes=500_000, verify=True)
    assert_same(hf_tensors(source), hf_tensors(tmp_path / "hf"))
    assert verify_checkpoint(source, tmp_path / "m").same
    turned = layout is ExpertLayout.INPUT_MAJOR
    assert bool(imported.transposed) == bool(exported.transposed) == turned and not imported.cast
    assert json.loads((tmp_path / "hf" / "qwen3vl_bridge.json").read_text())["expert_layout"] == layout.name


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_writes_experts_in_requested_or_source_expert_layout(layout, moe_folders, moe_folder, tmp_path):
    import_checkpoint(moe_folders[ExpertLayout.OUTPUT_MAJOR], tmp_path / "m")
    export_checkpoint(tmp_path / "m", tmp_path / "hf", expert_layout=layout.name.lower(), torch_dtype="bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in hf_tensors(moe_folder).items()}
    assert_same(relayout(rounded, layout), hf_tensors(tmp_path / "hf"))
    # Taken from the weights of the model that is named, else as imported, else as released.
    export_checkpoint(tmp_path / "m", tmp_path / "like", hf_model=moe_folders[layout])
    assert_same(hf_tensors(moe_folders[layout]), hf_tensors(tmp_path / "like"))
    with pytest.raises(CheckpointError, match="expert_layout is 'x', expected input_major, output_major, per_expert"):
        export_checkpoint(tmp_path / "m", tmp_path / "x", expert_layout="x")


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("which", ["untied_folder", "tied_folder", "moe_folder", "bf16_folder"])
@pytest.mark.parametrize(("first", "second"), [FORMATS, FORMATS[::-1]])
def test_reformatted_checkpoint_matches_direct_import(first, second, which, request, tmp_path):
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


def test_import_to_torch_dist_stacks_layers_in_one_tensor(all_moe_folder, untied_folder, tmp_path):
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


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("ckpt_format", FORMATS)
def test_import_with_vocab_divisor_pads_vocabulary_with_zeros(ckpt_format, untied_folder, tmp_path):
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


def test_verify_checksums_lists_damaged_tensor(untied_folder, tmp_path):
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
    with pytest.raises(CheckpointError, match="holds no checksums, expected checksums of all 114 tensors"):
        verify_checksums(tmp_path / "n")

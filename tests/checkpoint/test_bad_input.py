"""Bad models, checkpoints, targets and options give one clear error each and leave no files."""

import copy
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

from qwen3vl_bridge.checkpoint.commands import export_checkpoint, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec, check_finite
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, check_same_model
from qwen3vl_bridge.checkpoint.verification import verify_checkpoint, verify_reformatted
from qwen3vl_bridge.cli.convert import main
from qwen3vl_bridge.core.files import CheckpointError, read_object, write_object
from qwen3vl_bridge.models.qwen3_vl import presets

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from tests.checkpoint.support import (
    CHANGES,
    NORM,
    Q_PROJ,
    expect_error,
    exporting,
    hf_tensors,
    importing,
    model_with,
    model_with_config,
    stock_load,
)


def test_convert_raises_if_path_is_missing(capsys, tmp_path):
    missing = tmp_path / "no such"
    expect_error(capsys, importing(missing, tmp_path), str(missing), "does not exist", "config.json")
    expect_error(
        capsys, exporting(missing, tmp_path), str(missing), "there is no such folder, expected the folder of a Megatron"
    )


def test_import_raises_if_hub_is_unreachable(capsys, tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    expect_error(capsys, importing("Qwen/No-Such", tmp_path), "Qwen/No-Such is neither a folder", "no connection")


def test_convert_raises_if_source_folder_has_wrong_format(capsys, tmp_path, untied_folder, imported):
    (tmp_path / "file").write_text("x")
    expect_error(capsys, importing(tmp_path / "file", tmp_path), "is a file, expected a folder")
    expect_error(capsys, exporting(tmp_path / "file", tmp_path), "it is a file, not a folder, expected the folder")
    (tmp_path / "empty").mkdir()
    expect_error(capsys, importing(tmp_path / "empty", tmp_path), "no config.json")
    expect_error(capsys, exporting(tmp_path / "empty", tmp_path), "not a Megatron checkpoint")
    expect_error(capsys, exporting(untied_folder, tmp_path), str(untied_folder), "not a Megatron checkpoint")
    expect_error(capsys, importing(imported, tmp_path), str(imported), "no config.json")
    expect_error(capsys, importing(imported / "iter_0000000" / "hf", tmp_path), "no weights", "model.safetensors")


@pytest.mark.parametrize(("change", "parts"), [
    ({"model_type": "qwen2_vl", "architectures": ["Qwen2VL"]}, ("['Qwen2VL']", "qwen2_vl", "expected Qwen3VLFor")),
    ({"model_type": "qwen3_vl_moe"}, ("qwen3_vl_moe", "expected Qwen3VLForConditionalGeneration")),
    (
        {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]},
        ("0 layers have experts", "qwen3_vl_moe does not allow"),
    ),
    ({"text_config": {}}, ("lacks the field text_config.vocab_size",)),
    ({"vision_config": 3}, ("vision_config is 3, expected an object",)),
])  # fmt: skip
def test_import_raises_if_model_config_is_unsupported_or_invalid(capsys, tmp_path, untied_folder, change, parts):
    folder = model_with_config(tmp_path / "other", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), str(folder), *parts)


@pytest.mark.parametrize(("change", "parts"), [
    (CHANGES["missing"], ("1 missing", f"{NORM}: found nothing, expected [80]")),
    (CHANGES["extra"], ("1 unexpected", "layers.9.x: found [3] float32, expected no such tensor")),
    (CHANGES["misshapen"], ("1 misshapen", f"{Q_PROJ}: found [5, 80], expected [128, 80]")),
    (CHANGES["all"], ("1 missing, 1 unexpected, 1 misshapen", NORM, "layers.9.x", Q_PROJ)),
    (lambda t: t.update({NORM: t[NORM].to(torch.int32)}), (NORM, "found dtype int32, expected float32")),
    (lambda t: t.update({Q_PROJ: t[Q_PROJ].half()}), (f"{Q_PROJ} float16", "--torch-dtype")),
])  # fmt: skip
def test_import_raises_if_tensor_names_shapes_or_dtypes_are_wrong(capsys, tmp_path, untied_folder, change, parts):
    folder = model_with(tmp_path / "model", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), str(folder), *parts)


def test_import_raises_if_tied_output_layer_differs_from_embedding(capsys, tmp_path, tied_folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, 4] += 1

    folder = model_with(tmp_path / "model", tied_folder, change)
    error = expect_error(capsys, importing(folder, tmp_path), "tie_word_embeddings", "lm_head.weight")
    assert "1 of 40960 elements differ, the first is number 244" in error


@pytest.mark.parametrize("which", ["untied_folder", "sharded_folder"])
def test_import_raises_if_safetensors_file_is_truncated(capsys, tmp_path, request, which):
    shutil.copytree(request.getfixturevalue(which), tmp_path / "model")
    path = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    size = path.stat().st_size - 100
    os.truncate(path, size)
    expect_error(capsys, importing(tmp_path / "model", tmp_path), str(path), f"of {size} bytes", "not fully covered")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_export_raises_if_tensor_names_or_shapes_are_wrong(capsys, tmp_path, imported, untied_folder):
    stored = stock_load(imported / "iter_0000000")
    projection = "model.module.language_model.decoder.layers.1.self_attention.linear_proj.weight"
    del stored["model.module.language_model.decoder.final_layernorm.weight"]
    stored |= {"model.module.extra": torch.zeros(3), projection: stored[projection][:5].clone()}
    dcp.save(stored, checkpoint_id=tmp_path / "run", no_dist=True)
    parts = (
        "1 missing, 1 unexpected, 1 misshapen", "final_layernorm.weight: found nothing, expected [80]",
        "extra: found [3] float32, expected no such", "linear_proj.weight: found [5, 128], expected [80, 128]",
    )  # fmt: skip
    named = ["--hf-model", str(untied_folder)]
    expect_error(capsys, exporting(tmp_path / "run", tmp_path), *parts, options=named)


@pytest.fixture
def checkpoint(imported, tmp_path):
    return shutil.copytree(imported, tmp_path / "checkpoint")


def test_export_raises_if_distcp_file_is_damaged_or_missing(capsys, tmp_path, imported, checkpoint):
    path = checkpoint / "iter_0000000" / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))
    expect_error(capsys, exporting(checkpoint, tmp_path), str(path), "cannot be read")
    shutil.copyfile(imported / "iter_0000000" / "__0_0.distcp", path)
    os.truncate(path, path.stat().st_size // 2)
    expect_error(capsys, exporting(checkpoint, tmp_path), str(path), "expected")
    path.unlink()
    expect_error(capsys, exporting(checkpoint, tmp_path), str(path), "found nothing, expected a file")


@pytest.mark.parametrize("text", ["", "x", "-1", "9" * 5000, "3"])
def test_export_raises_if_latest_checkpointed_iteration_file_is_invalid(capsys, tmp_path, checkpoint, text):
    (checkpoint / "latest_checkpointed_iteration.txt").write_text(text)
    (checkpoint / "latest_train_state.pt").unlink()  # Megatron-LM's own checkpoints do not have it
    expect_error(capsys, exporting(checkpoint, tmp_path), "expected an iteration number" if text != "3" else "iter_")


@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04"])
def test_export_raises_if_latest_train_state_file_is_invalid(capsys, tmp_path, checkpoint, content):
    (checkpoint / "latest_train_state.pt").write_bytes(content)
    expect_error(capsys, exporting(checkpoint, tmp_path), "latest_train_state.pt cannot be read", "iter_*")


@pytest.mark.parametrize(("text", "parts"), [
    ("{}", ("metadata.json", "sharded_backend is None")), ("x", ("metadata.json", "as JSON")),
    ('{"sharded_backend": "zarr"}', ("metadata.json", "is 'zarr'")),
    ('{"sharded_backend": "torch_dist"}', ("holds no model", "model.module.")),
])  # fmt: skip
def test_export_raises_if_metadata_json_is_invalid(capsys, tmp_path, checkpoint, text, parts):
    (checkpoint / "iter_0000000" / "metadata.json").write_text(text)
    expect_error(capsys, exporting(checkpoint, tmp_path), *parts)


def test_convert_raises_if_target_contains_user_files(capsys, tmp_path, untied_folder, imported):
    for arguments in (importing(untied_folder, tmp_path), exporting(imported, tmp_path)):
        target = Path(arguments[-1])
        target.mkdir(parents=True)
        (target / "precious").write_text("x")
        expect_error(capsys, arguments, str(target), "exists already", "--overwrite")
        parts = ("was not written by a conversion", "remove it yourself")
        expect_error(capsys, arguments, *parts, options=["--overwrite"])
        assert (target / "precious").read_text() == "x"


def test_import_raises_if_target_is_inside_source(capsys, tmp_path, untied_folder):
    shutil.copytree(untied_folder, tmp_path / "model")
    target = str(tmp_path / "model" / "megatron")
    expect_error(
        capsys, ["import", "--hf-model", str(tmp_path / "model"), "--megatron-path", target], "use separate folders"
    )


@pytest.mark.parametrize(("options", "parts"), [
    (["--ep", "2"], ("--ep is 2", "no experts")), (["--etp", "2"], ("--etp is 2", "no experts")),
    (["--pp", "2"], ("--pp is 2", "no pipeline stages")),
    (["--tp", "3"], ("--tp is 3", "divisor of num_attention_heads, which is 4")),
    (["--tp", "0"], ("--tp is 0", "expected 1 or more")),
    (["--make-vocab-size-divisible-by", "0"], ("--make-vocab-size-divisible-by is 0, expected",)),
])  # fmt: skip
def test_import_raises_if_parallel_sizes_or_vocab_divisor_are_invalid(capsys, tmp_path, untied_folder, options, parts):
    expect_error(capsys, importing(untied_folder, tmp_path), *parts, options=options)


def test_import_raises_if_disk_space_is_insufficient(capsys, tmp_path, untied_folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 5, 5))
    expect_error(capsys, importing(untied_folder, tmp_path), "has 5 bytes free, expected")


def test_import_leaves_no_files_if_writing_fails(capsys, tmp_path, untied_folder):
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # Python turns the signal into an OSError
    try:
        expect_error(capsys, importing(untied_folder, tmp_path), "File too large", "nothing was left")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_verify_lists_differing_tensors(capsys, tmp_path, untied_folder, imported):
    def change(tensors):
        tensors[Q_PROJ][7, 5] += 1
        tensors[NORM].neg_()

    folder = model_with(tmp_path / "model", untied_folder, change)
    report = verify_checkpoint(folder, imported)
    assert {(d.name, d.elements, d.first) for d in report.differences} == {(Q_PROJ, 1, 7 * 80 + 5), (NORM, 80, 0)}
    assert main(["verify", "--no-progress", "--hf-model", str(folder), "--megatron-path", str(imported)]) == 1
    assert f"{Q_PROJ}: 1 of 10240 elements differ" in capsys.readouterr().err


def test_import_with_verify_raises_if_one_byte_is_written_wrong(tmp_path, untied_folder, monkeypatch):
    from qwen3vl_bridge.checkpoint.formats import tensors

    original = tensors.SliceReader._read_exactly

    def damage(self, file, into, offset, path, name):
        original(self, file, into, offset, path, name)
        if name == NORM and path.suffix == ".safetensors" and not damaged:
            into[0] ^= 1
            damaged.append(True)

    damaged: list[bool] = []
    monkeypatch.setattr(tensors.SliceReader, "_read_exactly", damage)
    with pytest.raises(CheckpointError, match="not written correctly"):
        import_checkpoint(untied_folder, tmp_path / "megatron", verify=True)
    assert not list(tmp_path.iterdir())


def written(folder, config: dict) -> ModelConfig:
    folder.mkdir(exist_ok=True)
    write_object(folder / "config.json", config)
    return ModelConfig(folder)


def changed(config: dict, **fields) -> dict:
    """A configuration with fields changed; a section's name and a field's are joined by two underscores."""
    config = copy.deepcopy(config)
    for name, value in fields.items():
        *sections, field = name.split("__")
        holder = config
        for section in sections:
            holder = holder[section]
        holder[field] = value
    return config


DENSE = dict(
    text_config__num_attention_heads=8, text_config__num_key_value_heads=4, text_config__rms_norm_eps=1e-5,
    text_config__hidden_act="gelu", text_config__vocab_size=151_935, text_config__intermediate_size=6_000,
    text_config__rope_parameters__rope_theta=10_000, text_config__rope_parameters__mrope_section=[22, 21, 21],
    vision_config__num_heads=8, vision_config__deepstack_visual_indexes=[5, 11, 18],
    vision_config__spatial_merge_size=4, vision_config__hidden_act="gelu", tie_word_embeddings=False,
    image_token_id=151_654,
)  # fmt: skip
MOE = dict(text_config__num_experts_per_tok=4, text_config__moe_intermediate_size=512,
           text_config__decoder_sparse_step=2, text_config__mlp_only_layers=[3])  # fmt: skip
FIELDS = [(size, *field) for size, fields in (("2B", DENSE), ("30B-A3B", MOE)) for field in fields.items()]


@pytest.mark.parametrize(("size", "name", "value"), FIELDS)
def test_check_same_model_error_lists_differing_config_fields(size, name, value, tmp_path):
    config = presets.config_dict(size)
    one, other = written(tmp_path / "one", changed(config, **{name: value})), written(tmp_path / "other", config)
    with pytest.raises(CheckpointError) as error:
        check_same_model(one, other)
    first, line, *others = str(error.value).splitlines()
    assert first == f"{tmp_path}/one/config.json describes another model than {tmp_path}/other/config.json:"
    if size == "2B":
        assert line.startswith(f"  {name.replace('__', '.')} is {value!r}, expected ") and not others
    else:  # which layers have experts follows from several fields, and the size of the others' MLP from that
        assert name.removeprefix("text_config__") in str(error.value)


@pytest.mark.parametrize("size", ["2B", "30B-A3B"])
def test_check_same_model_accepts_equivalent_config_formats(size, tmp_path):
    config = presets.config_dict(size)
    again = changed(config, text_config__attention_dropout=0.1, text_config__max_position_embeddings=9, dtype="float32")
    text = again["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": float(rope["rope_theta"]), "rope_scaling": {"type": "mrope", **rope}, "rms_norm_eps": 1e-6}
    del text["rope_scaling"]["rope_theta"], text["rope_scaling"]["rope_type"]
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
        text["intermediate_size"] += 1  # which no layer has
    del again["image_token_id"]
    again["vision_config"]["in_channels"] = 3
    full = presets.hf_config(size).to_dict() | {"architectures": None}
    one, *others = (written(tmp_path / str(i), entry) for i, entry in enumerate((config, again, full)))
    for other in others:
        check_same_model(one, other)


@pytest.mark.parametrize(("section", "fields"), [
    ("vision_config", {"num_heads": 2}),  # the same shapes, interleaved in another way
    ("text_config", {"vocab_size": 500}), ("text_config", {"rms_norm_eps": 1e-5}),
])  # fmt: skip
def test_export_raises_if_config_of_hf_model_differs_from_checkpoint(
    section, fields, capsys, tmp_path, untied_folder, imported
):
    model = model_with_config(tmp_path / "model", untied_folder, {section: fields})
    before = read_object(untied_folder / "config.json")[section]
    parts = ["describes another model than", *(f"{section}.{n} is {v!r}, expected {before[n]!r}"
                                               for n, v in fields.items())]  # fmt: skip
    arguments = ["--hf-model", str(model), "--megatron-path", str(imported)]
    expect_error(capsys, ["export", *arguments, "--hf-path", str(tmp_path / "new" / "hf")], *parts)
    arguments += ["--ckpt-format", "torch_dist"]
    expect_error(capsys, ["reformat", *arguments, "--new-path", str(tmp_path / "new" / "m")], *parts)
    for verify in (
        lambda: verify_checkpoint(model, imported),
        lambda: verify_reformatted(imported, imported, hf_model=model),
    ):
        with pytest.raises(CheckpointError) as error:
            verify()
        assert all(part in str(error.value) for part in parts)


@pytest.mark.parametrize("text", [None, "checkpoint: {}", "model: [", "a: 1" + ":1" * 500_000])
def test_convert_reports_note_if_checkpoint_has_no_config_to_compare(text, tmp_path, untied_folder, imported):
    run = shutil.copytree(imported / "iter_0000000", tmp_path / "run")
    shutil.rmtree(run / "hf")
    (run / "run_config.yaml").unlink()
    if text is not None:
        (run / "run_config.yaml").write_text(text)
    why = f"{untied_folder}/config.json could not be compared with the checkpoint's configuration: {run} has none, and "
    why += "no run_config.yaml" if text in (None, "checkpoint: {}") else f"{run}/run_config.yaml: "
    for report in (
        export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder, dry_run=True),
        reformat_checkpoint(run, tmp_path / "m", hf_model=untied_folder, ckpt_format="torch_dist", dry_run=True),
        verify_checkpoint(untied_folder, run),
    ):
        (note,) = report.notes
        assert note.startswith(why)


def test_export_compares_hf_config_with_run_config_yaml(tmp_path, untied_folder, imported):
    """What a trainer of Megatron-Bridge saves after a conversion may lack our folder and name our function."""
    run = shutil.copytree(imported / "iter_0000000", tmp_path / "run")
    shutil.rmtree(run / "hf")
    assert not export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder, dry_run=True).notes
    config = read_object(untied_folder / "config.json")
    model = shutil.copytree(untied_folder, tmp_path / "model")
    written(model, changed(config, vision_config__num_heads=2))
    with pytest.raises(CheckpointError, match=r"run_config.yaml:\n  vision_config.num_heads is 2, expected 4$"):
        export_checkpoint(run, tmp_path / "hf", hf_model=model, dry_run=True)


def split_off(source: Path, folder: Path, prefix: str, file: str) -> Path:
    """Copy a model with an index, and move tensors to a file that the index does not name."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = hf_tensors(source)
    moved = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
    save_file(tensors, folder / "model-00001-of-00001.safetensors")
    save_file(moved, folder / file)
    weight_map = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    write_object(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    return folder


def test_import_raises_if_index_does_not_name_a_weights_file(capsys, tmp_path, qwen3_5_folder):
    folder = split_off(qwen3_5_folder, tmp_path / "model", "mtp.", "mtp.safetensors")
    parts = (str(folder / "mtp.safetensors"), "tensors that would be lost, such as mtp.", "index.json does not name it")
    expect_error(capsys, importing(folder, tmp_path), *parts)
    import_checkpoint(qwen3_5_folder, tmp_path / "megatron")
    with pytest.raises(CheckpointError, match="would be lost, such as mtp"):
        verify_checkpoint(folder, tmp_path / "megatron")


def test_import_notes_adapter_file_that_index_does_not_name(tmp_path, sharded_folder):
    folder = shutil.copytree(sharded_folder, tmp_path / "model")
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, folder / "adapter_model.safetensors")
    report = import_checkpoint(folder, tmp_path / "megatron")
    assert report.notes == (
        f"{folder}/adapter_model.safetensors is not read: model.safetensors.index.json does not name it",
    )
    assert verify_checkpoint(folder, tmp_path / "megatron").notes == report.notes


def test_import_with_single_file_and_shards_reads_only_single_file(tmp_path, sharded_folder):
    folder = shutil.copytree(sharded_folder, tmp_path / "model")
    tensors = hf_tensors(folder)
    save_file(tensors, folder / "model.safetensors")
    notes = import_checkpoint(folder, tmp_path / "megatron").notes
    assert len(notes) == len(list(folder.glob("model-*.safetensors")))
    assert all(
        note.endswith("is not read: model.safetensors is read instead of model.safetensors.index.json")
        for note in notes
    )
    save_file({NORM: tensors[NORM]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"would be lost, such as .*model\.safetensors is read instead of"):
        import_checkpoint(folder, tmp_path / "other")


def test_import_raises_if_shards_have_no_index(capsys, tmp_path, sharded_folder):
    folder = shutil.copytree(sharded_folder, tmp_path / "model")
    (folder / "model.safetensors.index.json").unlink()
    parts = (
        "weights without model.safetensors.index.json, which lists the tensors of each file",
        "download it too",
    )
    expect_error(capsys, importing(folder, tmp_path), *parts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_import_raises_if_weight_is_nan_or_infinite(value, dtype, tmp_path, untied_folder, imported):
    def change(tensors):
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items()}
        tensors[Q_PROJ][7, 5] = value

    folder = model_with(tmp_path / "model", untied_folder, change)
    with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ}: the value at \[7, 5\] is NaN or infinite"):
        import_checkpoint(folder, tmp_path / "megatron")
    assert not (tmp_path / "megatron").exists()
    with pytest.raises(CheckpointError, match=rf"tensor {Q_PROJ}: the value at \[7, 5\] is NaN or infinite"):
        verify_checkpoint(folder, imported)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_check_finite_matches_torch_isfinite(dtype, tmp_path):
    """Bit patterns of at most 16 bits, and the extremes of wider ones."""
    of = getattr(torch, dtype)
    if of.itemsize <= 2:
        kind = torch.int16 if of.itemsize == 2 else torch.uint8
        values = torch.arange(2 ** (8 * of.itemsize)).to(kind).view(of)
    else:
        limits = torch.finfo(of)
        values = torch.tensor(
            [0.0, -0.0, limits.max, limits.min, limits.tiny, *(float(x) for x in ("nan", "inf", "-inf"))]
        ).to(of)
        values = torch.cat([values, -values])
    spec = TensorSpec("x", dtype, (len(values),))
    for index in range(0, len(values), 7 if dtype.endswith("16") else 1):
        value = values[index]
        data = memoryview(value.reshape(1).view(torch.uint8).numpy())
        finite = bool(torch.isfinite(value.float()) if dtype == "float8_e4m3fn" else torch.isfinite(value))
        with nullcontext() if finite else pytest.raises(CheckpointError, match=rf"value at \[{index}\] is NaN"):
            check_finite(spec, index, data)

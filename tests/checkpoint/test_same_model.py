"""A configuration that is named beside a checkpoint's own has to be of the same model."""

from __future__ import annotations

import copy
import shutil

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    export_checkpoint,
    reformat_checkpoint,
    verify_checkpoint,
    verify_reformatted,
)
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, check_same_model
from qwen3vl_bridge.io.files import read_object, write_object
from qwen3vl_bridge.models.qwen3_vl import presets

import pytest

from .support import expect_error, model_with_config


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


DENSE = [
    {"text_config__num_attention_heads": 8}, {"text_config__num_key_value_heads": 4},
    {"text_config__rms_norm_eps": 1e-5}, {"text_config__hidden_act": "gelu"}, {"text_config__vocab_size": 151_935},
    {"text_config__intermediate_size": 6_000}, {"text_config__rope_parameters__rope_theta": 10_000},
    {"text_config__rope_parameters__mrope_section": [22, 21, 21]}, {"vision_config__num_heads": 8},
    {"vision_config__deepstack_visual_indexes": [5, 11, 18]}, {"vision_config__spatial_merge_size": 4},
    {"vision_config__hidden_act": "gelu"}, {"tie_word_embeddings": False}, {"image_token_id": 151_654},
]  # fmt: skip


@pytest.mark.parametrize("fields", DENSE)
def test_fields_that_differ_are_named(fields, tmp_path):
    config = presets.config_dict("2B")
    one, other = written(tmp_path / "one", changed(config, **fields)), written(tmp_path / "other", config)
    with pytest.raises(CheckpointError) as error:
        check_same_model(one, other)
    first, *lines = str(error.value).splitlines()
    assert first == f"{tmp_path}/one/config.json describes another model than {tmp_path}/other/config.json:"
    assert {line.split()[0] for line in lines} == {name.replace("__", ".") for name in fields}
    assert all(repr(value) in str(error.value) for value in fields.values())


@pytest.mark.parametrize("fields", [{"num_experts_per_tok": 4}, {"moe_intermediate_size": 512},
                                    {"decoder_sparse_step": 2}, {"mlp_only_layers": [3]}])  # fmt: skip
def test_fields_of_experts_that_differ(fields, tmp_path):
    config = presets.config_dict("30B-A3B")
    changes = {f"text_config__{name}": value for name, value in fields.items()}
    one, other = written(tmp_path / "one", changed(config, **changes)), written(tmp_path / "other", config)
    with pytest.raises(CheckpointError, match=next(iter(fields))):
        check_same_model(one, other)


@pytest.mark.parametrize("size", ["2B", "30B-A3B"])
def test_other_spellings_are_of_the_same_model(size, tmp_path):
    config = presets.config_dict(size)
    again = changed(config, text_config__attention_dropout=0.1, text_config__max_position_embeddings=9, dtype="float32")
    text = again["text_config"]
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": float(rope["rope_theta"]), "rope_scaling": {"type": "mrope", **rope}}
    del text["rope_scaling"]["rope_theta"], text["rope_scaling"]["rope_type"], text["rms_norm_eps"]
    if "num_experts" in text:
        text["num_local_experts"] = text.pop("num_experts")
        text["intermediate_size"] += 1  # which no layer has
    del again["image_token_id"], again["vision_config"]["in_channels"]
    full = presets.hf_config(size).to_dict() | {"architectures": None}
    one, *others = (written(tmp_path / str(i), entry) for i, entry in enumerate((config, again, full)))
    for other in others:
        check_same_model(one, other)


@pytest.mark.parametrize(
    ("section", "fields"),
    [
        ("vision_config", {"num_heads": 2}),  # the same shapes, interleaved in another way
        ("text_config", {"vocab_size": 500}),
        ("text_config", {"rms_norm_eps": 1e-5}),
    ],
)
def test_nothing_is_converted_by_another_models_configuration(
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
def test_what_nothing_was_compared_with_is_said(text, tmp_path, untied_folder, imported):
    run = shutil.copytree(imported / "iter_0000000", tmp_path / "run")
    shutil.rmtree(run / "hf")
    (run / "run_config.yaml").unlink()
    if text is not None:
        (run / "run_config.yaml").write_text(text)
    said = (
        f"{untied_folder}/config.json could not be compared with the checkpoint's configuration: {run} has none, and "
    )
    said += "no run_config.yaml" if text in (None, "checkpoint: {}") else f"{run}/run_config.yaml: "
    for report in (
        export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder, dry_run=True),
        reformat_checkpoint(run, tmp_path / "m", hf_model=untied_folder, ckpt_format="torch_dist", dry_run=True),
        verify_checkpoint(untied_folder, run),
    ):
        (note,) = report.notes
        assert note.startswith(said)


def test_the_file_of_a_conversion_is_compared_too(tmp_path, untied_folder, imported):
    """What a trainer of Megatron-Bridge saves after a conversion may lack our folder and name our function."""
    run = shutil.copytree(imported / "iter_0000000", tmp_path / "run")
    shutil.rmtree(run / "hf")
    assert not export_checkpoint(run, tmp_path / "hf", hf_model=untied_folder, dry_run=True).notes
    config = read_object(untied_folder / "config.json")
    model = shutil.copytree(untied_folder, tmp_path / "model")
    written(model, changed(config, vision_config__num_heads=2))
    with pytest.raises(CheckpointError, match=r"run_config.yaml:\n  vision_config.num_heads is 2, expected 4$"):
        export_checkpoint(run, tmp_path / "hf", hf_model=model, dry_run=True)

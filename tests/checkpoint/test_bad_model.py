"""Bad Hugging Face models get one clear error each and leave nothing behind."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from .support import (
    EMBEDDING,
    NORM,
    Q_PROJ,
    change_all,
    change_extra,
    change_misshapen,
    change_missing,
    expect_error,
    exporting,
    importing,
    model_with,
    model_with_config,
)


def test_a_path_that_is_not_there(capsys, tmp_path):
    missing = tmp_path / "no such"
    expect_error(capsys, importing(missing, tmp_path), str(missing), "does not exist", "config.json")
    expect_error(
        capsys, exporting(missing, tmp_path), str(missing), "there is no such folder, expected the folder of a Megatron"
    )


def test_a_hub_id_that_cannot_be_reached(capsys, tmp_path, monkeypatch):
    import huggingface_hub

    def refuse(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    expect_error(capsys, importing("Qwen/No-Such", tmp_path), "Qwen/No-Such is neither a folder", "no connection")


def test_a_file_in_place_of_a_folder(capsys, tmp_path):
    (tmp_path / "file").write_text("x")
    expect_error(capsys, importing(tmp_path / "file", tmp_path), "is a file, expected a folder")
    expect_error(capsys, exporting(tmp_path / "file", tmp_path), "it is a file, not a folder, expected the folder")


def test_folders_that_hold_something_else(capsys, tmp_path, untied_folder, imported):
    (tmp_path / "empty").mkdir()
    expect_error(capsys, importing(tmp_path / "empty", tmp_path), "no config.json")
    expect_error(capsys, exporting(tmp_path / "empty", tmp_path), "not a Megatron checkpoint")
    expect_error(capsys, exporting(untied_folder, tmp_path), str(untied_folder), "not a Megatron checkpoint")
    expect_error(capsys, importing(imported, tmp_path), str(imported), "no config.json")
    expect_error(capsys, importing(imported / "iter_0000000" / "hf", tmp_path), "no weights", "model.safetensors")


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"model_type": "qwen2_vl", "architectures": ["Qwen2VL"]}, ("['Qwen2VL']", "qwen2_vl", "expected Qwen3VLFor")),
        ({"model_type": "qwen3_vl_moe"}, ("qwen3_vl_moe", "expected Qwen3VLForConditionalGeneration")),
        (
            {"model_type": "qwen3_vl_moe", "architectures": ["Qwen3VLMoeForConditionalGeneration"]},
            ("0 layers have experts", "qwen3_vl_moe does not allow"),
        ),
        ({"text_config": {}}, ("lacks the field text_config.vocab_size",)),
        ({"vision_config": 3}, ("vision_config is 3, expected an object",)),
    ],
)
def test_another_models_configuration(capsys, tmp_path, untied_folder, change, parts):
    folder = model_with_config(tmp_path / "other", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), str(folder), *parts)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (change_missing, ("1 missing", f"{NORM}: found nothing, expected [80]")),
        (change_extra, ("1 unexpected", "layers.9.x: found [3] float32, expected no such tensor")),
        (change_misshapen, ("1 misshapen", f"{Q_PROJ}: found [5, 80], expected [128, 80]")),
        (change_all, ("1 missing, 1 unexpected, 1 misshapen", NORM, "layers.9.x", Q_PROJ)),
        (lambda t: t.update({NORM: t[NORM].to(torch.int32)}), (NORM, "found dtype int32, expected float32")),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].half()}), (f"{Q_PROJ} float16", "--torch-dtype")),
    ],
)
def test_tensors_that_are_not_as_the_configuration_says(capsys, tmp_path, untied_folder, change, parts):
    folder = model_with(tmp_path / "model", untied_folder, change)
    expect_error(capsys, importing(folder, tmp_path), str(folder), *parts)


def test_a_tied_model_with_an_output_layer_of_its_own(capsys, tmp_path, tied_folder):
    def change(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].clone()
        tensors["lm_head.weight"][3, 4] += 1

    folder = model_with(tmp_path / "model", tied_folder, change)
    error = expect_error(capsys, importing(folder, tmp_path), "tie_word_embeddings", "lm_head.weight")
    assert "1 of 40960 elements differ, the first is number 244" in error


@pytest.mark.parametrize("which", ["untied_folder", "sharded_folder"])
def test_a_truncated_file_of_weights(capsys, tmp_path, request, which):
    shutil.copytree(request.getfixturevalue(which), tmp_path / "model")
    path = sorted((tmp_path / "model").glob("*.safetensors"))[-1]
    size = path.stat().st_size
    os.truncate(path, size - 100)
    expect_error(capsys, importing(tmp_path / "model", tmp_path), str(path), f"{size - 100} bytes, expected {size}")

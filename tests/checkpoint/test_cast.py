"""Casts: rounded as torch rounds, recorded in the configuration, refused where values are lost."""

from __future__ import annotations

import json
import shutil

from qwen3vl_bridge.checkpoint import (
    CheckpointError,
    export_checkpoint,
    import_checkpoint,
    inspect_checkpoint,
    verify_checkpoint,
)

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3VLForConditionalGeneration

from .support import hf_tensors


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_import_rounds_as_torch_does(dtype, untied_folder, tmp_path):
    report = import_checkpoint(untied_folder, tmp_path / "megatron", torch_dtype=dtype)
    assert report.cast == report.tensors and not report.transposed and report.dtypes == (dtype,)
    assert inspect_checkpoint(tmp_path / "megatron")["dtypes"] == {dtype: report.tensors}
    assert verify_checkpoint(untied_folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    before, after = hf_tensors(untied_folder), hf_tensors(tmp_path / "hf")
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(getattr(torch, dtype))), name


def test_widening_and_back_changes_nothing(bf16_folder, tmp_path):
    import_checkpoint(bf16_folder, tmp_path / "megatron", torch_dtype="float32")
    assert verify_checkpoint(bf16_folder, tmp_path / "megatron").same
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf", torch_dtype="bfloat16")
    before, after = hf_tensors(bf16_folder), hf_tensors(tmp_path / "hf")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_exported_configuration_names_the_dtype_written(bf16_folder, tmp_path):
    import_checkpoint(bf16_folder, tmp_path / "megatron", torch_dtype="float32")
    export_checkpoint(tmp_path / "megatron", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["dtype"], config["text_config"]["dtype"]) == ("float32", "float32")
    assert Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "hf").dtype == torch.float32


@pytest.mark.parametrize("options", [{"torch_dtype": "bf16"}, {"naming": "te"}])
def test_an_option_that_is_none_is_refused(options, untied_folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"is '(bf16|te)', expected"):
        import_checkpoint(untied_folder, tmp_path / "megatron", **options)


def test_a_value_too_large_is_refused(untied_folder, tmp_path):
    shutil.copytree(untied_folder, tmp_path / "model")
    tensors = hf_tensors(untied_folder)
    tensors["model.language_model.norm.weight"][3] = 1e6
    tensors["model.visual.pos_embed.weight"][0, 0] = torch.inf  # is itself in any dtype
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    import_checkpoint(tmp_path / "model", tmp_path / "bf16", torch_dtype="bfloat16")
    with pytest.raises(
        CheckpointError, match=r"model.language_model.norm.weight: value 1e\+06 is too large for float16"
    ):
        import_checkpoint(tmp_path / "model", tmp_path / "fp16", torch_dtype="float16")
    assert not (tmp_path / "fp16").exists()

"""Runs from FP8 weights equal runs from their dequantized values, and export to bfloat16 or FP8."""

from qwen3vl_bridge.checkpoint import export_checkpoint, import_checkpoint
from qwen3vl_bridge.core.files import read_object
from qwen3vl_bridge.peft.lora import Qwen3VLLoRA

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.support import assert_same
from tests.helpers import fp8
from tests.training.running import configured, losses, stored, train

STEPS = dict(train__train_iters=3, checkpoint__save_interval=3, validation__eval_iters=0)


@pytest.mark.one_case_in(9)
@pytest.mark.parametrize("fsdp", [True, False], ids=["Megatron-FSDP", "torch_dist"])
@pytest.mark.parametrize("model", ["qwen3_vl dense", "qwen3_vl moe", "qwen3_5 dense", "qwen3_5 moe"])
def test_run_from_fp8_weights_equals_run_from_dequantized_weights(model, fsdp, inputs, folders, tmp_path):
    family, kind = model.split()
    source = fp8.in_fp8(folders.get((family, kind), inputs.hf), tmp_path / "fp8")
    import_checkpoint(source, tmp_path / "values")
    export_checkpoint(tmp_path / "values", tmp_path / "bf16")
    logs = {}
    for base in ("fp8", "bf16"):
        hf, save = str(tmp_path / base), str(tmp_path / f"run of {base}")
        logs[base] = train(configured(hf, str(inputs.data), hf, save, STEPS, fsdp=fsdp, bf16=True, distributed=True))
    assert losses(logs["fp8"]) == losses(logs["bf16"]) and len(logs["fp8"]) == 3
    run, other = tmp_path / "run of fp8", tmp_path / "run of bf16"
    assert_same(stored(run), stored(other))

    export_checkpoint(run, tmp_path / "trained", torch_dtype="bfloat16")
    export_checkpoint(other, tmp_path / "expected", torch_dtype="bfloat16")
    trained, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("trained", "expected"))
    assert_same(trained, expected)
    before = load_file(tmp_path / "bf16" / "model.safetensors")
    assert torch.float8_e4m3fn not in {tensor.dtype for tensor in trained.values()}
    assert sum(not torch.equal(trained[name], tensor) for name, tensor in before.items()) > len(before) / 2

    export_checkpoint(run, tmp_path / "again", quantize="fp8", torch_dtype="bfloat16", verify=True)
    export_checkpoint(run, tmp_path / "exact", torch_dtype="float32")  # as stored by Megatron-FSDP
    anew = load_file(fp8.in_fp8(tmp_path / "exact", tmp_path / "quantized") / "model.safetensors")
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert_same({name: one.float() for name, one in found.items()}, {name: one.float() for name, one in anew.items()})
    settings = (read_object(folder / "config.json")["quantization_config"] for folder in (tmp_path / "again", source))
    assert next(settings) == next(settings)


@pytest.mark.slow
def test_lora_run_on_fp8_weights_equals_run_on_dequantized_weights(inputs, tmp_path):
    source = fp8.in_fp8(inputs.hf, tmp_path / "fp8")
    import_checkpoint(source, tmp_path / "values")
    export_checkpoint(tmp_path / "values", tmp_path / "bf16")
    logs = {}
    for base in ("fp8", "bf16"):
        hf, save = str(tmp_path / base), str(tmp_path / f"run of {base}")
        cfg = configured(hf, str(inputs.data), hf, save, STEPS, fsdp=False, bf16=True, distributed=True)
        cfg.peft = Qwen3VLLoRA(dim=4, alpha=8)
        logs[base] = train(cfg)
    assert losses(logs["fp8"]) == losses(logs["bf16"]) and len(logs["fp8"]) == 3
    assert_same(stored(tmp_path / "run of fp8"), stored(tmp_path / "run of bf16"))

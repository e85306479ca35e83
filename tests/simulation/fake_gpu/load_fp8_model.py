"""Load weights into a model with FP8 parameters: `load_fp8_model.py FOLDER`.

Copies between the host and the fake GPU are real. FP8 values, which kernels compute, are garbage.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.checkpoint import import_checkpoint
from qwen3vl_bridge.testing.tiny_checkpoint import make_checkpoint
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import InitialWeights

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import CheckpointConfig

from tests.simulation.fake_gpu.conftest import leave

FP8 = dict(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)


def load(hf, folder, **fields):
    provider = AutoBridge.from_hf_pretrained(str(hf)).to_megatron_provider(load_weights=False)
    for name, value in dict(bf16=True, params_dtype=torch.bfloat16, seq_length=64, **fields).items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, pg_collection=groups)
    before = {name: main_weight_values(p) for name, p in model[0].named_parameters()}
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder))
    InitialWeights(SimpleNamespace(model=provider, peft=None, checkpoint=checkpoint))(model)
    return before, dict(model[0].named_parameters())


def main_weight_values(parameter):
    """Return the values from which the optimizer creates main weights, or None."""
    return parameter.get_high_precision_init_val() if hasattr(parameter, "get_high_precision_init_val") else None


if __name__ == "__main__":
    root = Path(sys.argv[1])
    make_checkpoint(root / "hf")
    import_checkpoint(root / "hf", root / "megatron", progress=False)
    _, plain = load(root / "hf", root / "megatron")
    before, found = load(root / "hf", root / "megatron", **FP8)
    values = {name: main_weight_values(parameter) for name, parameter in found.items()}
    names = [name for name, value in values.items() if value is not None]
    result = dict(
        names=names,
        same=[torch.equal(values[name], plain[name].detach().cpu()) for name in names],
        changed=[not torch.equal(values[name], before[name]) for name in names],
        others=[
            torch.equal(found[name].detach().cpu(), plain[name].detach().cpu()) for name in found.keys() - set(names)
        ],
    )
    leave(result)

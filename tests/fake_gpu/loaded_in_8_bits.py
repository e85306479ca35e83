"""Loads weights into a model whose linear layers are stored in 8 bits: `loaded_in_8_bits.py FOLDER`.

Copies between the host and the fake GPU are real; what kernels would compute, the 8-bit values, is not there.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.checkpoint import import_checkpoint
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.weight_loading import InitialWeights

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.config import CheckpointConfig

from examples.digits.checkpoint import make_checkpoint
from tests.fake_gpu.conftest import leave

IN_8_BITS = dict(fp8="hybrid", fp8_recipe="tensorwise", fp8_param=True)


def loaded(hf, folder, **fields):
    provider = AutoBridge.from_hf_pretrained(str(hf)).to_megatron_provider(load_weights=False)
    for name, value in dict(bf16=True, params_dtype=torch.bfloat16, seq_length=64, **fields).items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, pg_collection=groups)
    before = {name: kept(p) for name, p in model[0].named_parameters()}
    checkpoint = CheckpointConfig(pretrained_checkpoint=str(folder))
    InitialWeights(SimpleNamespace(model=provider, peft=None, checkpoint=checkpoint))(model)
    return before, dict(model[0].named_parameters())


def kept(parameter):
    """What the optimizer's main weights are made of, or None."""
    return parameter.get_high_precision_init_val() if hasattr(parameter, "get_high_precision_init_val") else None


if __name__ == "__main__":
    root = Path(sys.argv[1])
    make_checkpoint(root / "hf")
    import_checkpoint(root / "hf", root / "megatron", progress=False)
    _, plain = loaded(root / "hf", root / "megatron")
    before, found = loaded(root / "hf", root / "megatron", **IN_8_BITS)
    values = {name: kept(parameter) for name, parameter in found.items()}
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

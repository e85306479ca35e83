"""Run on two ranks: weights loaded and exported again under model parallelism.

    torchrun --nproc_per_node 2 -m tests.model.weights.weights_on_two_ranks SETTINGS HF_FOLDER...

SETTINGS is a JSON list with fields of the provider for each folder. Every rank compares what it exports.
"""

import json
import sys
from pathlib import Path

from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from tests.ranks import begin, leave


def check(folder: str, settings: dict) -> None:
    """Load, export, compare bit for bit."""
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=True)
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
    )
    exported = dict(bridge.export_hf_weights(model, cpu=True, show_progress=False))
    source = {name: t for file in Path(folder).glob("*.safetensors") for name, t in load_file(file).items()}
    wrong = [name for name in source if name not in exported or not torch.equal(exported[name], source[name])]
    if wrong or exported.keys() - source.keys() - {"lm_head.weight"}:
        raise AssertionError(f"{folder} {settings}: {wrong[:5]} {sorted(exported.keys() - source.keys())[:5]}")


if __name__ == "__main__":
    begin()
    for folder, settings in zip(sys.argv[2:], json.loads(sys.argv[1]), strict=True):
        check(folder, settings)
    leave()

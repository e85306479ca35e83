"""Weights come back bit for bit under tensor, pipeline, expert and expert-tensor parallelism.

Run on two ranks it is the script of the test: -m tests.model.weights.test_weights_on_two_ranks SETTINGS HF_FOLDER...
"""

import json
import sys
from pathlib import Path

from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

from tests.expert_layouts import LAYOUTS
from tests.forked import run_ranks
from tests.ranks import begin, leave


def test_every_tensor_comes_back(untied_folder, tied_folder, moe_folders, tmp_path):
    tp, ep = dict(tensor_model_parallel_size=2, sequence_parallel=True), dict(expert_model_parallel_size=2)
    pp = dict(pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=3, pipeline_dtype=None)
    padded = dict(should_pad_vocab=True, make_vocab_size_divisible_by=100)
    cases = [(untied_folder, tp | padded), (tied_folder, tp | padded), (tied_folder, pp | padded)]
    cases += [(moe_folders[layout], ep) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp) for layout in LAYOUTS]
    cases += [(moe_folders[layout], tp | ep | dict(expert_tensor_parallel_size=1)) for layout in LAYOUTS]
    settings = json.dumps([fields for _, fields in cases])
    run_ranks("tests.model.weights.test_weights_on_two_ranks", 2, settings, *(folder for folder, _ in cases))


def check(folder: str, settings: dict) -> None:
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

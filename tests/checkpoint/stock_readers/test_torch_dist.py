"""Stock megatron-core and Megatron-Bridge load our torch_dist checkpoints; what megatron-core saves, we export."""

import math
import os
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint import Topology, inspect_checkpoint
from qwen3vl_bridge.checkpoint.commands import export_checkpoint, import_checkpoint, reformat_checkpoint
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.weights.rows import ExpertLayout

import pytest
import torch
import torch.distributed as dist
from megatron.bridge import AutoBridge
from megatron.bridge.training.model_load_save import load_megatron_model
from megatron.core import dist_checkpointing
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.utils import unwrap_model

from tests.checkpoint.support import assert_same, hf_tensors
from tests.helpers.forked import results_of_ranks

TP, EP, PP = "tensor_model_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size"
# What Megatron-Bridge passes on.
METADATA = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def same(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> bool:
    found = model.state_dict()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def save_doubled(model: torch.nn.Module, provider: Any, groups: Any, folder: Path) -> None:
    ddp = DistributedDataParallel(provider, DistributedDataParallelConfig(), model, pg_collection=groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0), [ddp], use_gloo_process_groups=False)
    for parameter in model.parameters():
        parameter.main_grad.fill_(0.5)
    optimizer.step()  # makes its state; at that rate it changes nothing
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    state = {"model": model.sharded_state_dict(metadata=METADATA | {"dp_cp_group": groups.dp_cp})}
    state["optimizer"] = optimizer.sharded_state_dict(state["model"], metadata=METADATA)
    if dist.get_rank() == 0:
        os.makedirs(folder)
    dist.barrier()
    dist_checkpointing.save(state, str(folder))


def load(hf_folder: Path, folder: Path, settings: dict[str, Any], save_to: Path | None) -> None:
    """By megatron-core, strictly: all is as Megatron-Bridge fills a model from the Hugging Face folder, bit for bit.

    Where there is a folder to save to, all weights are doubled and saved by megatron-core, with the state of its
    optimizer; and a single process has Megatron-Bridge build and fill a model from nothing but the checkpoint.
    """
    provider = AutoBridge.from_hf_pretrained(str(hf_folder)).to_megatron_provider(load_weights=True)
    for name, value in settings.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    (wrapped,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, pg_collection=groups
    )
    (model,) = unwrap_model([wrapped])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items() if torch.is_tensor(tensor)}
    for parameter in model.parameters():
        parameter.data.fill_(7)
    metadata = METADATA | {"dp_cp_group": groups.dp_cp}
    state = dist_checkpointing.load(
        {"model": model.sharded_state_dict(metadata=metadata)}, f"{folder}/iter_0000000", strict="raise_all"
    )
    model.load_state_dict(state["model"], strict=True)
    assert same(model, expected), settings
    if save_to is not None:
        save_doubled(model, provider, groups, save_to)
        if dist.get_world_size() == 1:
            (loaded,) = load_megatron_model(f"{folder}/iter_0000000", use_cpu_init=True)
            assert same(unwrap_model([loaded])[0], expected), f"{folder} by Megatron-Bridge"


@pytest.mark.slow
def test_imported_checkpoint_loads_in_megatron_core_with_same_tensors(
    untied_folder, tied_folder, moe_folders, all_moe_folder, tmp_path
):
    released = moe_folders[ExpertLayout.INPUT_MAJOR]
    models = {"untied": untied_folder, "tied": tied_folder, "moe": released, "all_moe": all_moe_folder}
    folders = {}
    for name, source in models.items():
        topology = Topology(chunk_bytes=20_000)
        import_checkpoint(source, tmp_path / name, ckpt_format="torch_dist", naming="local", topology=topology)
        folders[name] = (source, tmp_path / name)
    # The same by way of the other format.
    import_checkpoint(released, tmp_path / "fsdp")
    reformat_checkpoint(tmp_path / "fsdp", tmp_path / "again", ckpt_format="torch_dist", naming="local")
    loads = [
        (*folders["untied"], {}, "untied"), (*folders["untied"], {TP: 2, "sequence_parallel": True}, "untied-tp2"),
        (*folders["untied"], {PP: 2, "num_layers_in_first_pipeline_stage": 3}, None),
        (*folders["tied"], {TP: 2}, None), (*folders["moe"], {EP: 2}, "moe-ep2"),
        (*folders["all_moe"], {}, "all_moe"), (*folders["all_moe"], {EP: 2}, None),
        (released, tmp_path / "again", {TP: 2, "sequence_parallel": True}, None),
    ]  # fmt: skip
    for source, folder, settings, save in loads:
        saved = save and tmp_path / "saved" / save
        ranks = math.prod(value for name, value in settings.items() if name.endswith("parallel_size"))
        results_of_ranks(load, ranks, source, folder, settings, saved)
        if saved is None:
            continue
        found = inspect_checkpoint(saved)
        assert found["format"] == "torch_dist" and found["other_tensors"] == 2 * found["tensors"]  # Adam's two moments
        export_checkpoint(saved, hf := tmp_path / "saved" / f"{save}-hf", hf_model=source)
        assert_same(hf_tensors(hf), {name: 2 * tensor for name, tensor in hf_tensors(source).items()})

"""Tiny models saved and loaded by megatron-core alone, in its own checkpoint format."""

from pathlib import Path

from qwen3vl_bridge.training.process_group import initialize

import torch
from megatron.bridge import AutoBridge
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection


def build(folder: str | Path, **fields) -> tuple[torch.nn.Module, ProcessGroupCollection]:
    """This rank's part of the model, with the folder's weights."""
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
    )
    return model, groups


def sharded(model: torch.nn.Module, groups: ProcessGroupCollection, **metadata) -> ShardedStateDict:
    """As Megatron-Bridge asks for it."""
    return model.sharded_state_dict(metadata=dict(singleton_local_shards=False, dp_cp_group=groups.dp_cp, **metadata))


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model."""
    return {name: t.clone() for name, t in model.state_dict().items() if isinstance(t, torch.Tensor)}


def save(model: torch.nn.Module, groups: ProcessGroupCollection, folder: str | Path) -> None:
    """By megatron-core alone."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save({"model": sharded(model, groups)}, str(folder))


def load(model: torch.nn.Module, groups: ProcessGroupCollection, folder: str | Path) -> None:
    """By megatron-core alone; a name that only one side has is an error."""
    state = dist_checkpointing.load({"model": sharded(model, groups)}, str(folder), strict="raise_all")
    model.load_state_dict(state["model"])


def wrong_after_loading(model: torch.nn.Module, groups: ProcessGroupCollection, folder: str | Path) -> list[str]:
    """Load over a spoilt model that has the right weights; which of them do not come back bit for bit."""
    expected = tensors(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    load(model, groups, folder)
    found = tensors(model)
    return [name for name in expected if not torch.equal(found[name], expected[name])]

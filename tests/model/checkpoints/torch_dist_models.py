"""Tiny models saved and loaded in megatron-core's own checkpoint format, by it alone and by Megatron-Bridge."""

from collections.abc import Sequence
from pathlib import Path

from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge
from megatron.bridge.training.checkpointing import generate_state_dict
from megatron.bridge.training.config import CheckpointConfig
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection
from transformers import AutoConfig

from examples.digits.checkpoint import make_model

Chunks = Sequence[torch.nn.Module]  # one, or one for each virtual pipeline stage of this rank


def make_experts_everywhere(moe_folder: str | Path, folder: Path) -> Path:
    """A Hugging Face folder as the one given, but with experts in every layer."""
    config = AutoConfig.from_pretrained(moe_folder)
    config.text_config.mlp_only_layers = []
    make_model(config, seed=4).save_pretrained(folder)
    return folder


def build_chunks(folder: str | Path, **fields) -> tuple[Chunks, ProcessGroupCollection]:
    provider = AutoBridge.from_hf_pretrained(str(folder)).to_megatron_provider(load_weights=True)
    for name, value in fields.items():
        setattr(provider, name, value)
    provider.finalize()
    groups = initialize(provider, seed=0)
    chunks = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None, pg_collection=groups
    )
    return chunks, groups


def build(folder: str | Path, **fields) -> tuple[torch.nn.Module, ProcessGroupCollection]:
    """As `build_chunks`, of a model that is one part on each rank."""
    (model,), groups = build_chunks(folder, **fields)
    return model, groups


def sharded(model: torch.nn.Module, groups: ProcessGroupCollection, **metadata) -> ShardedStateDict:
    return model.sharded_state_dict(metadata=_metadata(groups) | metadata)


def tensors(*chunks: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors of a model; names of several parts begin with the number of the part."""
    return {
        f"{i}." * (len(chunks) > 1) + name: t.clone()
        for i, chunk in enumerate(chunks)
        for name, t in chunk.state_dict().items()
        if isinstance(t, torch.Tensor)
    }


def save(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    dist_checkpointing.save(_state(chunks, groups), str(folder))


def load(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> None:
    """By megatron-core alone; a name that only one side has is an error."""
    state = dist_checkpointing.load(_state(chunks, groups), str(folder), strict="raise_all")
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}" if len(chunks) > 1 else "model"])


def wrong(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    differ = {name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])}
    return sorted(differ | (found.keys() ^ expected.keys()))


def wrong_after_loading(chunks: Chunks, groups: ProcessGroupCollection, folder: str | Path) -> list[str]:
    """Load over a spoilt model that has the right weights; which of them do not come back bit for bit."""
    expected = tensors(*chunks)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.fill_(7)
    load(chunks, groups, folder)
    return wrong(tensors(*chunks), expected)


def save_by_bridge(folder: str | Path, chunks: Chunks, checkpoint: str | Path) -> None:
    """By Megatron-Bridge, with the configuration; `folder` is the model's Hugging Face one."""
    AutoBridge.from_hf_pretrained(str(folder)).save_megatron_model(list(chunks), str(checkpoint))


def load_by_bridge(folder: str | Path, checkpoint: str | Path, **fields) -> Chunks:
    """A new model from what `save_by_bridge` wrote, in the groups there are, split as `fields` say.

    The rest of the configuration is the saved one's, and so are settings that fit its own splitting alone.
    """
    fitting = dict(
        expert_tensor_parallel_size=fields.get("tensor_model_parallel_size", 1), moe_token_dispatcher_type="alltoall"
    )
    bridge = AutoBridge.from_hf_pretrained(str(folder))
    return bridge.load_megatron_model(str(checkpoint), mp_overrides=fitting | fields)


def _state(chunks: Chunks, groups: ProcessGroupCollection) -> ShardedStateDict:
    weights = CheckpointConfig(save_optim=False, save_rng=False, ckpt_format="torch_dist")
    return generate_state_dict(
        weights, list(chunks), None, None, None, model_sd_kwargs=dict(metadata=_metadata(groups))
    )


def _metadata(groups: ProcessGroupCollection) -> dict:
    return dict(singleton_local_shards=False, dp_cp_group=groups.dp_cp)

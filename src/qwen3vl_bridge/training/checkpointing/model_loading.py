"""A complete model with a checkpoint's weights, for inference or comparison rather than training.

What lives here: the one function. What may not: what a checkpoint holds (`weight_loading.py`).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3vl_bridge.registry import family_of
from qwen3vl_bridge.training.checkpointing.weight_loading import load_weights
from qwen3vl_bridge.training.process_groups import initialize

import torch
from megatron.bridge import AutoBridge

if TYPE_CHECKING:
    from qwen3vl_bridge.models.common.model import VisionLanguageModel


def load_model(hf_path: str | Path, megatron_path: str | Path | None = None) -> list[VisionLanguageModel]:
    """Build the Megatron model on this process, or on these processes, and fill it.

    Args:
        hf_path: Hugging Face folder or hub id: the configuration, and the weights if `megatron_path` is None.
        megatron_path: a checkpoint of either format, or a run's folder, from which weights are read.

    Raises:
        CheckpointError: the Megatron checkpoint does not exist or does not fit.
        ValueError: the Hugging Face one does not.
    """
    bridge = AutoBridge.from_hf_pretrained(str(hf_path))
    importlib.import_module(family_of(bridge.hf_pretrained.config.to_dict()).bridge)  # may not be registered yet
    provider = bridge.to_megatron_provider(load_weights=megatron_path is None)
    provider.finalize()
    groups = initialize(provider, seed=0)
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=not torch.cuda.is_available(), pg_collection=groups
    )
    if megatron_path is not None:
        load_weights(megatron_path, model, groups)
    return model

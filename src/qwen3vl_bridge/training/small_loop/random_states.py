"""Random generators of a rank: their states for a checkpoint, and new seeds where those don't fit.

What lives here: which generators there are and which ranks' states go together. What may not: files.
"""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

from qwen3vl_bridge.models.common.settings.encoder_parallel import SIZES as DIST_TRAIN_SIZES
from qwen3vl_bridge.models.common.settings.parallelism import SIZES
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLModelProvider
from qwen3vl_bridge.training.process_groups import seed_generators

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

logger = logging.getLogger(__name__)


def split_of(groups: ProcessGroupCollection, provider: Qwen3VLModelProvider) -> dict[str, int]:
    """How ranks are split, the same on each: under the same one, each goes on with the states it had."""
    if provider.dist_train.use_dist_train:
        sizes = {name: getattr(provider, name) for name in SIZES}
        modules = {name: getattr(provider.dist_train, name) for name in DIST_TRAIN_SIZES}
        return {name: size for name, size in (sizes | modules).items() if size is not None}
    sizes = {name: getattr(groups, name).size() for name in ("tp", "cp", "pp", "dp")}
    return sizes | {"ep": groups.ep.size(), "etp": groups.expt_tp.size()}


def random_states() -> dict[str, Any]:
    """States of all generators of this rank, as what `torch.load` takes for plain."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "tracked": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Go on where `random_states` was called."""
    kind, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracked"])


def seed_anew(seed: int, step: int, groups: ProcessGroupCollection) -> None:
    """Seed for the steps after a checkpoint whose states are of other ranks.

    Args:
        seed: the run's.
        step: that the checkpoint was saved after.
        groups: process groups.
    """
    mixed = int.from_bytes(hashlib.sha256(f"{seed} {step}".encode()).digest()[:4], "big") >> 1
    seed_generators(mixed, groups)
    logger.info("random generators start anew, from rng.seed %d and step %d", seed, step)

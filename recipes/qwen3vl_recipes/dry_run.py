"""What a run would be: all its settings, and the memory they need.

What lives here: completing a configuration as if it ran on so many GPUs, and showing it. What may not: formulas of
memory (`qwen3vl_bridge.planning`).
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.memory.estimate import Estimate
    from qwen3vl_bridge.planning.proposals import Proposal

    from megatron.bridge.training.config import ConfigContainer

_DATA = "(dataset.path is not set)"


def finalised(cfg: ConfigContainer, world_size: int) -> ConfigContainer:
    """A copy of a configuration as Megatron-Bridge completes and checks it for so many ranks; nothing is started.

    Data, and weights to start from, need not be there.

    Args:
        cfg: a recipe's; it stays as it is.
        world_size: ranks.

    Raises:
        ValueError, AssertionError: settings that contradict each other, or this number of ranks.
    """
    import torch
    from megatron.bridge.training.config import runtime_config_update

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() != world_size:
        raise ValueError(f"there are {torch.distributed.get_world_size()} processes already, expected only this one")
    cfg = copy.deepcopy(cfg)
    if all(getattr(cfg.dataset, name, "") is None for name in ("path", "train_path", "mixture")):
        cfg.dataset.path = _DATA
    weights = cfg.checkpoint.pretrained_checkpoint
    with _world_of(world_size), tempfile.TemporaryDirectory() as folder:
        if weights is None or not os.path.isdir(weights):
            cfg.checkpoint.pretrained_checkpoint = folder  # Megatron-Bridge looks whether it is there
        runtime_config_update(cfg)
    cfg.checkpoint.pretrained_checkpoint = weights
    return cfg


@contextmanager
def _world_of(size: int) -> Iterator[None]:
    """As torchrun would tell the first of so many processes. What a configuration adds to the environment goes too."""
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(size), "RANK": "0"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def memory_plan(cfg: ConfigContainer, world_size: int) -> Estimate:
    """What each rank would hold on GPUs, where Transformer Engine is installed.

    Args:
        cfg: a recipe's; it stays as it is.
        world_size: ranks.

    Raises:
        ValueError: a setting that changes memory and is not counted.
    """
    from qwen3vl_bridge.planning.from_config import plan_of

    return plan_of(_for_gpus(finalised(cfg, world_size)), world_size)


def beside_proposals(cfg: ConfigContainer, world_size: int, gpu: str) -> tuple[Proposal, list[Proposal]]:
    """A recipe as it is split, and what the planner would propose for its rows and GPUs, best first.

    Args:
        cfg: a recipe's, with vision on the language model's ranks; it stays as it is.
        world_size: ranks.
        gpu: a key of `GPUS`.
    """
    from qwen3vl_bridge.planning.from_config import proposals_beside
    from qwen3vl_bridge.planning.hardware import gpu_of

    return proposals_beside(_for_gpus(finalised(cfg, world_size)), world_size, gpu_of(gpu))


def _for_gpus(complete: ConfigContainer) -> ConfigContainer:
    """A completed configuration, with the layers that it would have on GPUs."""
    complete.model.transformer_impl = "transformer_engine"
    return complete


def dump(cfg: ConfigContainer, *, gpus: int, gpu: str) -> dict[str, Any]:
    """For programs: settings, and the plan of memory in bytes, or why there is none.

    Args:
        cfg: as the run would get it.
        gpus: how many.
        gpu: their kind.
    """
    from qwen3vl_bridge.planning.from_config import plan_of
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.reports import dump_estimate

    import yaml
    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    kind, complete = gpu_of(gpu), finalised(cfg, gpus)
    found = {"settings": yaml.safe_load(dump_dataclass_to_yaml(complete.to_dict())), "plan": None, "no_plan": None}
    try:
        found["plan"] = dump_estimate(plan_of(_for_gpus(complete), gpus), kind.memory_bytes)
    except ValueError as error:
        found["no_plan"] = str(error)
    return found


def show(cfg: ConfigContainer, *, gpus: int, gpu: str) -> None:
    """Print the settings as YAML, then the plan: of memory, and what else the planner would do.

    Where vision has ranks of its own, that is whether they are enough; else how it would split the model.

    Args:
        cfg: as the run would get it.
        gpus: how many.
        gpu: their kind.
    """
    from qwen3vl_bridge.planning.from_config import plan_of, proposals_beside, sized_of
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.reports import print_estimate, words_beside, words_of_pace

    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    kind, complete = gpu_of(gpu), finalised(cfg, gpus)
    print(dump_dataclass_to_yaml(complete.to_dict()))
    try:
        plan = plan_of(_for_gpus(complete), gpus)
    except ValueError as error:
        print(f"memory cannot be estimated: {error}")
    else:
        print_estimate(plan, kind.memory_bytes)
        if plan.dist is not None:
            print(words_of_pace(sized_of(complete, gpus, kind)))
        else:
            print(words_beside(*proposals_beside(complete, gpus, kind)))

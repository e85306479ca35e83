"""The dry run: all settings of a run, completed as if it ran on a number of GPUs, and the memory that it needs."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate

    from megatron.bridge.training.config import ConfigContainer

_DATA = "(dataset.path is not set)"


def finalised(cfg: ConfigContainer, world_size: int) -> ConfigContainer:
    """A copy of a configuration as a run completes and checks it for a number of ranks, before it builds the model;
    nothing is started.

    Data and initial weights need not exist.

    Raises:
        ValueError, AssertionError: settings that contradict each other or this number of ranks.
    """
    from qwen3vl_bridge.training.callbacks import training_callbacks

    import torch
    from megatron.bridge.training.config import runtime_config_update

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() != world_size:
        raise ValueError(f"there are {torch.distributed.get_world_size()} processes already, expected only this one")
    cfg = copy.deepcopy(cfg)
    if all(getattr(cfg.dataset, name, "") is None for name in ("path", "train_path", "mixture")):
        cfg.dataset.path = _DATA
    weights = cfg.checkpoint.pretrained_checkpoint
    with _world_of(world_size), _transformer_engine(cfg), tempfile.TemporaryDirectory() as folder:
        if weights is None or not os.path.isdir(weights):
            cfg.checkpoint.pretrained_checkpoint = folder  # Megatron-Bridge checks that it exists
        training_callbacks(cfg)
        runtime_config_update(cfg)
    cfg.checkpoint.pretrained_checkpoint = weights
    return cfg


@contextmanager
def _world_of(size: int) -> Iterator[None]:
    """Set the environment of the first of `size` processes, as torchrun does; it is restored at the end."""
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(size), "RANK": "0"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# What the package is tested with, for a configuration that is completed on a machine without it.
_TRANSFORMER_ENGINE = "2.16.1"


@contextmanager
def _transformer_engine(cfg: ConfigContainer) -> Iterator[None]:
    """Have megatron-core take Transformer Engine for installed if a configuration asks for its layers: without, it has
    release 0.0.0, with which experts in 8 bits are refused.
    """
    from megatron.core import utils
    from packaging.version import Version

    found = utils.get_te_version()
    if not found.release[0] and cfg.model.transformer_impl == "transformer_engine":
        utils._te_version = Version(_TRANSFORMER_ENGINE)
    try:
        yield
    finally:
        utils._te_version = found


def memory_plan(cfg: ConfigContainer, world_size: int) -> MemoryEstimate:
    """The memory of each rank on GPUs with Transformer Engine.

    Raises:
        ValueError: a setting that changes memory and is not modelled.
    """
    from qwen3vl_bridge.planning.from_config import plan_of

    return plan_of(_for_gpus(finalised(cfg, world_size)), world_size)


def _for_gpus(complete: ConfigContainer) -> ConfigContainer:
    """A completed configuration, with the layers that it would have on GPUs."""
    complete.model.transformer_impl = "transformer_engine"
    return complete


def dump(cfg: ConfigContainer, *, gpus: int, gpu: str) -> dict[str, Any]:
    """For JSON output: settings, and the memory plan in bytes or why there is none."""
    from qwen3vl_bridge.planning.from_config import plan_of
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.plan_reports import dump_estimate

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
    """Print the settings as YAML, then the plan: memory, and the planner's first split for these rows and GPUs."""
    from qwen3vl_bridge.planning.from_config import plan_of, proposals_for_run
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.plan_reports import describe_first, print_estimate

    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    kind, complete = gpu_of(gpu), finalised(cfg, gpus)
    print(dump_dataclass_to_yaml(complete.to_dict()))
    try:
        plan = plan_of(_for_gpus(complete), gpus)
    except ValueError as error:
        print(f"memory cannot be estimated: {error}")
        return
    print_estimate(plan, kind.memory_bytes)
    try:
        print(describe_first(proposals_for_run(complete, plan, kind)))
    except ValueError as error:
        print(error)

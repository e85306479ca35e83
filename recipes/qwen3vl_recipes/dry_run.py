"""The dry run: what a run on a number of GPUs would do: its settings, memory, data, and what it writes."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
    from qwen3vl_bridge.training.callbacks import callbacks_of

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
        callbacks_of(cfg)
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


def dump(cfg: ConfigContainer, *, title: str, from_scratch: bool, gpus: int, gpu: str) -> dict[str, Any]:
    """For JSON output: the summary, settings, and the memory plan in bytes or why there is none; as `show`."""
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.plan_reports import dump_estimate

    import yaml
    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    complete = finalised(cfg, gpus)
    settings = yaml.safe_load(dump_dataclass_to_yaml(complete.to_dict()))
    plan, said = _summary(cfg, complete, title, from_scratch, gpus, gpu)
    return {
        "summary": said,
        "settings": settings,
        "plan": None if plan is None else dump_estimate(plan, gpu_of(gpu).memory_bytes),
        "no_plan": said["memory"] if plan is None else None,
    }


def show(cfg: ConfigContainer, *, title: str, from_scratch: bool, gpus: int, gpu: str, full: bool) -> None:
    """Print what the run would do, under a title; in `full`, all settings as YAML and the memory of each stage before.

    Raises:
        ValueError, AssertionError: as `finalised`.
        DataError: data that are there and cannot be trained on.
    """
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.plan_reports import print_estimate
    from qwen3vl_bridge.terminal import show as show_text

    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    complete = finalised(cfg, gpus)
    if full:
        show_text(dump_dataclass_to_yaml(complete.to_dict()))
    plan, said = _summary(cfg, complete, title, from_scratch, gpus, gpu)
    if full and plan is not None:
        print_estimate(plan, gpu_of(gpu).memory_bytes)
    show_text("\n".join(f"{name:11} {text}" for name, text in said.items()))
    if not full:
        show_text("(--full shows all settings, and the memory of each stage)")


def _summary(
    cfg: ConfigContainer, complete: ConfigContainer, title: str, from_scratch: bool, gpus: int, gpu: str
) -> tuple[MemoryEstimate | None, dict[str, str]]:
    """The plan of a run's memory if there is one, and a line on each thing that a person asks about a run."""
    from qwen3vl_bridge.planning.from_config import plan_of, proposals_for_run, splits_of
    from qwen3vl_bridge.planning.hardware import gpu_of
    from qwen3vl_bridge.planning.plan_reports import (
        describe_first,
        describe_fit,
        describe_saving,
        describe_splits,
        describe_training,
    )

    kind, plan = gpu_of(gpu), None
    said = {"recipe": title, "model": _model(complete), "weights": _weights(complete, from_scratch)}
    try:
        said["split"] = f"{gpus} x {gpu}: {describe_splits(*splits_of(complete, gpus))}"
        plan = plan_of(_for_gpus(complete), gpus)
    except ValueError as error:
        said["memory"] = f"cannot be estimated: {error}"
    else:
        said["split"] += f"; {describe_training(plan.training)}"
        said["memory"], said["host"] = describe_fit(plan, kind.memory_bytes), describe_saving(plan)
        try:
            said["proposed"] = describe_first(proposals_for_run(complete, plan, kind), kind.memory_bytes, plan)
        except ValueError as error:
            said["proposed"] = str(error)
    return plan, said | _schedule(complete) | _data(cfg, complete) | _written(complete)


def _model(cfg: ConfigContainer) -> str:
    from qwen3vl_bridge.planning.model_states import chunk_count
    from qwen3vl_bridge.planning.split import ModelSplit
    from qwen3vl_bridge.weights.rows import Part

    model, dims, whole = cfg.model, cfg.model.dimensions(), ModelSplit(1)
    number = chunk_count(dims, whole, whole.chunks(len(dims.indices["text_layers"]))[0][0]).total()
    frozen = [part.value for part in Part if getattr(model, f"freeze_{part.value}")]
    trained = f"{', '.join(frozen)} frozen" if frozen else "all trained"
    if cfg.peft is not None:
        trained = f"{type(cfg.peft).__name__.removeprefix('Qwen3VL')} of rank {cfg.peft.dim} trained"
    size = f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
    return f"{model.hf_model_id}: {size} parameters, {model.num_layers} layers of width {model.hidden_size}; {trained}"


def _weights(cfg: ConfigContainer, from_scratch: bool) -> str:
    from qwen3vl_bridge.checkpoint.formats.huggingface import has_weights
    from qwen3vl_bridge.checkpoint.formats.megatron import TRACKER
    from qwen3vl_bridge.checkpoint.stored_models import open_model
    from qwen3vl_bridge.planning.hardware import GIB

    tracker = Path(cfg.checkpoint.load or "", TRACKER)
    if cfg.checkpoint.load and tracker.is_file():
        return f"of {cfg.checkpoint.load}, a run that is continued after step {tracker.read_text().strip()}"
    if from_scratch:
        return "random"
    path = cfg.checkpoint.pretrained_checkpoint or cfg.model.hf_model_id
    if path is None or not has_weights(Path(path)):
        return f"of {path}"
    model = open_model(path, trust_remote_code=True)
    model.check()
    size = sum(spec.nbytes for spec in model.tensors.specs.values())
    return f"of {path}: {len(model.tensors.specs):,} tensors of {size / GIB:.3g} GiB, as its config.json requires"


def _data(cfg: ConfigContainer, complete: ConfigContainer) -> dict[str, str]:
    """The samples and rows of a run's data, of which the first window is measured, and how many epochs it has."""
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
    from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
    from qwen3vl_bridge.data.sources import expect_data
    from qwen3vl_bridge.io.files import CheckpointError

    data, length = complete.dataset, complete.dataset.seq_length
    if not isinstance(data, Qwen3VLConversationProvider):
        return {"data": f"of a {type(data).__name__}, not opened"}
    if all(getattr(cfg.dataset, name) is None for name in ("path", "train_path", "mixture")):
        return {"data": "none yet: --data-path"}
    paths = data._paths("train")
    if data.streaming or any(path.startswith("hf://") for path in paths):
        return {"data": f"{', '.join(paths)}, of the hub and not opened"}
    try:
        for path in paths:
            expect_data("the training data", path)
    except ValueError as error:
        return {"data": f"not opened: {error}"}
    found = {"data": f"{', '.join(paths)}: {len(data._source('train', data.seed)):,} samples"}  # pyright: ignore
    try:
        folder = str(find_model(data.hf_processor_path, weights=False))
    except CheckpointError as error:
        return found | {"rows": f"not counted, because no sample could be measured: {error}"}
    data = dataclasses.replace(data, hf_processor_path=folder)
    data.check_samples(complete.model.context_parallel_size)
    epoch = data.shared_by(complete.model.context_parallel_size).rows("train").epoch()
    assert epoch is not None  # it is no stream
    about, of_epoch = "" if epoch.is_counted else "about ", epoch.rows / complete.train.global_batch_size
    full = epoch.tokens / epoch.rows / length
    return found | {
        "rows": f"{about}{epoch.rows:,.0f} an epoch, {full:.0%} full, with {about}{epoch.tokens:,.0f} tokens",
        "epochs": f"{about}{complete.train.train_iters / of_epoch:,.3g} of {of_epoch:,.4g} steps each",
    }


def _schedule(cfg: ConfigContainer) -> dict[str, str]:
    train, optimizer, schedule, checks = cfg.train, cfg.optimizer, cfg.scheduler, cfg.validation
    has_valid = getattr(cfg.dataset, "path_of", lambda split: None)("valid") is not None
    every = f"every {checks.eval_interval} steps, {checks.eval_iters} times {train.global_batch_size} rows"
    return {
        "steps": f"{train.train_iters:,} of {train.global_batch_size} rows of {cfg.dataset.seq_length:,} tokens",
        "rate": f"{optimizer.lr:g} after {schedule.lr_warmup_steps // train.global_batch_size} steps, then "
        f"{schedule.lr_decay_style} to {optimizer.min_lr:g}",
        "validation": every if checks.eval_iters and has_valid else "none",
    }


def _written(cfg: ConfigContainer) -> dict[str, str]:
    from qwen3vl_bridge.io.atomic import free_space
    from qwen3vl_bridge.planning.from_config import checkpoint_bytes, checkpoints_of
    from qwen3vl_bridge.planning.hardware import GIB

    settings = cfg.checkpoint
    if not settings.save:
        return {"writes": "nothing yet: --save"}
    (saves, kept), free = checkpoints_of(cfg), free_space(Path(settings.save, "iter"))
    number = f"{saves} checkpoint{'s' * (saves > 1)}"
    try:
        each = checkpoint_bytes(cfg)
    except ValueError as error:
        return {"writes": f"{settings.save}: {number}, {kept} of them kept", "disk": str(error)}
    most = each * (kept + (saves > kept))  # the oldest is removed once the newest is complete
    return {
        "writes": f"{settings.save}: metrics.jsonl, tensorboard, {number} of {each / GIB:.3g} GiB, the last "
        f"{kept} kept",
        "disk": f"{'enough' if most <= free else 'TOO LITTLE'}: {most / GIB:.3g} GiB needed, {free / GIB:.3g} GiB free",
    }

"""Describe the settings, memory, data and output of a run without starting it, and find errors that would end it."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.planning.hardware import find_gpu

if TYPE_CHECKING:
    from qwen3vl_bridge.planning.estimate import MemoryEstimate

    from megatron.bridge.training.config import ConfigContainer

_DATA = "(dataset.path is not set)"
# The planner's sum of tensors may exceed what torch allocates by this factor. The largest measured factor is 1.04,
# under Megatron-FSDP (docs/scaling.md).
_OVERESTIMATE = 1.05
# Release of Transformer Engine to assume on a machine without it, when a configuration is finalized.
_TRANSFORMER_ENGINE = "2.16.1"
_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model")


def finalize_copy(cfg: ConfigContainer, world_size: int) -> ConfigContainer:
    """Return a copy of a configuration, completed and checked as in a run before it builds the model.

    No process group is created. Data and initial weights need not exist.

    Args:
        cfg: configuration of a run, which is not changed.
        world_size: number of ranks.

    Raises:
        ValueError, AssertionError: settings contradict each other or the number of ranks, or torch.distributed is
            initialized with another number of processes.
    """
    from qwen3vl_bridge.training.callbacks import build_callbacks
    from qwen3vl_bridge.upstream.transformer_engine_version import with_transformer_engine

    import torch
    from megatron.bridge.training.config import runtime_config_update

    if torch.distributed.is_initialized() and torch.distributed.get_world_size() != world_size:
        raise ValueError(
            f"torch.distributed already runs with {torch.distributed.get_world_size()} processes, expected {world_size}"
            " (world_size): call torch.distributed.destroy_process_group() first, or set world_size to the number of "
            "processes"
        )
    cfg = copy.deepcopy(cfg)
    if all(getattr(cfg.dataset, name, "") is None for name in ("path", "train_path", "mixture")):
        cfg.dataset.path = _DATA
    weights = cfg.checkpoint.pretrained_checkpoint
    has_te_layers = cfg.model.transformer_impl == "transformer_engine"
    release = with_transformer_engine(_TRANSFORMER_ENGINE) if has_te_layers else nullcontext()
    with _first_of(world_size), release, tempfile.TemporaryDirectory() as folder:
        if weights is None or not os.path.isdir(weights):
            cfg.checkpoint.pretrained_checkpoint = folder  # Megatron-Bridge checks that the folder exists
        build_callbacks(cfg)
        runtime_config_update(cfg)
    cfg.checkpoint.pretrained_checkpoint = weights
    return cfg


@contextmanager
def _first_of(size: int) -> Iterator[None]:
    """Set WORLD_SIZE and RANK as torchrun does for rank 0 of `size` processes, inside the `with` block."""
    before = dict(os.environ)
    os.environ |= {"WORLD_SIZE": str(size), "RANK": "0"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def estimate_memory(cfg: ConfigContainer, world_size: int) -> MemoryEstimate:
    """Return the estimated memory of each rank on GPUs with Transformer Engine.

    Raises:
        ValueError: the planner does not support a setting, or `finalize_copy` rejects it.
        AssertionError: `finalize_copy` rejects a setting.
    """
    from qwen3vl_bridge.planning.from_config import estimate_run

    complete = finalize_copy(cfg, world_size)
    complete.model.transformer_impl = "transformer_engine"  # the layers of a run on GPUs
    return estimate_run(complete, world_size)


@contextmanager
def collect_error(errors: list[str], *, verbose: bool = False) -> Iterator[None]:
    """Append the message of an error inside the `with` block to `errors`, without duplicates, instead of raising it."""
    from qwen3vl_bridge.data.errors import DataError

    try:
        yield
    except (ValueError, AssertionError, OSError, ModuleNotFoundError) as error:
        if verbose:
            traceback.print_exc()
        message = str(error.without_traceback() if isinstance(error, DataError) else error) or repr(error)
        if message not in errors:
            errors.append(message)


@dataclasses.dataclass
class DryRunReport:
    """The results of a dry run.

    Attributes:
        errors: messages of the errors that would end the run.
        summary: title -> line about the run; empty if the configuration cannot be completed.
        plan: estimated memory; None if it cannot be estimated.
        settings: all settings, as YAML.
    """

    errors: list[str]
    summary: dict[str, str] = dataclasses.field(default_factory=dict)
    plan: MemoryEstimate | None = None
    settings: str = ""


def examine_run(
    cfg: ConfigContainer,
    report: DryRunReport,
    *,
    title: str,
    from_scratch: bool,
    gpus: int,
    gpu: str | None,
    proposes: bool,
) -> None:
    """Add a description of the run and its errors to the report.

    Args:
        cfg: configuration of the run, which is not changed.
        report: the report to extend, with the errors that earlier checks have found.
        title: first line of the summary.
        from_scratch: True if the run begins with random weights.
        gpus: number of processes.
        gpu: kind of GPU; None for a CPU, for which memory is not estimated.
        proposes: propose other parallel layouts even if the run fits into the memory of the GPUs.
    """
    from megatron.bridge.utils.yaml_utils import dump_dataclass_to_yaml

    errors, complete = report.errors, None
    with collect_error(errors):
        complete = finalize_copy(cfg, gpus)
    _check_layout(cfg, complete, gpus, errors)
    with collect_error(errors):
        _check_folders(cfg, errors)
    if complete is None:
        with collect_error(errors):
            _describe_data(cfg, cfg)
        return
    report.settings = dump_dataclass_to_yaml(complete.to_dict())
    report.summary = {"recipe": title, "model": _describe_model(complete)}
    with collect_error(errors):
        report.summary["weights"] = _describe_weights(complete, from_scratch)
    with collect_error(errors):
        report.summary |= _describe_objective(complete)
    with collect_error(errors):
        report.plan, lines = _describe_memory(complete, gpus, gpu, proposes=proposes)
        report.summary |= lines
        if report.plan is not None and gpu and _exceeds(report.plan, find_gpu(gpu).memory_bytes):
            raise ValueError(
                f"the memory of one {gpu} does not suffice: {lines['memory']}. Rows are estimated as full of images, "
                "unless dataset.max_patches limits them; use more GPUs, recompute more (model.recompute_granularity), "
                f"or shorten rows; {lines['proposed']}"
            )
    with collect_error(errors):
        report.summary |= _describe_linear_attention(complete, gpus)
    report.summary |= _describe_schedule(complete, gpu)
    with collect_error(errors):
        report.summary |= _describe_data(cfg, complete)
    report.summary |= _describe_output(complete)


def _check_layout(cfg: ConfigContainer, complete: ConfigContainer | None, gpus: int, errors: list[str]) -> None:
    """Append errors in the number of GPUs, the batch size and the parallel sizes to `errors`.

    Validation of a configuration ends at its first error. To find further errors, repeat the validation with a number
    of GPUs and a batch size that fit the parallel sizes.
    """
    from qwen3vl_bridge.config.model_validation import check_world
    from qwen3vl_bridge.planning.from_config import read_layouts
    from qwen3vl_bridge.training.run_validation import microbatches_per_rank

    model = cfg.model
    with collect_error(errors):
        check_world(model, gpus)
        layout, vision = read_layouts(complete or cfg, gpus)
        dims = model.dimensions()
        dataclasses.replace(layout, vision=vision is None).check(dims)
        if vision is not None:
            vision.check_vision(dims)
    if complete is not None or model.dist_train.use_dist_train:
        return
    sizes = {name: getattr(model, f"{name}_parallel_size") or 1 for name in _SIZES}
    tp, pp, cp, ep = sizes.values()
    if gpus % (tp * pp * cp) == 0:
        with collect_error(errors):
            microbatches_per_rank(cfg, gpus // (tp * pp * cp))
    repaired = copy.deepcopy(cfg)
    ranks = math.lcm(tp * pp * cp, (model.expert_tensor_parallel_size or 1) * ep * pp)
    repaired.train.global_batch_size = repaired.train.micro_batch_size * ranks // (tp * pp * cp) * pp
    if getattr(repaired.dataset, "balance_over", None) is not None:
        repaired.dataset.balance_over = repaired.train.global_batch_size
    with collect_error(errors):
        finalize_copy(repaired, ranks)


def _check_folders(cfg: ConfigContainer, errors: list[str]) -> None:
    """Raise ValueError if the weights do not exist, or the folder of the run cannot be written to or is in use.

    Weights that a message in `errors` names are not checked again.
    """
    from qwen3vl_bridge.core.atomic import disk_of
    from qwen3vl_bridge.training.run_lock import check_not_locked

    weights, save = cfg.checkpoint.pretrained_checkpoint, cfg.checkpoint.save
    is_known = any(str(weights) in error for error in errors)  # the check of --pretrained-checkpoint has reported it
    if weights and not is_known and "://" not in str(weights) and not Path(weights).is_dir():
        raise ValueError(f"checkpoint.pretrained_checkpoint is {weights}: there is no such folder")
    if not save or "://" in str(save):
        return
    near = Path(save) if Path(save).exists() else disk_of(Path(save))
    if not near.is_dir() or not os.access(near, os.W_OK | os.X_OK):
        raise ValueError(
            f"checkpoint.save is {save}, but {near} is {'not writable' if near.is_dir() else 'a file'}: use a folder "
            "that this user may write to"
        )
    check_not_locked(Path(save))


def report_as_json(report: DryRunReport, gpu: str | None) -> dict[str, Any]:
    """Return the report as values for JSON. Memory is in bytes; `no_plan` says why memory was not estimated."""
    from qwen3vl_bridge.planning.plan_reports import dump_estimate

    import yaml

    plan = report.plan
    return {
        "errors": report.errors,
        "summary": report.summary,
        "settings": yaml.safe_load(report.settings),
        "plan": None if plan is None or gpu is None else dump_estimate(plan, find_gpu(gpu).memory_bytes),
        "no_plan": report.summary.get("memory") if plan is None else None,
    }


def show_report(report: DryRunReport, gpu: str | None, *, full: bool) -> None:
    """Print the report, with errors last. With `full`, begin with all settings as YAML and the memory of each stage."""
    from qwen3vl_bridge.planning.plan_reports import print_estimate
    from qwen3vl_bridge.terminal import show, show_error

    if full and report.settings:
        show(report.settings)
    if full and report.plan is not None and gpu is not None:
        print_estimate(report.plan, find_gpu(gpu).memory_bytes)
    if report.summary:
        show("\n".join(f"{name:11} {text}" for name, text in report.summary.items()))
        if not full:
            show("(--full shows all settings, and the memory of each stage)")
    if len(report.errors) == 1:
        show_error(report.errors[0])
    elif report.errors:
        lines = (f"{number}. {error}" for number, error in enumerate(report.errors, 1))
        show_error("the run would fail:\n" + "\n".join(lines))


def _describe_memory(
    complete: ConfigContainer, gpus: int, gpu: str | None, *, proposes: bool
) -> tuple[MemoryEstimate | None, dict[str, str]]:
    """Return the memory estimate, and the summary lines about parallelism and memory by title.

    The estimate is None if the planner does not support the run.
    """
    from qwen3vl_bridge.planning.from_config import estimate_run, propose_for_run, read_layouts
    from qwen3vl_bridge.planning.plan_reports import (
        describe_first,
        describe_fit,
        describe_layouts,
        describe_saving,
        describe_training,
    )

    layouts = describe_layouts(*read_layouts(complete, gpus))
    if gpu is None:
        return None, {
            "parallelism": "one process on a CPU" if gpus == 1 else f"{gpus} processes on CPUs: {layouts}",
            "memory": "not estimated for a CPU; --gpu KIND estimates it for a GPU",
        }
    kind, lines = find_gpu(gpu), {"parallelism": f"{gpus} x {gpu}: {layouts}"}
    try:
        complete.model.transformer_impl = "transformer_engine"  # the layers of a run on GPUs
        plan = estimate_run(complete, gpus)
    except ValueError as error:  # the planner does not support the run
        return None, lines | {"memory": f"cannot be estimated: {error}"}
    bits = "counted in 8 bits" if plan.training.fp8 else "in 16 bits" if complete.model.bf16 else "in 32 bits"
    lines["parallelism"] += f"; {describe_training(plan.training)}"
    fit = describe_fit(plan, kind.memory_bytes, is_certain=_exceeds(plan, kind.memory_bytes))
    lines["memory"] = f"{fit}; linear layers {bits}"
    lines["host"] = describe_saving(plan)
    fits = plan.peak.total <= kind.memory_bytes
    if fits and not proposes:
        return plan, lines
    try:
        proposals = propose_for_run(complete, plan, kind)
        lines["proposed"] = describe_first(proposals, kind.memory_bytes, plan)
    except ValueError as error:
        return plan, lines | {"proposed": str(error)}
    if proposals and fits:
        ranks, least = (one.layout.tp * one.layout.pp * one.layout.cp for one in (plan, proposals[0]))
        lines["proposed"] += (
            f". The run has {ranks} model-parallel ranks, the first layout {least}. Layouts with the fewest ranks come "
            "first, and layouts with experts on several machines last; speed is not estimated"
        )
    return plan, lines


def _exceeds(plan: MemoryEstimate, memory: int) -> bool:
    """Return True if the tensors of a run certainly exceed the memory of a GPU, even without the planner's reserve."""
    return max(stage.allocated for stage in plan.stages) > _OVERESTIMATE * memory


def _describe_model(cfg: ConfigContainer) -> str:
    from qwen3vl_bridge.planning.model_states import count_parameters
    from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
    from qwen3vl_bridge.weights.rows import Component

    model, dims, unsharded = cfg.model, cfg.model.dimensions(), ParallelLayout(1)
    number = count_parameters(dims, unsharded, unsharded.chunks(len(dims.indices["text_layers"]))[0][0]).total()
    frozen = [component.value for component in Component if getattr(model, f"freeze_{component.value}")]
    trained = f"{', '.join(frozen)} frozen" if frozen else "all trained"
    if cfg.peft is not None:
        trained = f"{type(cfg.peft).__name__.removeprefix('Qwen3VL')} of rank {cfg.peft.dim} trained"
    size = f"{number / 1e9:.3g} billion" if number >= 1e9 else f"{number / 1e6:.3g} million"
    return f"{model.hf_model_id}: {size} parameters, {model.num_layers} layers of width {model.hidden_size}; {trained}"


def _describe_weights(cfg: ConfigContainer, from_scratch: bool) -> str:
    from qwen3vl_bridge.checkpoint.formats.huggingface import has_weights
    from qwen3vl_bridge.checkpoint.formats.megatron import TRACKER
    from qwen3vl_bridge.checkpoint.stored_models import open_model
    from qwen3vl_bridge.terminal import in_bytes

    tracker = Path(cfg.checkpoint.load or "", TRACKER)
    if cfg.checkpoint.load and tracker.is_file():
        return f"from {cfg.checkpoint.load}, a run that is continued after step {tracker.read_text().strip()}"
    if from_scratch:
        return "random"
    path = cfg.checkpoint.pretrained_checkpoint or cfg.model.hf_model_id
    if path is None or not has_weights(Path(path)):
        return f"from {path}"
    model = open_model(path, trust_remote_code=True)
    model.check()
    size = sum(spec.nbytes for spec in model.tensors.specs.values())
    return f"from {path}: {len(model.tensors.specs):,} tensors of {in_bytes(size)}, as its config.json requires"


def _describe_objective(cfg: ConfigContainer) -> dict[str, str]:
    """Return a summary line about the objective, by title; {} for supervised training.

    Raises:
        ValueError: log-probabilities of the reference model are missing, or were computed by another model.
    """
    from qwen3vl_bridge.training.objective_settings import objective_of
    from qwen3vl_bridge.training.reference_scores import check_reference_model

    if (settings := objective_of(cfg)) is None:
        return {}
    used = ", ".join(f"{name} {value}" for name, value in settings.used().items() if value is not None)
    if not settings.needs_reference:
        return {"objective": f"{settings.kind}: {used}" if used else settings.kind}
    check_reference_model(cfg)
    reference = settings.reference_logps or "the model without its adapters"
    return {"objective": f"{settings.kind}: {used}; reference: {reference}"}


def _describe_data(cfg: ConfigContainer, complete: ConfigContainer) -> dict[str, str]:
    """Return summary lines about samples, rows and epochs, by title.

    If the data set has several packing windows and was not packed before training, rows and epochs are estimated from
    the token lengths of the first packing window.

    Raises:
        ValueError: the data cannot be read, or no sample can be trained on.
    """
    from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
    from qwen3vl_bridge.core.files import CheckpointError
    from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
    from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

    from qwen3vl_recipes.paths import evaluated_rows

    data, length = complete.dataset, complete.dataset.seq_length
    if not isinstance(data, Qwen3VLConversationProvider):
        return {"data": f"{type(data).__name__}, not opened"}
    if isinstance(complete, Qwen3VLConfigContainer):  # which may not be complete
        complete.apply_objective()
    kind = "samples" if data.objective == "sft" else "records"
    if all(getattr(cfg.dataset, name) is None for name in ("path", "train_path", "mixture")):
        return {"data": "none yet: --data-path"}
    paths = [*dict.fromkeys(data.paths_of("train"))]
    if data.streaming or any(path.startswith("hf://") for path in paths):
        return {"data": f"{', '.join(paths)}, on the hub, not opened"}
    data.check_paths()
    lines = {"data": f"{', '.join(paths)}: {len(data.open_split('train', data.seed)):,} {kind}"}  # pyright: ignore
    try:
        folder = str(find_model(data.hf_processor_path, weights=False))
    except CheckpointError as error:
        return lines | {"rows": f"not counted, because no sample could be measured: {error}"}
    data = dataclasses.replace(data, hf_processor_path=folder)
    data.check_samples(complete.model.context_parallel_size, evaluated_rows(complete))
    epoch = data.for_context_parallel(complete.model.context_parallel_size).rows("train").epoch()
    assert epoch is not None  # the data set is not streamed
    about, of_epoch = "" if epoch.is_counted else "about ", epoch.rows / complete.train.global_batch_size
    full = epoch.tokens / epoch.rows / length
    return lines | {
        "rows": f"{about}{epoch.rows:,.0f} an epoch, {full:.0%} full, with {about}{epoch.tokens:,.0f} tokens",
        "epochs": f"{about}{complete.train.train_iters / of_epoch:,.3g} of {of_epoch:,.4g} steps each",
    }


def _describe_linear_attention(cfg: ConfigContainer, gpus: int) -> dict[str, str]:
    """Return a summary line about the bytes that a rank sends in a layer with linear attention, by title.

    Return {} if the model has no such layers, or if the run has no context parallelism.
    """
    from qwen3vl_bridge.config.divisibility import CHUNKWISE, HEADWISE
    from qwen3vl_bridge.planning.from_config import read_layouts
    from qwen3vl_bridge.planning.linear_traffic import bytes_sent
    from qwen3vl_bridge.terminal import in_bytes

    layout, dims = read_layouts(cfg, gpus)[0], cfg.model.dimensions()
    if layout.cp == 1 or not dims.indices.get("linear_layers"):
        return {}
    tokens = cfg.dataset.seq_length / layout.cp
    row, document = (
        in_bytes(bytes_sent(dims, layout, mode, tokens=tokens, segments=1)) for mode in (HEADWISE, CHUNKWISE)
    )
    if layout.exchanges_states(dims):
        text = f"chunkwise: in a layer's forward pass a rank sends {document} per document (headwise: {row} per row)"
    else:
        text = f"headwise: in a layer's forward pass a rank sends {row} per row (chunkwise: {document} per document)"
    return {"linear attn": f"model.linear_cp_mode {text}"}


def _describe_schedule(cfg: ConfigContainer, gpu: str | None) -> dict[str, str]:
    from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider

    train, optimizer, schedule, checks = cfg.train, cfg.optimizer, cfg.scheduler, cfg.validation
    paths = cfg.dataset.paths_of("valid") if isinstance(cfg.dataset, Qwen3VLConversationProvider) else []
    every = f"every {checks.eval_interval} steps, {checks.eval_iters} times {train.global_batch_size} rows"
    return {
        "steps": f"{train.train_iters:,} of {train.global_batch_size} rows of {cfg.dataset.seq_length:,} tokens",
        "rate": f"{optimizer.lr:g} after {schedule.lr_warmup_steps // train.global_batch_size} steps, then "
        f"{schedule.lr_decay_style} to {optimizer.min_lr:g}",
        "validation": f"{every} of {', '.join(dict.fromkeys(paths))}" if checks.eval_iters and paths else "none",
        "accuracy": _accuracy(cfg),
        "duration": f"unknown until {'a GPU' if gpu else 'this machine'} has measured it; from the second step on, "
        "a run shows the time left",
    }


def _accuracy(cfg: ConfigContainer) -> str:
    settings = getattr(cfg, "accuracy", None)
    if settings is None or settings.path is None:
        return "not measured; accuracy.path=FILE generates answers at each validation and compares them"
    return (
        f"of greedy answers to {settings.samples} conversations of {settings.path} at each validation "
        f"(accuracy.metric={settings.metric})"
    )


def _describe_output(cfg: ConfigContainer) -> dict[str, str]:
    from qwen3vl_bridge.core.atomic import free_space
    from qwen3vl_bridge.planning.from_config import checkpoint_bytes, count_checkpoints
    from qwen3vl_bridge.terminal import in_bytes

    settings = cfg.checkpoint
    if not settings.save:
        return {"writes": "nothing yet: --save"}
    (saves, kept), free = count_checkpoints(cfg), free_space(Path(settings.save, "iter"))
    number = f"{saves} checkpoint{'s' * (saves > 1)}"
    try:
        each = checkpoint_bytes(cfg)
    except ValueError as error:
        return {"writes": f"{settings.save}: {number}, {kept} of them kept", "disk": str(error)}
    most = each * (kept + (saves > kept))  # the oldest checkpoint is removed once the newest is complete
    return {
        "writes": f"{settings.save}: metrics.jsonl, tensorboard, {number} of {in_bytes(each)}, the last {kept} kept",
        "disk": f"{'enough' if most <= free else 'TOO LITTLE'}: {in_bytes(most)} needed, {in_bytes(free)} free",
    }

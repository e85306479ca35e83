"""Compute speed, utilization, gradient norms and expert load of a run for its log.

The forward step counts tokens, images and patches of each microbatch on the host (`count_microbatch`). `Metrics` sums
the counts over ranks when a step is logged. Expert load is counted only in steps that are logged.
"""

from __future__ import annotations

import logging
import re
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, NamedTuple, Self

from qwen3vl_bridge.config.flops import TowerCosts, model_costs, trained_parts
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import max_over_ranks, sum_over_data_parallel, sum_over_ranks
from qwen3vl_bridge.data.packing import SetCounts, merge_counts
from qwen3vl_bridge.models.common.moe import metrics_index, metrics_size
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.peft.lora import Qwen3VLAdapters
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.training.objective_settings import objective_of
from qwen3vl_bridge.training.run_log import COMPONENT_NORMS, finished_step, publish_metrics
from qwen3vl_bridge.training.run_validation import microbatches_per_rank
from qwen3vl_bridge.upstream.flops_counters import add_operations
from qwen3vl_bridge.weights.rows import Component

import torch
from megatron.bridge.peft.lora_layers import LoRATopKRouter
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_METER = "qwen3vl_meter"
# GPUs with these words in their names are slower than `GPUS` says: other boards, and MIG slices.
_SLOWER = {"PCIE", "NVL", "MIG"}
# Type of a balancing loss -> megatron-core's name of the loss in logs.
_BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}


class Metrics(Callback):
    """Callback that computes metrics every `logger.log_interval` steps.

    Rates, such as tokens per second, are means over these steps, without the time of evaluations and checkpoints. Other
    metrics describe only the last of these steps, so that a resumed run logs the same values. Tokens and FLOPs exclude
    padding; FLOPs also exclude recomputation.
    """

    def __init__(self) -> None:
        self._interval, self._seconds, self._since = BatchCounts(), 0.0, None
        self._load: ExpertLoad | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Compute the FLOPs per token and patch, and look up the peak FLOP/s of the device."""
        self.cfg = context.state.cfg
        self._groups: ProcessGroupCollection = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._costs = step_costs(self.cfg)
        on_gpu = torch.cuda.is_available()
        self._peak = peak_flops(torch.cuda.get_device_name()) if on_gpu else None
        self._excluded = ExcludedSamples(self.cfg.dataset)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock. If this step will be logged, count the tokens that are routed to each expert."""
        if self._since is None:
            self._since = time.perf_counter()
        is_logged = (context.state.train_state.step + 1) % self.cfg.logger.log_interval == 0
        if is_logged and self.cfg.model.moe_layers:
            self._load = ExpertLoad(context.model)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the counts of the step to the interval. At the end of an interval, publish its metrics."""
        step = get_meter(context.state).reset()
        self._interval += step
        if finished_step(context) % self.cfg.logger.log_interval:
            self._tick()
            return
        publish_metrics(context, self._compute_metrics(context, step))

    def on_eval_start(self, context: CallbackContext) -> None:
        """Stop the clock until the next step."""
        self._since = None

    on_checkpoint_save = on_eval_start

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _compute_metrics(self, context: CallbackContext, step: BatchCounts) -> dict[str, float]:
        meter, count = get_meter(context.state), len(BatchCounts._fields)
        excluded = [*self._excluded.pad_counts(meter.newly_dropped), *self._excluded.pad_counts(meter.unreadable)]
        own = (*self._interval, *step, *excluded)
        sums = sum_over_data_parallel(own, self._groups)  # synchronizes with the device
        self._tick()
        interval, step, lost = BatchCounts(*sums[:count]), BatchCounts(*sums[count : 2 * count]), sums[2 * count :]
        if torch.cuda.is_available():
            memory = torch.cuda.max_memory_allocated()
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory, *dropped = max_over_ranks([memory, *self._excluded.pad_counts(meter.dropped)])
        newly_dropped, unreadable = lost[: len(dropped)], lost[len(dropped) :]
        totals = self._excluded.to_metrics([*map(sum, zip(dropped, newly_dropped, strict=True))], unreadable)
        if torch.distributed.get_rank() == 0:
            self._excluded.warn(totals, finished_step(context))
        norms = context.user_state.get(COMPONENT_NORMS) or {}
        metrics = {
            "tokens": step.tokens,
            "images": step.images,
            "video_frames": step.video_frames,
            "filled": step.tokens / max(step.slots, 1),
            "tokens_per_second": interval.tokens / self._seconds,
            "images_per_second": interval.images / self._seconds,
            "memory_gb": memory / 1e9,
            **totals,
            **{f"grad_norm_{part}": float(norm) for part, norm in norms.items()},
        }
        if self._costs is not None:
            sizes = {name: getattr(interval, name) for name in ("tokens", "token_pairs", "patches", "patch_pairs")}
            each = self._costs.count_flops(**sizes) / self._seconds / torch.distributed.get_world_size()
            metrics |= {"tflops_per_gpu": each / 1e12} | ({} if self._peak is None else {"mfu": each / self._peak})
        if self._load is not None:
            metrics |= self._load.compute_metrics(self.cfg)
            self._load = None
        self._interval, self._seconds = BatchCounts(), 0.0
        return metrics


class BatchCounts(NamedTuple):
    """Numbers of tokens, patches, images and rows in one or more microbatches. Instances can be added."""

    tokens: int = 0  # without padding
    trained_tokens: int = 0  # tokens in the loss
    slots: int = 0  # tokens including padding
    token_pairs: int = 0  # sum over segments of the squared number of tokens
    patches: int = 0  # of all images and videos
    patch_pairs: int = 0  # sum over frames of the squared number of patches
    images: int = 0  # without frames of videos
    video_frames: int = 0  # frames in the vision tower; each combines two frames of a video
    rows: int = 0

    @classmethod
    def from_batch(cls, batch: TokenBatch, config: VisionLanguageProvider) -> Self:
        """Return the counts of a single microbatch, which must be on the host."""
        frames, images = batch.vision.lengths if batch.vision is not None else (), 0
        if frames:  # images come first; the number of image tokens tells their number of patches
            of_images = (batch.input_ids.flatten() == config.image_token_id) & (batch.vision_slot >= 0)
            patches = int(of_images.sum()) * config.vision_config.spatial_merge_size**2
            images = sum(end <= patches for end in accumulate(frames))
        return cls(
            tokens=sum(batch.layout.lengths),
            trained_tokens=int(batch.loss_mask.count_nonzero()),
            slots=batch.layout.total,
            token_pairs=sum(length**2 for length in batch.layout.lengths),
            patches=sum(frames),
            patch_pairs=sum(patches**2 for patches in frames),
            images=images,
            video_frames=len(frames) - images,
            rows=batch.layout.num_rows,
        )

    def __add__(self, other: BatchCounts) -> BatchCounts:  # pyright: ignore[reportIncompatibleMethodOverride]
        return BatchCounts(*map(sum, zip(self, other, strict=True)))


@dataclass
class Meter:
    """Counts of this rank's microbatches since the last reset, and numbers of excluded samples.

    `dropped`, `newly_dropped` and `unreadable` are defined in `TokenBatch`.
    """

    amounts: BatchCounts = field(default_factory=BatchCounts)
    dropped: SetCounts = ()  # maximum over microbatches
    newly_dropped: SetCounts = ()  # sum over microbatches
    unreadable: SetCounts = ()  # sum over microbatches

    def add(self, amounts: BatchCounts, batch: TokenBatch) -> None:
        """Add the counts of a microbatch and its numbers of excluded samples."""
        self.amounts += amounts
        self.dropped = merge_counts(max, self.dropped, batch.dropped)
        self.newly_dropped = merge_counts(sum, self.newly_dropped, batch.newly_dropped)
        self.unreadable = merge_counts(sum, self.unreadable, batch.unreadable)

    def reset(self) -> BatchCounts:
        """Return the counts since the last call, and reset them to zero."""
        taken, self.amounts = self.amounts, BatchCounts()
        return taken


def get_meter(state: GlobalState) -> Meter:
    """Return the `Meter` of a run on this rank, and create it at the first call."""
    if not hasattr(state, _METER):
        setattr(state, _METER, Meter())
    return getattr(state, _METER)


def count_microbatch(state: GlobalState, batch: TokenBatch, config: VisionLanguageProvider) -> None:
    """Add a training microbatch on the host to the counts for `Metrics`, and to Megatron-Bridge's FLOP counters."""
    amounts = BatchCounts.from_batch(batch, config)
    get_meter(state).add(amounts, batch)
    count_flops(state, amounts)


def count_flops(state: GlobalState, amounts: BatchCounts) -> None:
    """Add a microbatch to the counters from which Megatron-Bridge computes the FLOPs that it logs."""
    add_operations(
        state,
        tokens=amounts.tokens,
        token_pairs=amounts.token_pairs,
        patches=amounts.patches,
        # `flops.operations_of_a_step` reads patches from the counters of cross attention.
        cross_tokens=amounts.patches,
        cross_pairs=amounts.patch_pairs,
    )


def step_costs(cfg: ConfigContainer) -> TowerCosts | None:
    """Return the FLOPs of a training step per token and per patch; None for adapters of another package."""
    trained, peft = trained_parts(cfg.model), getattr(cfg, "peft", None)
    if peft is None:
        return model_costs(cfg.model.dimensions(), trained)
    if not isinstance(peft, Qwen3VLAdapters):
        return None
    adapters, parts = peft.settings, [component.value for component in Component]
    own: dict[str, Any] = {part: getattr(trained, part) and not getattr(peft, f"freeze_{part}") for part in parts}
    own["rank"] = lambda layer: adapters.dim if adapters.adapts(layer) else 0
    costs = model_costs(cfg.model.dimensions(), replace(trained, **own))
    objective = objective_of(cfg)
    if objective is None or not objective.needs_reference or objective.reference_logps is not None:
        return costs
    return costs.plus(model_costs(cfg.model.dimensions()))  # the forward pass of the reference model


def peak_flops(device: str) -> float | None:
    """Return the peak FLOP/s in bfloat16 of a GPU by its name, such as "NVIDIA A100-SXM4-40GB"; None if unknown."""
    words = set(re.split(r"[\s-]+", device.upper()))
    names = [name for name in GPUS if set(name.upper().split("-")) <= words]
    if not names or words & _SLOWER:
        return None
    return GPUS[max(names, key=len)].bf16_flops


class ExcludedSamples:
    """Computes metrics about samples that training excludes: their number in total and for each dataset.

    - Samples dropped when rows are planned: every process plans the same rows, and each batch contains the total number
      so far. The metric is the maximum over ranks.
    - Samples dropped while a stream or WebDataset is read: each process reads its own share, and each batch contains
      the number of newly dropped samples. The metric is the sum over data-parallel ranks.
    - Unreadable samples: only the rank that reads a row finds them. The metric is the sum over data-parallel ranks.
    """

    def __init__(self, dataset: Any) -> None:
        # Megatron-Bridge's own providers have no mixtures.
        mixture_sets = getattr(dataset, "mixture_sets", None)
        self._names = [one.name for one in mixture_sets("train")] if mixture_sets is not None else []
        self._last_warned = 0

    def pad_counts(self, counts: SetCounts) -> list[int]:
        """Append zeros to `counts` up to one number per dataset, so that the length is the same on every rank."""
        return [*counts, *[0] * (max(len(self._names), 1) - len(counts))]

    def to_metrics(self, dropped: Sequence[float], unreadable: Sequence[int]) -> dict[str, float]:
        """Return the numbers of dropped and unreadable samples by metric name, in total and for each dataset.

        Zeros are omitted.
        """
        metrics = {}
        for kind, counts in (("dropped", dropped), ("unreadable", unreadable)):
            metrics[kind] = int(sum(counts))
            metrics |= {f"{kind}_{name}": int(count) for name, count in zip(self._names, counts, strict=False)}
        return {name: count for name, count in metrics.items() if count}

    def warn(self, metrics: dict[str, float], step: int) -> None:
        """Log a warning if the total number of excluded samples has doubled since the last warning."""
        total = metrics.get("dropped", 0) + metrics.get("unreadable", 0)
        if total and total >= 2 * self._last_warned:
            self._last_warned = total
            counts = ", ".join(f"{name} {count}" for name, count in metrics.items())
            logger.warning("samples excluded from training up to step %d: %s", step, counts)


class ExpertLoad:
    """Counts the tokens routed to each expert, in forward hooks of the routers.

    Counting starts when this object is created, and ends when metrics are computed. Counting does not synchronize with
    the device.
    """

    def __init__(self, model: Sequence[nn.Module]) -> None:
        self._counts: dict[int, Tensor] = {}
        self._device = next(model[0].parameters()).device
        modules = [module for chunk in model for module in chunk.modules()]
        adapted = {module.to_wrap: module for module in modules if isinstance(module, LoRATopKRouter)}
        routers = [adapted.get(module, module) for module in modules if isinstance(module, TopKRouter)]
        self._hooks = [router.register_forward_hook(self._count, with_kwargs=True) for router in routers]
        get_moe_metrics_tracker().clear()

    def _count(self, router: nn.Module, args: tuple, kwargs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return  # a recomputed layer runs again with gradients, and is counted then
        topk = output[1]  # [tokens, E] bool
        padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)  # [s, b] bool, True for padding
        if padding is not None:
            topk = topk & ~padding.reshape(-1, 1)
        layer, count = metrics_index(getattr(router, "to_wrap", router)), topk.sum(0)
        self._counts[layer] = self._counts[layer] + count if layer in self._counts else count

    def compute_metrics(self, cfg: ConfigContainer) -> dict[str, float]:
        """Stop counting and return metrics over the tokens of all ranks.

        Returns:
            `expert_load_max` and `expert_load_mean`: maximum and mean of the load over layers. The load of a layer is
            the number of tokens of its busiest expert divided by the mean number over its experts. Also the balancing
            losses.
        """
        counts = self.count_tokens(cfg.model)
        loads = counts.amax(1) / counts.sum(1).clamp(min=1) * counts.size(1)
        metrics = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
        return metrics | _balancing_losses(cfg)

    def count_tokens(self, config: VisionLanguageProvider) -> Tensor:
        """Stop counting, and return the number of tokens that all ranks have routed to each expert, without padding.

        Returns:
            An int64 tensor [layers with experts, experts].
        """
        for hook in self._hooks:
            hook.remove()
        counts = torch.zeros(metrics_size(config), config.num_moe_experts, dtype=torch.int64, device=self._device)
        for layer, count in self._counts.items():
            counts[layer] += count
        counts = sum_over_ranks(counts)[_layers_with_experts(config)]
        # Without sequence parallelism tensor-parallel ranks have the same tokens.
        return counts if config.sequence_parallel else counts // config.tensor_model_parallel_size


def _balancing_losses(cfg: ConfigContainer) -> dict[str, float]:
    config, tracker, losses = cfg.model, get_moe_metrics_tracker(), {}
    replicas = cfg.data_parallel_size
    microbatches = microbatches_per_rank(cfg, replicas)
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if not coefficient or kind not in _BALANCING_LOSSES:
            continue
        name = _BALANCING_LOSSES[kind]
        tracker.ensure_initialized(name, metrics_size(config))  # a stage without experts has not recorded this loss
        total = sum_over_ranks(tracker.metrics[name].values).sum().item()
        # "aux_loss": each data-parallel rank adds the loss of its microbatches. Otherwise all ranks add up to one loss.
        times = replicas if kind == "aux_loss" else 1
        losses[name] = total / (times * microbatches * len(_layers_with_experts(config)))
    return losses


def _layers_with_experts(config: VisionLanguageProvider) -> list[int]:
    """Return the indices that layers with experts have in megatron-core's tracker of MoE metrics.

    The layer of multi-token prediction is included if it is trained.
    """
    return [*config.moe_layers, *([config.num_layers] if config.trains_mtp else [])]

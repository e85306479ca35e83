"""Speed, utilisation and per-part metrics of a run, for its log, counted from the contents of its microbatches.

The forward step counts microbatches on the host (`count_microbatch`); `Metrics` sums them over ranks when a step's
metrics are logged, and counts experts' tokens in that step.
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

from qwen3vl_bridge.batch import TokenBatch
from qwen3vl_bridge.data.packing.row_plan import SetCounts, merge_counts
from qwen3vl_bridge.models.flops import TowerCosts, model_costs, trained_parts
from qwen3vl_bridge.models.provider import VisionLanguageProvider
from qwen3vl_bridge.models.router import tracked_row, tracked_rows
from qwen3vl_bridge.parallel.collectives import max_of_each, sum_amounts, sum_over_ranks
from qwen3vl_bridge.peft.lora import Qwen3VLParts
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.training.run_log import PART_NORMS, publish, step_of
from qwen3vl_bridge.training.run_refusals import microbatches_of_a_rank
from qwen3vl_bridge.weights.rows import Part

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
# Variants of a GPU's name that are slower than the table's entry: other boards, and parts of a GPU.
_SLOWER = {"PCIE", "NVL", "MIG"}
# Kinds of balancing losses, by the router's log names.
_BALANCING_LOSSES = {"aux_loss": "load_balancing_loss", "global_aux_loss": "global_load_balancing_loss"}


class Metrics(Callback):
    """Computes metrics every `logger.log_interval` steps.

    Rates are means over these steps, without the time of evaluations and checkpoints. Metrics that do not depend on
    time are the step's own, so that they are equal in a resumed run. Only real tokens count, without padding; FLOPs are
    those that the model needs for them (`flops.TowerCosts`).
    """

    def __init__(self) -> None:
        self._interval, self._seconds, self._since = Amounts(), 0.0, None
        self._load: ExpertLoad | None = None

    def on_train_start(self, context: CallbackContext) -> None:
        """Determine the cost of steps, and the device's peak."""
        self.cfg = context.state.cfg
        self._groups: ProcessGroupCollection = get_attr_wrapped_model(context.model[0], "pg_collection")
        self._costs = step_costs(self.cfg)
        on_gpu = torch.cuda.is_available()
        self._peak = peak_operations(torch.cuda.get_device_name()) if on_gpu else None
        self._excluded = ExcludedSamples(self.cfg.dataset)

    def on_train_step_start(self, context: CallbackContext) -> None:
        """Start the clock; if this step's metrics are logged, count experts' tokens."""
        if self._since is None:
            self._since = time.perf_counter()
        is_logged = (context.state.train_state.step + 1) % self.cfg.logger.log_interval == 0
        if is_logged and self.cfg.model.moe_layers:
            self._load = ExpertLoad(context.model)

    def on_train_step_end(self, context: CallbackContext) -> None:
        """Add the step; after the last one of an interval, publish its metrics."""
        step = meter_of(context.state).take()
        self._interval += step
        if step_of(context) % self.cfg.logger.log_interval:
            self._tick()
            return
        publish(context, self._figures(context, step))

    def on_eval_start(self, context: CallbackContext) -> None:
        """Stop the clock until the next step."""
        self._since = None

    on_checkpoint_save = on_eval_start

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._since
        self._since = now

    def _figures(self, context: CallbackContext, step: Amounts) -> dict[str, float]:
        meter, count = meter_of(context.state), len(Amounts._fields)
        excluded = [*self._excluded.numbers(meter.newly_dropped), *self._excluded.numbers(meter.unreadable)]
        own = (*self._interval, *step, *excluded)
        sums = sum_amounts(own, self._groups)  # which also waits for the device
        self._tick()
        interval, step, lost = Amounts(*sums[:count]), Amounts(*sums[count : 2 * count]), sums[2 * count :]
        if torch.cuda.is_available():
            memory = torch.cuda.max_memory_allocated()
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        memory, *dropped = max_of_each([memory, *self._excluded.numbers(meter.dropped)])
        newly_dropped, unreadable = lost[: len(dropped)], lost[len(dropped) :]
        totals = self._excluded.figures([*map(sum, zip(dropped, newly_dropped, strict=True))], unreadable)
        if torch.distributed.get_rank() == 0:
            self._excluded.say(totals, step_of(context))
        norms = context.user_state.get(PART_NORMS) or {}
        figures = {
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
            each = self._costs.of(**sizes) / self._seconds / torch.distributed.get_world_size()
            figures |= {"tflops_per_gpu": each / 1e12} | ({} if self._peak is None else {"mfu": each / self._peak})
        if self._load is not None:
            figures |= self._load.take(self.cfg)
            self._load = None
        self._interval, self._seconds = Amounts(), 0.0
        return figures


class Amounts(NamedTuple):
    """Contents of some microbatches. Two can be added."""

    tokens: int = 0  # without padding
    trained_tokens: int = 0  # whose loss counts
    slots: int = 0  # tokens including padding
    token_pairs: int = 0  # sum over segments of the squared number of tokens
    patches: int = 0  # of all images and videos
    patch_pairs: int = 0  # sum over frames of the squared number of patches
    images: int = 0  # without frames of videos
    video_frames: int = 0  # as the vision tower sees them, each of two frames of a video
    rows: int = 0

    @classmethod
    def of(cls, batch: TokenBatch, config: VisionLanguageProvider) -> Self:
        """Contents of a microbatch. Reads tokens on the host."""
        frames, images = batch.vision.lengths if batch.vision is not None else (), 0
        if frames:  # those of images come before all videos: as many as the image tokens fill
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

    def __add__(self, other: Amounts) -> Amounts:  # pyright: ignore[reportIncompatibleMethodOverride]
        return Amounts(*map(sum, zip(self, other, strict=True)))


@dataclass
class Meter:
    """Contents of this rank's microbatches until `take`, and their dropped samples, as in `TokenBatch`."""

    amounts: Amounts = field(default_factory=Amounts)
    dropped: SetCounts = ()  # of the latest rows
    newly_dropped: SetCounts = ()  # of all rows
    unreadable: SetCounts = ()

    def add(self, amounts: Amounts, batch: TokenBatch) -> None:
        """Count one more microbatch, and the samples dropped in its rows and in those before."""
        self.amounts += amounts
        self.dropped = merge_counts(max, self.dropped, batch.dropped)
        self.newly_dropped = merge_counts(sum, self.newly_dropped, batch.newly_dropped)
        self.unreadable = merge_counts(sum, self.unreadable, batch.unreadable)

    def take(self) -> Amounts:
        """The contents since the last call."""
        taken, self.amounts = self.amounts, Amounts()
        return taken


def meter_of(state: GlobalState) -> Meter:
    """The meter of a run: contents of this rank's microbatches, which are those of its data-parallel rank."""
    if not hasattr(state, _METER):
        setattr(state, _METER, Meter())
    return getattr(state, _METER)


def count_microbatch(state: GlobalState, batch: TokenBatch, config: VisionLanguageProvider) -> None:
    """Count a training microbatch (on the host), for our metrics and for those that Megatron-Bridge logs itself."""
    amounts = Amounts.of(batch, config)
    meter_of(state).add(amounts, batch)
    count_operations(state, amounts)


def count_operations(state: GlobalState, amounts: Amounts) -> None:
    """Add to the counts from which Megatron-Bridge computes its own metrics.

    It sets them to zero before each step. Lengths differ between ranks, so it has to sum them: a microbatch is counted
    once among the data-parallel ranks of a module.
    """
    for name, amount in {
        "_flops_seqlen_sum": amounts.tokens,
        "_flops_seqlen_sq_sum": amounts.token_pairs,
        "_flops_vision_patches": amounts.patches,
        # See flops.operations_of_a_step.
        "_flops_cross_seqlen_sum": amounts.patches,
        "_flops_cross_seqlen_product_sum": amounts.patch_pairs,
    }.items():
        setattr(state, name, getattr(state, name, 0) + amount)
    state._flops_requires_global_reduce = True


def step_costs(cfg: ConfigContainer) -> TowerCosts | None:
    """Cost of tokens and patches in a training step of a run; None with adapters that are not this package's."""
    trained, peft = trained_parts(cfg.model), getattr(cfg, "peft", None)
    if peft is None:
        return model_costs(cfg.model.dimensions(), trained)
    if not isinstance(peft, Qwen3VLParts):
        return None
    adapters, parts = peft.settings, [part.value for part in Part]
    own: dict[str, Any] = {part: getattr(trained, part) and not getattr(peft, f"freeze_{part}") for part in parts}
    own["rank"] = lambda layer: adapters.dim if adapters.adapts(layer) else 0
    return model_costs(cfg.model.dimensions(), replace(trained, **own))


def peak_operations(device: str) -> float | None:
    """Peak FLOP/s in bfloat16 of a GPU by its driver's name, such as "NVIDIA A100-SXM4-40GB"; None if it is unknown."""
    words = set(re.split(r"[\s-]+", device.upper()))
    names = [name for name in GPUS if set(name.upper().split("-")) <= words]
    if not names or words & _SLOWER:
        return None
    return GPUS[max(names, key=len)].bf16_flops


class ExcludedSamples:
    """Converts numbers of samples dropped in training, per data set, to metrics.

    Samples dropped when they are measured follow from the plan of rows, which is equal in every process: their total
    comes with each batch, and ranks differ only in the index of their latest rows. For streams and WebDatasets each
    process has its own part of the data, and each batch has the number that is new: data-parallel ranks sum these. The
    same is done for samples that turn out to be unreadable when their row is due, which only the ranks that read the
    row know.
    """

    def __init__(self, dataset: Any) -> None:
        mixed = getattr(dataset, "mixed", None)
        self._names = [one.name for one in mixed("train")] if mixed is not None else []
        self._said = 0

    def numbers(self, counts: SetCounts) -> list[int]:
        """A number for each data set, the same length on every rank."""
        return [*counts, *[0] * (max(len(self._names), 1) - len(counts))]

    def figures(self, dropped: Sequence[float], unreadable: Sequence[int]) -> dict[str, float]:
        """By name: the total, and that of each data set of a mixture. Zeros are omitted."""
        figures = {}
        for kind, counts in (("dropped", dropped), ("unreadable", unreadable)):
            figures[kind] = int(sum(counts))
            figures |= {f"{kind}_{name}": int(count) for name, count in zip(self._names, counts, strict=False)}
        return {name: count for name, count in figures.items() if count}

    def say(self, figures: dict[str, float], step: int) -> None:
        """Log the total if it has doubled since the last message."""
        total = figures.get("dropped", 0) + figures.get("unreadable", 0)
        if total and total >= 2 * self._said:
            self._said = total
            words = ", ".join(f"{name} {count}" for name, count in figures.items())
            logger.warning("samples left out of training up to step %d: %s", step, words)


class ExpertLoad:
    """Counts how evenly tokens are distributed over experts, from its creation until `take`.

    Hooks of the routers count, and exist only in a step whose metrics are logged. Nothing waits for the device in
    between.
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
            return  # a recomputed layer is called a second time, with gradients
        topk = output[1]  # [tokens, E] bool
        padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)  # [s, b] bool, True for padding
        if padding is not None:
            topk = topk & ~padding.reshape(-1, 1)
        layer, count = tracked_row(getattr(router, "to_wrap", router)), topk.sum(0)
        self._counts[layer] = self._counts[layer] + count if layer in self._counts else count

    def take(self, cfg: ConfigContainer) -> dict[str, float]:
        """Stop counting; metrics of all ranks' tokens.

        Returns:
            `expert_load_max` and `expert_load_mean` over layers, of the tokens of a layer's busiest expert divided by
            the mean of its experts; and the balancing losses.
        """
        counts = self.counts(cfg.model)
        loads = counts.amax(1) / counts.sum(1).clamp(min=1) * counts.size(1)
        figures = {"expert_load_max": loads.max().item(), "expert_load_mean": loads.mean().item()}
        return figures | _balancing_losses(cfg)

    def counts(self, config: VisionLanguageProvider) -> Tensor:
        """Stop counting; [layers with experts, E] how often real tokens of all ranks chose each expert."""
        for hook in self._hooks:
            hook.remove()
        counts = torch.zeros(tracked_rows(config), config.num_moe_experts, dtype=torch.int64, device=self._device)
        for layer, count in self._counts.items():
            counts[layer] += count
        counts = sum_over_ranks(counts)[_layers_with_experts(config)]
        # Without sequence parallelism tensor-parallel ranks have the same tokens.
        return counts if config.sequence_parallel else counts // config.tensor_model_parallel_size


def _balancing_losses(cfg: ConfigContainer) -> dict[str, float]:
    config, tracker, losses = cfg.model, get_moe_metrics_tracker(), {}
    replicas = cfg.data_parallel_size
    microbatches = microbatches_of_a_rank(cfg, replicas)
    kinds, coefficients = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    if isinstance(kinds, str):
        kinds, coefficients = [kinds], [coefficients]
    for kind, coefficient in zip(kinds, coefficients, strict=True):
        if not coefficient or kind not in _BALANCING_LOSSES:
            continue
        name = _BALANCING_LOSSES[kind]
        tracker.ensure_initialized(name, tracked_rows(config))  # a stage without experts has recorded nothing
        total = sum_over_ranks(tracker.metrics[name].values).sum().item()
        # Each data-parallel rank has balanced its own microbatches, or all of them the same.
        times = replicas if kind == "aux_loss" else 1
        losses[name] = total / (times * microbatches * len(_layers_with_experts(config)))
    return losses


def _layers_with_experts(config: VisionLanguageProvider) -> list[int]:
    """Rows of the layers with experts, with that of multi-token prediction if it is trained."""
    return [*config.moe_layers, *([config.num_layers] if config.trains_mtp else [])]

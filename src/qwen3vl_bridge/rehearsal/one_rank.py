"""One rank of a run on the fake GPU: Megatron-Bridge's own loop at the run's real sizes, in one process.

What a machine without a GPU cannot have is replaced: the other ranks (collectives return at once), weights and losses
(no value is computed), and the experts that tokens are routed to (an equal share each). Every microbatch is the same
row: the largest of the data, or without data one full of images. Nothing is put back: the process ends afterwards.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import logging
import math
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, TokenBatch, make_vision_inputs, mrope_positions, vision_slots
from qwen3vl_bridge.batch.token_layout import segment_multiple
from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
from qwen3vl_bridge.models.settings import has_transformer_engine
from qwen3vl_bridge.parallel import collectives
from qwen3vl_bridge.rehearsal.fake_gpu import Event, between, mark, on_wait, read_log
from qwen3vl_bridge.rehearsal.no_cudnn import without_cudnn
from qwen3vl_bridge.training import checkpoint_manager, weight_loading
from qwen3vl_bridge.training.callbacks import callbacks_of
from qwen3vl_bridge.training.guard import StepGuard
from qwen3vl_bridge.training.run_log import RunLog
from qwen3vl_bridge.training.step import forward_step

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer
from megatron.core.optimizer import optimizer
from megatron.core.pipeline_parallel import utils
from megatron.core.transformer.moe import token_dispatcher
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend
from torch.utils._pytree import tree_leaves

# Kernels are compiled and optimizer states made in the first step; allocations are recorded in the first two, launches
# in the third.
STEPS, _RECORDED, _COUNTED = 3, 1, 2
_IMAGES = 8
_GROUPED, _GROUPED_END = "grouped product, FLOP:", "end of a grouped product"
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "isend", "irecv", "send", "recv"),
)
_PACKAGES = ("qwen3vl_bridge", "megatron.core", "megatron.bridge", "transformer_engine", "fla")


@dataclass(frozen=True)
class Phase:
    """Bytes of GPU memory at the end of a phase of the run, and the most in it."""

    name: str
    allocated: int
    peak: int
    reserved: int
    seconds: float  # on this machine, since the start


@dataclass
class Rehearsal:
    """What was seen of a rank.

    Attributes:
        row: what a microbatch has.
        phases: in their order.
        held: (bytes, tensors, the line that allocated them) at the peak of a step, most first; before them what was
            there before the step, in two entries.
        launches: number and amount (bytes; FLOPs of matrix products) of a step's events, by kind and name.
        collectives: number and bytes of a step's, by name; of two tensors, those of the larger.
        waits: (number, CUDA function, the line that waited) of the host's waits in a step, most first.
        error: what ended the run, or None.
    """

    rank: int
    world: int
    row: str = ""
    phases: list[Phase] = field(default_factory=list)
    held: list[tuple[int, int, str]] = field(default_factory=list)
    launches: dict[str, tuple[int, int]] = field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    waits: list[tuple[int, str, str]] = field(default_factory=list)
    error: str | None = None

    @property
    def peak(self) -> int:
        """Bytes allocated at most, but for the first step, whose compilation allocates for itself."""
        steady = [phase for phase in self.phases if not phase.name.startswith(("optimizer", "step 0"))]
        return max((phase.peak for phase in steady or self.phases), default=0)

    @property
    def reserved(self) -> int:
        """Bytes that torch's allocator reserved at most, for the first step's compilation too: it keeps them."""
        return max((phase.reserved for phase in self.phases), default=0)


def rehearse(cfg: ConfigContainer, *, rank: int, world: int, log: Path) -> Rehearsal:
    """Run three steps of a rank. The process must have been started with the fake GPU, and end after this.

    Args:
        cfg: changed in place.
        world: number of ranks.
        log: what the fake GPU logs to.

    Raises:
        ValueError: a rank or a microbatch that cannot be rehearsed. (What the run itself raises is in the result.)
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}, expected 0 to {world - 1}")
    if cfg.train.micro_batch_size != 1:
        raise ValueError(f"train.micro_batch_size is {cfg.train.micro_batch_size}, expected 1: a packed row")
    if cfg.model.dist_train.use_dist_train or cfg.model.variable_seq_lengths:
        raise ValueError(
            "ranks tell one another the sizes of what they send (model.variable_seq_lengths or model.dist_train), and "
            "a rehearsal has only one rank: expected model.variable_seq_lengths=False and no separate vision ranks"
        )
    gc.freeze()  # collections, of which compiling asks for many, need not walk through what is imported
    report = Rehearsal(rank, world)
    recorder = _Recorder(report)
    _replace_row(cfg, functools.partial(largest_row if has_data(cfg) else full_row, cfg), report)
    _shorten(cfg, world)
    _fake_ranks(recorder)
    weight_loading.Pretrained = _NoWeights
    # Losses and norms are not computed; a norm is a root, complex where what is read is below zero.
    StepGuard.on_train_step_end = RunLog.on_train_step_end = lambda *_: None
    norm = optimizer.get_grad_norm_fp32
    optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: abs(norm(*args, **kwargs))
    CachingAutotuner.benchmark_all_configs = _first_of_all
    utils.set_ideal_affinity_for_current_gpu = lambda: None  # the cores near a GPU, which the driver would tell
    # Of shards' places in their tensors, which the other ranks would tell: only checkpoints have them.
    param_and_grad_buffer.validate_uneven_dtensor = lambda *_: None
    if cfg.model.num_moe_experts:
        balance_routing()
        mark_grouped_products()
    cfg.model.register_post_wrap_hook(recorder.model_made)
    with tempfile.TemporaryDirectory() as folder, without_cudnn():
        cfg.checkpoint.pretrained_checkpoint = folder if cfg.peft or cfg.model.init_model_with_meta_device else None
        try:
            pretrain(cfg, forward_step, callbacks=[*callbacks_of(cfg), recorder])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            report.error = f"{type(error).__name__}: {error}"
            recorder.phase("failed")
            recorder.see_what_is_held()
    if report.error is None:
        _count(between(read_log(log), f"step {_COUNTED}", "end"), report)
    return report


def _shorten(cfg: ConfigContainer, world: int) -> None:
    """Three steps of few microbatches, which write and report nothing, whatever schedule the run has."""
    model, train = cfg.model, cfg.train
    split = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    replicas = max(world // split, 1)
    # As many microbatches as the pipeline holds at once, and two, because gradients are accumulated from the second on.
    most = max(2, model.pipeline_model_parallel_size * (2 if model.virtual_pipeline_model_parallel_size else 1))
    train.global_batch_size = replicas * min(most, -(-train.global_batch_size // replicas))
    train.train_iters, train.train_samples, train.num_epochs = STEPS, None, None
    train.rampup_batch_size = None
    train.exit_signal_handler = train.exit_signal_handler_for_dataloader = False
    train.exit_interval = train.exit_duration_in_mins = None
    for name, value in vars(type(cfg.scheduler)(lr_warmup_iters=1)).items():
        if name.startswith("lr_"):
            setattr(cfg.scheduler, name, value)
    cfg.validation.eval_iters = 0
    cfg.logger, cfg.profiling = type(cfg.logger)(log_interval=STEPS + 1), type(cfg.profiling)()
    cfg.ft = cfg.straggler = cfg.nvrx_straggler = cfg.inprocess_restart = None
    checkpoint = cfg.checkpoint
    checkpoint.save = checkpoint.load = checkpoint.save_interval = checkpoint.ckpt_step = None
    checkpoint.async_save = False
    logging.getLogger(checkpoint_manager.__name__).setLevel(logging.ERROR)  # it would warn of that
    cfg.guard = None  # it would judge losses that are not computed
    cfg.dataset.num_workers, cfg.dataset.balance_over = 0, None
    if not has_data(cfg):
        cfg.dataset.path = "rehearsal"
    cfg.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)


def _replace_row(cfg: ConfigContainer, make: Callable[[], TokenBatch], report: Rehearsal) -> None:
    """Have the data set give one row again and again."""

    @functools.cache
    def row() -> TokenBatch:
        batch = make()
        visual = torch.isin(batch.input_ids, torch.tensor([cfg.model.image_token_id, cfg.model.video_token_id]))
        segments = sum(map(bool, batch.layout.lengths))
        report.row = (
            f"{batch.layout.total:,} tokens in {segments} segments, {int(visual.sum()):,} of them of images and videos"
        )
        return batch

    def stream(*_: Any, **__: Any) -> Iterator[TokenBatch]:
        return itertools.repeat(row())

    def build_datasets(*_: Any) -> tuple[Iterator[TokenBatch], None, None]:
        cfg.dataset.dataloader_type = "external"  # an iterator; finalize() has refused it
        return stream(), None, None

    type(cfg.dataset).stream, type(cfg.dataset).build_datasets = stream, build_datasets


def _fake_ranks(recorder: _Recorder) -> None:
    """Join a world of which only this process exists; every group of it is of torch's backend "fake". Collectives of
    the counted step are in the report.
    """
    report = recorder.report
    os.environ |= dict(WORLD_SIZE=str(report.world), RANK=str(report.rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT="1")
    dist.init_process_group("fake", store=dist.HashStore(), rank=report.rank, world_size=report.world)
    new_group = dist.new_group

    def fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, pg_options: Any = None, **more: Any):
        return new_group(ranks, timeout, "fake", None, **more)

    def counted(function: Callable) -> Callable:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            sizes = [x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_cuda]
            if sizes and recorder.counting:
                number, nbytes = report.collectives.get(function.__name__, (0, 0))
                report.collectives[function.__name__] = number + 1, nbytes + max(sizes)
            return function(*args, **kwargs)

        return run

    replaced = {new_group: fake_group} | {
        function: counted(function) for function in (getattr(dist, name) for name in _COLLECTIVES)
    }
    # Nobody sends an object's size: what the first rank would say, this one says itself.
    replaced[dist.broadcast_object_list] = lambda *_, **__: None  # noqa: TID251  only its name
    for module in list(sys.modules.values()):
        for name, value in list(vars(module).items()):
            if isinstance(value, FunctionType) and value in replaced:
                setattr(module, name, replaced[value])
    collectives._device_of_collectives = lambda: torch.device("cuda", 0)  # as under NCCL: the fake takes any


class _NoWeights:
    """Initial weights that are not read: adapters are inserted into a model of any values."""

    @classmethod
    def find(cls, path: str) -> _NoWeights:
        return cls()

    def check(self, provider: Any) -> None: ...

    def load(self, model: Any, groups: Any) -> None: ...


def _first_of_all(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> dict[Any, float]:
    """Configurations of a kernel by "time", in place of timing them, which copies tensors to the host and back."""
    return {launcher: float(number) for number, launcher in enumerate(tuner.launchers)}


def balance_routing() -> None:
    """Give every expert as many tokens. The router's kernels run, but their result is not computed."""
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    preprocess, gather = dispatcher.preprocess, token_dispatcher.gather_from_sequence_parallel_region

    def balanced(self: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """The counts are made on the host, and copied to the GPU where megatron-core expects them, and copies back."""
        tokens, experts = routing_map.shape
        topk = self.config.moe_router_topk
        chosen = torch.zeros(tokens, experts, dtype=torch.bool)
        chosen.scatter_(1, torch.arange(tokens * topk).view(tokens, topk) % experts, True)
        counts = preprocess(self, chosen)
        for name in ("input_splits", "output_splits", "output_splits_tp", "num_global_tokens_per_local_expert"):
            if isinstance(splits := getattr(self, name, None), torch.Tensor):
                setattr(self, name, splits.cuda())
        return counts.cuda()

    def gathered(x: torch.Tensor, group: Any = None, **more: Any) -> torch.Tensor:
        return gather(x, group=group, **more) if x.is_cuda else x.repeat(dist.get_world_size(group))

    dispatcher.preprocess = balanced
    token_dispatcher.gather_from_sequence_parallel_region = gathered


def mark_grouped_products() -> None:
    """Write the FLOPs of all experts' products into the log: where they are one kernel, only that reads their sizes."""

    def marked(function: Callable, flops: Callable[..., int]) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            mark(f"{_GROUPED}{flops(*args)}")
            result = function(*args, **kwargs)
            mark(_GROUPED_END)
            return result

        return run

    F.grouped_mm = marked(F.grouped_mm, flops_of_grouped_mm)
    if has_transformer_engine():
        from transformer_engine.pytorch.cpp_extensions import gemm

        gemm.tex.te_general_grouped_gemm = marked(gemm.tex.te_general_grouped_gemm, flops_of_grouped_gemm)


def flops_of_grouped_mm(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of torch's function: tokens [t, k] and weights [E, k, n], or [m, t] and [t, n] for each expert's tokens."""
    return 2 * a.numel() * b.size(-1)


def flops_of_grouped_gemm(a: list[torch.Tensor], transpose_a: bool, b: list[torch.Tensor], transpose_b: bool, *_: Any):
    """Of Transformer Engine's function, whose first factors are [m, k] if transposed, and second [n, k] if not."""
    return sum(2 * one.numel() * other.size(1 if transpose_b else 0) for one, other in zip(a, b, strict=True))


def has_data(cfg: ConfigContainer) -> bool:
    """Whether there are data whose rows have numbers."""
    data = cfg.dataset
    numbered = isinstance(data, Qwen3VLConversationProvider) and not data.streaming
    return numbered and any(path is not None for path in (data.path, data.train_path, data.mixture))


def largest_row(cfg: ConfigContainer) -> TokenBatch:
    """Of the first epoch the row with most patches, of several the one with most tokens.

    Every conversation is measured, unless they were packed before training. Raises what a run would.
    """
    rows = cfg.dataset.shared_by(cfg.model.context_parallel_size).rows("train")

    def size(number: int) -> tuple[int, int]:
        sizes = [rows.samples.size(sample) for sample in rows.plan.row(number)]
        return sum(size.patches for size in sizes), sum(size.tokens for size in sizes)

    return rows.collate_fn([rows[max(range(rows.plan.end_of_epoch()), key=size)]])


def full_row(cfg: ConfigContainer) -> TokenBatch:
    """A packed row of `seq_length` tokens: images of one size, with four other tokens each, as large as the row, or the
    dataset's `max_patches`, allows.
    """
    model, length = cfg.model, cfg.dataset.seq_length
    vision = model.vision_config
    merge = vision.spatial_merge_size
    multiple = segment_multiple(model.context_parallel_size)
    most = (getattr(cfg.dataset, "max_patches", None) or length * merge**2) // merge**2
    images = max(min(_IMAGES, most, length // 8), model.context_parallel_size)  # ranks get as many of them
    each = length // images // multiple * multiple
    tokens = max(min(each - 4, most // images), 1)
    height = math.isqrt(tokens)
    width = tokens // height
    image = [model.vision_start_token_id, *[model.image_token_id] * (height * width), model.vision_end_token_id]
    text = 0  # any token that is none of these
    ids = [*image, *[text] * (each - len(image))] * images
    ids = torch.tensor(ids + [text] * (length - len(ids)))[None]
    layout = SequenceLayout.packed_row([each] * images, multiple=multiple, total=length)
    grids = torch.tensor([(1, merge * height, merge * width)] * images)
    patches = int(grids.prod(-1).sum())
    names = dict(image_token_id=model.image_token_id, video_token_id=model.video_token_id)
    features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return TokenBatch(
        input_ids=ids,
        labels=ids.roll(-1),
        loss_mask=torch.ones(ids.shape),
        position_ids=mrope_positions(ids, layout, grids, None, spatial_merge_size=merge, **names),
        vision_slot=vision_slots(ids, num_image_tokens=patches // merge**2, **names),
        layout=layout,
        vision=make_vision_inputs(
            torch.zeros(patches, features, dtype=cfg.dataset.pixel_dtype),
            *(grids, None, None),
            num_position_embeddings=vision.num_position_embeddings,
            spatial_merge_size=merge,
        ),
    )


class _Recorder(Callback):
    """Measures each phase, records what is allocated in one step, and what another launches."""

    def __init__(self, report: Rehearsal) -> None:
        self.report, self.start, self.step = report, time.monotonic(), 0
        self.before = 0  # bytes when the recorded step began
        self.counting = False  # while collectives are counted
        self.waits: Counter[tuple[str, str]] = Counter()
        self.counts_waits = ExitStack()

    def phase(self, name: str) -> None:
        sizes = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        self.report.phases.append(Phase(name, *sizes, time.monotonic() - self.start))
        torch.cuda.reset_peak_memory_stats()

    def model_made(self, chunks: Any) -> Any:
        """A hook for when the model is wrapped."""
        self.phase("model")
        return chunks

    def on_train_start(self, context: CallbackContext) -> None:
        self.phase("optimizer")
        step = context.optimizer.step

        def measured(*args: Any, **kwargs: Any) -> Any:
            self.phase(f"step {self.step}, passes")
            return step(*args, **kwargs)

        context.optimizer.step = measured

    def on_train_step_start(self, context: CallbackContext) -> None:
        if self.step <= _RECORDED:
            self.before = torch.cuda.memory_allocated()
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=10**6)
        self.counting = self.step == _COUNTED
        if self.counting:
            self.counts_waits.enter_context(on_wait(self.waited))
        mark(f"step {self.step}")

    def waited(self, function: bytes) -> None:
        """Called below the line that waits, of which a gradient computed in C++ has none."""
        frames = [
            dict(filename=frame.f_code.co_filename, line=line, name=frame.f_code.co_name)
            for frame, line in traceback.walk_stack(sys._getframe())
        ]
        line = _line(frames[1:])
        if not line.startswith("rehearsal/one_rank.py:"):  # for balanced experts, which no run does
            self.waits[function.decode(), line] += 1

    def on_train_step_end(self, context: CallbackContext) -> None:
        mark("end")
        self.counting = False
        self.counts_waits.close()
        self.report.waits = sorted(((number, *where) for where, number in self.waits.items()), reverse=True)
        self.phase(f"step {self.step}, optimizer")
        self.see_what_is_held()
        self.step += 1

    def see_what_is_held(self) -> None:
        """At the peak of the first steps, or of the one that failed."""
        if self.step <= _RECORDED:
            trace = torch.cuda.memory._snapshot()["device_traces"][0]
            torch.cuda.memory._record_memory_history(None)
            made = next((phase.allocated for phase in self.report.phases if phase.name == "model"), 0)
            states = [
                (made, 0, "the model: weights, gradients"),
                (self.before - made, 0, "the optimizer's states, workspaces"),
            ]
            self.report.held = [*(state for state in states if state[0] > 0), *_held_at_peak(trace)]


def _held_at_peak(trace: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """(bytes, tensors, line) of what a recorded trace holds where it holds most, by the innermost line of ours or
    Megatron's that allocated it, most first.
    """
    now, most, end = 0, 0, 0
    for number, event in enumerate(trace):
        now += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        if now > most:
            most, end = now, number + 1
    live: dict[int, dict[str, Any]] = {}
    for event in trace[:end]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    held: dict[str, list[int]] = defaultdict(list)
    for event in live.values():
        held[_line(event.get("frames", ()))].append(event["size"])
    return sorted(((sum(sizes), len(sizes), line) for line, sizes in held.items()), reverse=True)


@functools.cache
def _folders() -> tuple[str, ...]:
    """Of the packages whose lines are told: not any folder of such a name, as clones of ours have."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())


def _line(frames: Iterable[dict[str, Any]]) -> str:
    frames = list(frames)
    known = [frame for frame in frames if frame["filename"].startswith(_folders())]
    backward = any("_engine_run_backward" in frame["name"] for frame in frames)
    if not (chosen := (known or frames)[:1]):
        return "no known line of Python"
    frame = chosen[0]
    place = "/".join(Path(frame["filename"]).parts[-2:])
    return f"{place}:{frame['line']} {frame['name']}{' (backward)' if backward else ''}"


def _count(events: list[Event], report: Rehearsal) -> None:
    amounts: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "copy":
            amounts[event.name].append(event.amount)
        elif event.kind in ("kernel", "triton", "gemm", "memset"):
            amounts[event.kind].append(event.amount)
    report.launches = {name: (len(each), sum(each)) for name, each in amounts.items()}
    number, flops = report.launches.get("gemm", (0, 0))
    report.launches["gemm"] = number, flops + sum(_of_grouped_kernels(events))


def _of_grouped_kernels(events: list[Event]) -> Iterator[int]:
    """FLOPs of grouped products in which no product of a single expert was launched."""
    flops = 0
    for event in events:
        if event.kind == "gemm" or event.name == _GROUPED_END:
            yield flops * (event.kind == "mark")
            flops = 0
        elif event.name.startswith(_GROUPED):
            flops = int(event.name.removeprefix(_GROUPED))

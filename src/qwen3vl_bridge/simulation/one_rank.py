"""Simulate one rank of a run on the fake GPU: Megatron-Bridge's loop with the run's real sizes, in one process.

The fake GPU computes no values, and there are no other ranks. So collectives return at once, initial weights are not
read, losses are not checked, and every expert gets an equal share of tokens. Every microbatch is the same row: the
largest row of the data, or without data a row full of images. Replacements are permanent: the process must end
afterwards.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import logging
import math
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.layout import SequenceLayout, segment_multiple
from qwen3vl_bridge.core.vision_inputs import VisionSettings
from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import NgramEmbedding
from qwen3vl_bridge.planning.hardware import GIB
from qwen3vl_bridge.simulation.fake_gpu import Event, between, mark, on_sync, read_log
from qwen3vl_bridge.simulation.no_cudnn import without_cudnn
from qwen3vl_bridge.terminal import show
from qwen3vl_bridge.training import checkpoint_manager, weight_loading
from qwen3vl_bridge.training.callbacks import build_callbacks
from qwen3vl_bridge.training.guard import StepGuard
from qwen3vl_bridge.training.objective_settings import objective_of
from qwen3vl_bridge.training.run_log import RunLog
from qwen3vl_bridge.training.step import forward_step
from qwen3vl_bridge.upstream import simulated_gpu, torch_memory

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.bridge.training.config import ConfigContainer, TokenizerConfig
from megatron.bridge.training.pretrain import pretrain
from megatron.core.num_microbatches_calculator import get_num_microbatches

# The first step compiles kernels and creates optimizer states. Allocations are recorded in the first two steps,
# launches and synchronizations in the third.
STEPS, _LAST_RECORDED, _COUNTED = 3, 1, 2
_IMAGES = 8  # in a row without data
_GROUPED_GEMM, _GROUPED_GEMM_END = "grouped GEMM, FLOP:", "end of a grouped GEMM"
# A report names the innermost line of code that is in one of these packages.
_PACKAGES = ("qwen3vl_bridge", "megatron.core", "megatron.bridge", "transformer_engine", "fla")


@dataclass(frozen=True)
class Phase:
    """GPU memory in bytes at the end of a phase of the run, and the peak during the phase."""

    name: str
    allocated: int
    peak: int
    reserved: int
    seconds: float  # since the start of the simulation


@dataclass
class Simulation:
    """Results of a simulated rank.

    Attributes:
        row: description of the microbatch.
        phases: memory by phase, in order.
        held: (bytes, number of tensors, line that allocated them) at the peak of a step, largest first. The first two
            entries are the model and the optimizer, which exist before the step.
        launches: (number, amount) of events in a step, by kind or name; amounts are bytes, or FLOPs of GEMMs.
        collectives: (number, bytes) in a step, by name; bytes of the larger one of input and output.
        syncs: (number, CUDA function, line) of host-device synchronizations in a step, most frequent first.
        error: the error that ended the run, or None.
    """

    rank: int
    world: int
    row: str = ""
    phases: list[Phase] = field(default_factory=list)
    held: list[tuple[int, int, str]] = field(default_factory=list)
    launches: dict[str, tuple[int, int]] = field(default_factory=dict)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    syncs: list[tuple[int, str, str]] = field(default_factory=list)
    error: str | None = None

    @property
    def peak(self) -> int:
        """Return the peak bytes allocated, without the first step, which also allocates for compilation."""
        steady = [phase for phase in self.phases if not phase.name.startswith(("optimizer", "step 0"))]
        return max((phase.peak for phase in steady or self.phases), default=0)

    @property
    def reserved(self) -> int:
        """Return the peak bytes reserved by torch's allocator.

        The value includes memory for compilation in the first step, which the allocator keeps.
        """
        return max((phase.reserved for phase in self.phases), default=0)


def simulate_rank(cfg: ConfigContainer, *, rank: int, world: int, log: Path) -> Simulation:
    """Run three steps of one rank. The process must run on the fake GPU and end afterwards.

    Args:
        cfg: the run's configuration, changed in place.
        world: number of ranks.
        log: prefix of the fake GPU's log files.

    Raises:
        ValueError: The rank or the microbatch cannot be simulated. (An error of the run itself is in the result.)
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank is {rank}, expected 0 to {world - 1}")
    if cfg.train.micro_batch_size != 1:
        raise ValueError(f"train.micro_batch_size is {cfg.train.micro_batch_size}, expected 1 (a packed row)")
    if cfg.model.dist_train.use_dist_train:
        raise ValueError("model.dist_train.use_dist_train is True, expected False: vision ranks cannot be simulated")
    if (objective := objective_of(cfg)) is not None:
        raise ValueError(
            f"objective.kind is {objective.kind!r}, expected 'sft': the simulated row is a single document"
        )
    if cfg.model.variable_seq_lengths and getattr(cfg.model.vision_config, "deepstack_visual_indexes", ()):
        raise ValueError(
            "model.variable_seq_lengths is True, expected False: pipeline stages tell each other how many DeepStack "
            "features they send, which one simulated rank cannot know"
        )
    gc.freeze()  # compiling runs many garbage collections, which need not traverse imported modules
    report = Simulation(rank, world)
    recorder = _Recorder(report)
    _replace_row(cfg, functools.partial(largest_row if has_data(cfg) else full_row, cfg), report)
    _shorten(cfg, world)
    simulated_gpu.join_fake_ranks(rank, world, recorder.note_collective)
    simulated_gpu.take_no_values()
    if cfg.model.variable_seq_lengths:
        _assume_lengths(cfg.model)
    weight_loading.Pretrained = _NoWeights
    StepGuard.on_train_step_end = RunLog.on_train_step_end = lambda *_: None  # these would read losses and norms
    if cfg.model.num_moe_experts:
        simulated_gpu.balance_routing()
        simulated_gpu.mark_grouped_products(
            lambda flops: mark(f"{_GROUPED_GEMM}{flops}"), lambda: mark(_GROUPED_GEMM_END)
        )
    cfg.model.register_post_wrap_hook(recorder.record_model)
    with tempfile.TemporaryDirectory() as folder, without_cudnn():
        cfg.checkpoint.pretrained_checkpoint = folder if cfg.peft or cfg.model.init_model_with_meta_device else None
        try:
            pretrain(cfg, forward_step, callbacks=[*build_callbacks(cfg), recorder])
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            report.error = f"{type(error).__name__}: {error}"
            recorder.record_phase("failed")
            recorder.record_held()
    if report.error is None:
        _count_launches(between(read_log(log), f"step {_COUNTED}", "end"), report)
    return report


def _assume_lengths(model: VisionLanguageProvider) -> None:
    """Assume rows of `seq_length` tokens, instead of exchanging lengths with other ranks.

    In a real run the host waits for these exchanges. The simulation does not count these synchronizations.
    """
    divided_by = model.context_parallel_size * (model.tensor_model_parallel_size if model.sequence_parallel else 1)
    length, width = model.seq_length // divided_by, model.hidden_size
    # With multi-token prediction, stages also send the embedded next tokens: beside residual streams, or after tokens.
    sends_next = getattr(model, "trains_mtp", False)
    if streams := getattr(model, "hc_count", 0):
        width *= streams + sends_next
    else:
        length *= 1 + sends_next
    simulated_gpu.receive_shape((length, 1, width))
    NgramEmbedding.exchanged_tokens = lambda self, ids: ids.size(0) * ids.size(1)


def _shorten(cfg: ConfigContainer, world: int) -> None:
    """Change a configuration in place to three steps of few microbatches, without checkpoints and logs."""
    model, train = cfg.model, cfg.train
    model_parallel = model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    replicas = max(world // model_parallel, 1)
    # As many microbatches as the pipeline has in flight, and at least two, so that gradients are accumulated.
    microbatches = max(2, model.pipeline_model_parallel_size * (2 if model.virtual_pipeline_model_parallel_size else 1))
    train.global_batch_size = replicas * min(microbatches, -(-train.global_batch_size // replicas))
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
    logging.getLogger(checkpoint_manager.__name__).setLevel(logging.ERROR)  # it warns of runs that save nothing
    cfg.guard = None  # it would read losses
    cfg.dataset.num_workers, cfg.dataset.balance_over = 0, None
    if not has_data(cfg):
        cfg.dataset.path = "simulation"
    cfg.tokenizer = TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)


def _replace_row(cfg: ConfigContainer, make: Callable[[], TokenBatch], report: Simulation) -> None:
    """Make the data set return the same row, the result of `make`, for every microbatch; describe it in `report`."""

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
        cfg.dataset.dataloader_type = "external"  # an iterator; finalize() rejects this value
        return stream(), None, None

    type(cfg.dataset).stream, type(cfg.dataset).build_datasets = stream, build_datasets


class _NoWeights:
    """Replacement of `Pretrained` that reads no weights: adapters are inserted into an uninitialized model."""

    @classmethod
    def find(cls, path: str) -> _NoWeights:
        return cls()

    def check(self, provider: Any) -> None: ...

    def load(self, model: Any, groups: Any) -> None: ...


def has_data(cfg: ConfigContainer) -> bool:
    """Return True if the run has a `Qwen3VLConversationProvider` with a data path, and the data are not streamed.

    Rows of such data can be read by index, so `largest_row` can find the largest one.
    """
    data = cfg.dataset
    has_rows = isinstance(data, Qwen3VLConversationProvider) and not data.streaming
    return has_rows and any(path is not None for path in (data.path, data.train_path, data.mixture))


def largest_row(cfg: ConfigContainer) -> TokenBatch:
    """Return the row of the first epoch that has most patches.

    If several rows have equally many patches, return the row that has most tokens.

    Every conversation is measured, unless the data were packed before training.
    """
    rows = cfg.dataset.for_context_parallel(cfg.model.context_parallel_size).rows("train")

    def size(number: int) -> tuple[int, int]:
        sizes = [rows.samples.size(sample) for sample in rows.plan.row(number)]
        return sum(size.patches for size in sizes), sum(size.tokens for size in sizes)

    return rows.collate_fn([rows[max(range(rows.plan.end_of_epoch()), key=size)]])


def full_row(cfg: ConfigContainer) -> TokenBatch:
    """Return a packed row of `seq_length` tokens with images of equal size, and at least four other tokens per image.

    Each image is a segment. If one image does not exceed the budget of sparse attention, all images are one segment.
    Images are as large as the row and the dataset's `max_patches` allow. If `max_patches` leaves room for text, a
    segment has an image in each context-parallel chunk instead of one, so that ranks have equally many image tokens.
    """
    model, length = cfg.model, cfg.dataset.seq_length
    vision = model.vision_config
    merge = vision.spatial_merge_size
    multiple = segment_multiple(model.context_parallel_size)
    max_tokens = (getattr(cfg.dataset, "max_patches", None) or length * merge**2) // merge**2
    images = max(min(_IMAGES, max_tokens, length // 8), model.context_parallel_size)  # one per rank at least
    each = length // images // multiple * multiple
    in_segment = multiple if max_tokens < images * (each - 4) else 1
    tokens = max(min(each // in_segment - 4, max_tokens // (images * in_segment)), 1)
    height = math.isqrt(tokens)
    width = tokens // height
    # Sparse attention needs a segment longer than its budget. The planner expects one, too.
    segments = [each * images] if getattr(model, "indexer_budget", 0) >= each else [each] * images
    image = [model.vision_start_token_id, *[model.image_token_id] * (height * width), model.vision_end_token_id]
    text = 0  # any other token
    ids = [*image, *[text] * (each // in_segment - len(image))] * in_segment * images
    ids = torch.tensor(ids + [text] * (length - len(ids)))[None]
    layout = SequenceLayout.packed_row(segments, multiple=multiple, total=length)
    grids = torch.tensor([(1, merge * height, merge * width)] * in_segment * images)
    patches = int(grids.prod(-1).sum())
    features = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return TokenBatch.build(
        ids,
        ids.roll(-1),
        torch.ones(ids.shape),
        layout,
        VisionSettings.from_config(model),
        pixel_values=torch.zeros(patches, features, dtype=cfg.dataset.pixel_dtype or model.params_dtype),
        image_grid_thw=grids,
    )


class _Recorder(Callback):
    """Record memory of each phase, allocations of the first steps, and synchronizations of the last step."""

    def __init__(self, report: Simulation) -> None:
        self.report, self.start, self.step = report, time.monotonic(), 0
        self.allocated_before = 0  # bytes when the recorded step began
        self.counting = False  # True while collectives are counted
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.sync_callback = ExitStack()

    def record_phase(self, name: str) -> None:
        sizes = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        seconds = time.monotonic() - self.start
        self.report.phases.append(Phase(name, *sizes, seconds))
        show(f"after {seconds:.0f} s: {name}, {sizes[0] / GIB:.2f} GiB allocated", error=True)
        torch.cuda.reset_peak_memory_stats()

    def note_collective(self, name: str, nbytes: int) -> None:
        """Count a collective and its bytes if the current step is the one in which they are counted."""
        if self.counting:
            number, total = self.report.collectives.get(name, (0, 0))
            self.report.collectives[name] = number + 1, total + nbytes

    def record_model(self, chunks: Any) -> Any:
        """Record the memory of the model, and return the chunks. This is a post-wrap hook of the provider."""
        self.record_phase("model")
        return chunks

    def on_train_start(self, context: CallbackContext) -> None:
        self.record_phase("optimizer")
        step = context.optimizer.step

        def record_and_step(*args: Any, **kwargs: Any) -> Any:
            self.record_phase(f"step {self.step}, passes")
            return step(*args, **kwargs)

        context.optimizer.step = record_and_step

    def on_train_step_start(self, context: CallbackContext) -> None:
        if self.step <= _LAST_RECORDED:
            self.allocated_before = torch.cuda.memory_allocated()
            torch_memory.record_allocations()
        compiles = "; it compiles kernels and takes longest" if self.step == 0 else ""
        show(f"step {self.step} of 0 to {STEPS - 1}: {get_num_microbatches()} microbatches{compiles}", error=True)
        self.counting = self.step == _COUNTED
        if self.counting:
            self.sync_callback.enter_context(on_sync(self.count_sync))
        mark(f"step {self.step}")

    def count_sync(self, function: bytes) -> None:
        """Count a host-device synchronization for the innermost Python line on the stack.

        A gradient computed in C++ has no Python line.
        """
        frames = [
            dict(filename=frame.f_code.co_filename, line=line, name=frame.f_code.co_name)
            for frame, line in traceback.walk_stack(sys._getframe())
        ]
        line = _line(frames[1:])
        if not line.startswith("upstream/simulated_gpu.py:"):  # balances experts, only in simulations
            self.syncs[function.decode(), line] += 1

    def on_train_step_end(self, context: CallbackContext) -> None:
        mark("end")
        self.counting = False
        self.sync_callback.close()
        self.report.syncs = sorted(((number, *where) for where, number in self.syncs.items()), reverse=True)
        self.record_phase(f"step {self.step}, optimizer")
        self.record_held()
        self.step += 1

    def record_held(self) -> None:
        """Record the lines of code that allocated the memory in use at the peak of the recorded or failed step."""
        if self.step <= _LAST_RECORDED:
            trace = torch_memory.stop_recording()
            model = next((phase.allocated for phase in self.report.phases if phase.name == "model"), 0)
            states = [
                (model, 0, "the model: weights, gradients"),
                (self.allocated_before - model, 0, "optimizer states, workspaces"),
            ]
            self.report.held = [*(state for state in states if state[0] > 0), *_held_at_peak(trace)]


def _held_at_peak(trace: list[dict[str, Any]]) -> list[tuple[int, int, str]]:
    """Return (bytes, number of tensors, line of code) for the memory in use at the peak of a trace, largest first.

    Tensors are grouped by the line of code that allocated them: the innermost stack frame in one of `_PACKAGES`.
    """
    allocated, peak, end = 0, 0, 0
    for number, event in enumerate(trace):
        allocated += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        if allocated > peak:
            peak, end = allocated, number + 1
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
    """Return the folders from which the packages in `_PACKAGES` are imported."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    return tuple(f"{folder}/" for spec in specs if spec for folder in spec.submodule_search_locations or ())


def _line(frames: Iterable[dict[str, Any]]) -> str:
    """Return, as text, the innermost line of code on a stack that is in `_PACKAGES`, or else the innermost line."""
    frames = list(frames)
    known = [frame for frame in frames if frame["filename"].startswith(_folders())]
    backward = torch_memory.is_in_backward_pass(frames)
    if not (chosen := (known or frames)[:1]):
        return "no Python line"
    frame = chosen[0]
    place = "/".join(Path(frame["filename"]).parts[-2:])
    return f"{place}:{frame['line']} {frame['name']}{' (backward)' if backward else ''}"


def _count_launches(events: list[Event], report: Simulation) -> None:
    amounts: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.kind == "copy":
            amounts[event.name].append(event.amount)
        elif event.kind in ("kernel", "triton", "gemm", "memset"):
            amounts[event.kind].append(event.amount)
    report.launches = {name: (len(each), sum(each)) for name, each in amounts.items()}
    number, flops = report.launches.get("gemm", (0, 0))
    # A grouped GEMM in a single kernel has no sizes in the log, so its marks have the FLOPs. If it launches a GEMM for
    # each expert instead, these were counted above.
    grouped = 0
    for event in events:
        if event.kind == "gemm":
            grouped = 0
        elif event.name == _GROUPED_GEMM_END:
            flops, grouped = flops + grouped, 0
        elif event.name.startswith(_GROUPED_GEMM):
            grouped = int(event.name.removeprefix(_GROUPED_GEMM))
    report.launches["gemm"] = number, flops

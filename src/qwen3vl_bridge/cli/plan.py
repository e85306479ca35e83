"""`qwen3vl plan`: estimate the memory of a run on each GPU, and propose parallel layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
from qwen3vl_bridge.planning import plan_reports
from qwen3vl_bridge.planning.estimate import estimate
from qwen3vl_bridge.planning.hardware import GIB, GPUS, find_gpu
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.planning.proposals import propose
from qwen3vl_bridge.planning.training_settings import (
    BF16,
    FP8_PRECISIONS,
    NGRAM_TABLE,
    PRECISIONS,
    TEXT_RECOMPUTE_MODULES,
    VISION_RECOMPUTE_MODULES,
    LoraSettings,
    Recompute,
    Sharding,
    TrainingSettings,
)
from qwen3vl_bridge.registry import dimensions_of, preset, preset_sizes
from qwen3vl_bridge.terminal import CommandParser, at_least, run
from qwen3vl_bridge.weights.fp8 import E4M3
from qwen3vl_bridge.weights.rows import Component

_NO_FIT = 1
_POSITIVE = at_least(1)
_SIZES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "vpp": "virtual pipeline stages on each rank",
    "cp": "context parallelism",
    "ep": "expert parallelism",
    "etp": "expert tensor parallelism",
}


def main(arguments: Sequence[str] | None = None, *, prog: str = "qwen3vl plan") -> int:
    """Print the memory of a parallel layout, or proposed layouts; return 0, 1 if none fits, or 2 for invalid input."""
    options = _parser(prog).parse_args(arguments)
    return run(lambda: _plan(options), ValueError, OSError)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = CommandParser(
        prog=prog,
        description="Estimate the memory of each GPU while a model trains. Without any parallel size, or with "
        "--propose, propose parallel layouts that fit. docs/scaling.md lists what is counted and what is assumed.",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="MODEL",
        help=f"{', '.join(preset_sizes())}, a hub id such as Qwen/Qwen3.5-4B, or a folder")  # fmt: skip
    add("--gpus", required=True, type=_POSITIVE, metavar="N", help="number of GPUs")
    add("--gpu", default="H100", metavar="NAME", help=f"{', '.join(GPUS)} (default: %(default)s)")
    add("--gpu-memory", type=float, metavar="GIB", help="memory of one GPU, if it differs from the table")
    add("--seq-length", type=_POSITIVE, default=4096, metavar="N", help="tokens in a row (default: %(default)s)")
    add("--max-patches", type=int, metavar="N", help="patches in a row (default: as many as its tokens allow)")
    add("--micro-batch-size", type=_POSITIVE, default=1, metavar="N", help="rows in a microbatch (default: 1)")
    add("--global-batch-size", type=_POSITIVE, metavar="N",
        help="rows in a step (default: enough to keep the pipeline stages busy)")  # fmt: skip
    add("--kind", choices=("sft", "pretrain", "peft"), default="sft",
        help="sft and pretrain train everything not frozen, peft only LoRA (default: %(default)s)")  # fmt: skip
    add("--lora-rank", type=_POSITIVE, default=32, metavar="N", help="with --kind peft (default: %(default)s)")
    freezable = [*(component.value for component in Component), NGRAM_TABLE]
    add("--freeze", nargs="+", default=[], choices=freezable, metavar="COMPONENT",
        help=f"what is not trained: {', '.join(freezable)}")  # fmt: skip
    add("--ngram-table-dtype", choices=(E4M3,), metavar="DTYPE",
        help=f"{E4M3}: a frozen n-gram table in FP8 (default: the precision of the other weights)")  # fmt: skip
    add("--mtp", action="store_true", help="train multi-token prediction, as with mtp_loss_scaling_factor above 0")
    add("--precision", choices=(*PRECISIONS, *FP8_PRECISIONS), default="bf16",
        help="bf16 is mixed precision, fp8_cs and fp8_mx the same in 8 bits (default: %(default)s)")  # fmt: skip
    for name, words in _SIZES.items():
        add(f"--{name}", type=_POSITIVE, metavar="N", help=words)
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, help="(default: with --tp above 1)")
    add("--fsdp", action="store_true", help="Megatron-FSDP (optim_grads_params) instead of the distributed optimizer")
    add("--no-distributed-optimizer", action="store_true", help="the complete optimizer state on every rank")
    for prefix, modules in (("", TEXT_RECOMPUTE_MODULES), ("vision-", VISION_RECOMPUTE_MODULES)):
        add(f"--{prefix}recompute", choices=("none", "selective", "full"), default="none",
            help=f"recompute_granularity of the {'tower' if prefix else 'language model'} (default: none)")  # fmt: skip
        add(f"--{prefix}recompute-modules", nargs="+", choices=sorted(modules), metavar="NAME",
            help=f"with selective: {', '.join(sorted(modules))} (default: core_attn)")  # fmt: skip
        add(f"--{prefix}recompute-method", choices=("uniform", "block"), help="with full (default: uniform)")
        add(f"--{prefix}recompute-num-layers", type=_POSITIVE, metavar="N", help="with full (default: 1)")
    add("--no-fused-activation", action="store_true", help="model.bias_activation_fusion=False")
    add("--expert-load", type=float, default=1.0, metavar="X",
        help="most tokens on a rank, divided by the mean over expert-parallel ranks (default: 1)")  # fmt: skip
    add("--vision-gpus", type=_POSITIVE, metavar="N",
        help="number of GPUs, out of --gpus, that hold only the vision tower (dist-train)")  # fmt: skip
    add("--vision-tp", type=_POSITIVE, metavar="N", help="with --vision-gpus: the tower's tensor parallelism")
    add("--propose", action="store_true", help="propose parallel layouts; sizes that are given are kept")
    add("--json", action="store_true", help="print JSON, in bytes")
    return parser


def _plan(options: argparse.Namespace) -> int:
    dims, training = dimensions_of(_load_config(options.model)), _training(options)
    if training.freezes_ngram_table and not dims.indices.get("ple_layers"):
        raise ValueError(f"--freeze lists {NGRAM_TABLE}, but {options.model} has no n-gram table; remove it")
    if training.fp8_ngram_table and not dims.indices.get("ple_layers"):
        raise ValueError(f"--ngram-table-dtype is given, but {options.model} has no n-gram table; remove it")
    gpu = find_gpu(options.gpu)
    if options.gpu_memory is not None:
        gpu = replace(gpu, memory_bytes=round(options.gpu_memory * GIB))
    memory = gpu.memory_bytes
    sizes = {name: size for name in _SIZES if (size := getattr(options, name)) is not None}
    vision_layout, language_gpus = None, options.gpus
    if options.vision_gpus is not None:
        vision_layout = ParallelLayout(options.vision_gpus, tp=options.vision_tp or 1)
        language_gpus -= options.vision_gpus
        if language_gpus < 1:
            raise ValueError(f"--vision-gpus is {options.vision_gpus}, expected fewer than --gpus, {options.gpus}")
    elif options.vision_tp is not None:
        raise ValueError("--vision-tp is given without --vision-gpus, expected both or neither")
    if options.propose or not (sizes or options.fsdp or options.no_distributed_optimizer):
        recomputed = training.recompute.granularity or training.vision_recompute.granularity
        if recomputed or options.sequence_parallel is False:
            raise ValueError(
                "--propose chooses recomputation and sequence parallelism; omit these options, or --propose"
            )
        if wrong := sizes.keys() & {"vpp", "etp"}:
            raise ValueError(f"--propose does not try {', '.join(sorted(wrong))}; omit these options, or --propose")
        proposals, least = propose(dims, options.gpus, gpu, training, fixed=sizes, vision_layout=vision_layout)
        if options.json:
            print(json.dumps([plan_reports.dump_estimate(proposal, memory) for proposal in proposals], indent=2))
        elif proposals:
            plan_reports.print_proposals(proposals, memory)
        else:
            plan_reports.print_no_fit(least, memory)
        return 0 if proposals else _NO_FIT
    sharded = sizes.get("tp", 1) > 1 if options.sequence_parallel is None else options.sequence_parallel
    layout = ParallelLayout(language_gpus, **sizes, sequence_parallel=sharded)
    plan = estimate(dims, layout, training, vision_layout)
    if options.json:
        print(json.dumps(plan_reports.dump_estimate(plan, memory), indent=2))
    else:
        plan_reports.print_estimate(plan, memory)
    return 0 if plan.peak.total <= memory else _NO_FIT


def _load_config(model: str) -> Mapping[str, Any]:
    """Return the `config.json` of a preset, a local folder, or a model on the hub."""
    if not (Path(model) / "config.json").is_file():
        try:
            return preset(model)
        except ValueError:
            if not Path(model).exists() and "/" not in model:
                raise
    return ModelConfig(find_model(model, weights=False)).raw


def _training(options: argparse.Namespace) -> TrainingSettings:
    if options.fsdp and options.no_distributed_optimizer:
        raise ValueError("--fsdp and --no-distributed-optimizer are both given, expected only one of them")
    sharding = Sharding.NONE if options.no_distributed_optimizer else Sharding.OPTIMIZER
    precision = PRECISIONS.get(options.precision, BF16)
    if options.fsdp:  # Megatron-FSDP keeps main weights for float32 parameters too
        sharding, precision = Sharding.ALL, replace(precision, main=4)
    return TrainingSettings(
        seq_length=options.seq_length,
        micro_batch_size=options.micro_batch_size,
        global_batch_size=options.global_batch_size,
        max_patches=options.max_patches,
        precision=precision,
        fp8=FP8_PRECISIONS.get(options.precision),
        sharding=sharding,
        recompute=_recompute(options, ""),
        vision_recompute=_recompute(options, "vision_"),
        frozen=frozenset(component for component in Component if component.value in options.freeze),
        lora=LoraSettings(options.lora_rank) if options.kind == "peft" else None,
        fused_activation=not options.no_fused_activation,
        expert_load=options.expert_load,
        trains_mtp=options.mtp,
        freezes_ngram_table=NGRAM_TABLE in options.freeze,
        fp8_ngram_table=options.ngram_table_dtype == E4M3,
    )


def _recompute(options: argparse.Namespace, prefix: str) -> Recompute:
    granularity, modules, method, number = (
        getattr(options, f"{prefix}recompute{name}") for name in ("", "_modules", "_method", "_num_layers")
    )
    if granularity == "full":
        method, number = method or "uniform", number or 1
    if granularity == "selective":
        modules = modules or ["core_attn"]
    return Recompute(None if granularity == "none" else granularity, frozenset(modules or ()), method, number)

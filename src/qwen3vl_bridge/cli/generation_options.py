"""Command-line options for generation: how tokens are chosen, and the parallel sizes."""

from __future__ import annotations

import argparse
import logging
import math
import os
from pathlib import Path
from typing import Any

from qwen3vl_bridge.terminal import at_least

_SIZES = {
    "tp": ("tensor", "tensor_model_parallel_size"),
    "pp": ("pipeline", "pipeline_model_parallel_size"),
    "cp": ("context", "context_parallel_size"),
    "ep": ("expert", "expert_model_parallel_size"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for choosing tokens, and the parallel sizes, to the parser of a command."""
    add = parser.add_argument
    add("--do-sample", action="store_true", help="draw tokens at random instead of taking the most likely ones")
    add("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (default: %(default)s)")
    add("--top-k", type=at_least(0), default=0, metavar="K", help="draw from the K most likely tokens (default: all)")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the most likely tokens, as many as have the "
        "probability P together (default: all)")  # fmt: skip
    add("--seed", type=at_least(0), metavar="N", help="seed of the drawn tokens (default: 0)")
    add_sizes(parser)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Add --tp, --pp, --cp and --ep, the parallel sizes of the model."""
    for option, (kind, _) in _SIZES.items():
        meaning = f"{kind}-parallel size (default: %(default)s)"
        parser.add_argument(f"--{option}", type=at_least(1), default=1, metavar="N", help=meaning)


def hide_logs() -> None:
    """Hide the messages of libraries, and messages of this package below warnings."""
    from qwen3vl_bridge.upstream.library_logs import quiet

    quiet()
    logging.getLogger("qwen3vl_bridge").setLevel(logging.WARNING)


def find_weights(options: argparse.Namespace) -> Path:
    """Check `--hf-model` and `--megatron-path`, and return the folder of `--hf-model`.

    Call this before the slow imports. For a folder without a model, transformers would request each missing file from
    the hub, and Megatron-Bridge would report a network error.

    Raises:
        CheckpointError: the weights are missing or incomplete.
    """
    from qwen3vl_bridge.checkpoint.formats.huggingface import HFWeights, find_model
    from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration
    from qwen3vl_bridge.checkpoint.stored_models import ModelConfig
    from qwen3vl_bridge.peft.stored_adapters import check_complete_model

    if options.megatron_path is not None:
        check_complete_model(find_iteration(Path(options.megatron_path)))
    folder = find_model(options.hf_model, weights=options.megatron_path is None)
    ModelConfig(folder)
    if options.megatron_path is None:
        HFWeights(folder)
    return folder


def generation_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `generate` that choose tokens, such as `top_k`; raise ValueError for a wrong value."""
    from qwen3vl_bridge.inference.sampling import Sampling

    return vars(Sampling(options.do_sample, options.temperature, options.top_k, options.top_p, options.seed))


def parallel_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the provider's fields for the parallel sizes above 1 and for sequence parallelism, by name.

    Raises:
        ValueError: the sizes do not fit the number of processes.
    """
    processes, model, experts = int(os.environ.get("WORLD_SIZE", "1")), options.tp * options.pp * options.cp, options.ep
    if processes % model or processes // options.pp % experts:
        least = math.lcm(model, options.pp * experts)
        raise ValueError(
            f"found {processes} processes for --tp {options.tp} --pp {options.pp} --cp {options.cp} --ep {experts}, "
            f"expected a multiple of {least}: start the command with torchrun --nproc_per_node {least}"
        )
    settings: dict[str, Any] = {}
    for option, (_, field) in _SIZES.items():
        if (size := getattr(options, option)) > 1:
            settings[field] = size
    if options.tp > 1:
        settings["sequence_parallel"] = True  # linear attention and experts need it
    return settings

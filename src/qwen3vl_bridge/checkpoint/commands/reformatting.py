"""Reformat: converts a Megatron checkpoint to the other format, without Hugging Face in between."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.commands.converting import convert
from qwen3vl_bridge.checkpoint.engine.conversion import ConversionOptions, run_conversion
from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion
from qwen3vl_bridge.checkpoint.engine.reports import ConversionReport
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE
from qwen3vl_bridge.checkpoint.planning.topology import Topology
from qwen3vl_bridge.checkpoint.stored_models.megatron_model import open_stored
from qwen3vl_bridge.checkpoint.stored_models.megatron_writer import MegatronTarget


def reformat_checkpoint(
    megatron_path: str | Path,
    new_path: str | Path,
    *,
    ckpt_format: str,
    hf_model: str | Path | None = None,
    torch_dtype: str | None = None,
    topology: Topology | None = None,
    naming: str = TRANSFORMER_ENGINE,
    vocab_divisor: int | None = None,
    iteration: int | None = None,
    trust_remote_code: bool = False,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Write the weights of a Megatron checkpoint in another format, layer spec or dtype.

    Optimizer state is ignored.

    Args:
        megatron_path: the checkpoint's root folder, or an iteration's folder.
        new_path: the new checkpoint's root folder, to be created.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        hf_model: folder or hub id of a model whose configuration, tokenizer and processor to use; None for those in the
            checkpoint.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to keep their dtypes.
        topology: parallel sizes for which files are laid out; the checkpoint can be loaded with any others.
        naming: layer spec of parameter names, "transformer_engine" or "local".
        vocab_divisor: pad the vocabulary to a multiple of this times the tensor-parallel size; None for the present
            padding.
        iteration: the iteration; None for the latest.
        trust_remote_code: whether to copy code that the configuration of `hf_model` refers to. It is never run here.
        options: overwrite, resume, verify and more, see `ConversionOptions`.

    Returns:
        A report of the conversion.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code).with_padding()
        origin = stored.manifest.get("hf_model") or hf_model or megatron_path
        target = MegatronTarget(
            ckpt_format,
            naming,
            topology or Topology(),
            stored.config,
            str(origin),
            stored.experts,
            stored.vocab_divisor if vocab_divisor is None else vocab_divisor,
            stored.float32_as,
        )
        target.check()
        return convert("reformat", megatron_path, new_path, stored, target, torch_dtype=torch_dtype)

    return run_conversion(planned, options)

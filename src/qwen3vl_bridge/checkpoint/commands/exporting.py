"""Export: converts a Megatron checkpoint to a Hugging Face model."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.commands.converting import convert
from qwen3vl_bridge.checkpoint.engine.conversion import ConversionOptions, run_conversion
from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion
from qwen3vl_bridge.checkpoint.engine.reports import ConversionReport
from qwen3vl_bridge.checkpoint.formats.safetensors.writer import MAX_SHARD_BYTES
from qwen3vl_bridge.checkpoint.planning.plan import leave_unexpected
from qwen3vl_bridge.checkpoint.stored_models.hf_writer import HFTarget
from qwen3vl_bridge.checkpoint.stored_models.megatron_model import open_stored
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.weights.rows import ExpertLayout


def export_checkpoint(
    megatron_path: str | Path,
    hf_path: str | Path,
    *,
    hf_model: str | Path | None = None,
    torch_dtype: str | None = None,
    iteration: int | None = None,
    expert_layout: str | None = None,
    strict: bool = True,
    drop_vocab_padding: bool = False,
    trust_remote_code: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Write a Hugging Face model from a Megatron checkpoint of either format; its optimizer state is ignored.

    Args:
        megatron_path: the checkpoint's root folder, or an iteration's folder.
        hf_path: the model's folder, to be created.
        hf_model: folder or hub id of a model whose configuration, tokenizer and processor to use; None for those that
            an import put into the checkpoint.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to keep their dtypes.
        iteration: the iteration; None for the latest.
        expert_layout: "input_major" as released, "output_major" as transformers 5 saves its own, or "per_expert"; None
            for that of the model from which the checkpoint was imported.
        strict: whether tensors that the model does not have are an error; otherwise they are ignored.
        drop_vocab_padding: whether to drop rows beyond the vocabulary that are not zero, as after training with a
            padded vocabulary; otherwise they are an error.
        trust_remote_code: whether to copy code that the configuration of `hf_model` refers to. It is never run here.
        max_shard_bytes: maximum size of a weight file.
        options: overwrite, resume, verify and more, see `ConversionOptions`.

    Returns:
        A report of the conversion.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code)
        experts = stored.experts if expert_layout is None else _layout_named(expert_layout)
        if not strict:
            stored.notes[:0] = leave_unexpected(stored.tensors, stored.config.rows(experts), stored.layout)
        float32_as = stored.float32_in_export(torch_dtype)
        target = HFTarget(stored.config, experts, stored.ckpt_format, max_shard_bytes, float32_as)
        cast, drop = torch_dtype, drop_vocab_padding
        return convert("export", megatron_path, hf_path, stored, target, torch_dtype=cast, drop_vocab_padding=drop)

    return run_conversion(planned, options)


def _layout_named(name: str) -> ExpertLayout:
    try:
        return ExpertLayout[name.upper()]
    except KeyError:
        expected = ", ".join(layout.name.lower() for layout in ExpertLayout)
        raise CheckpointError(f"expert_layout is {name!r}, expected {expected}") from None

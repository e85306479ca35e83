"""Import: converts a Hugging Face model to a Megatron checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.commands.converting import convert
from qwen3vl_bridge.checkpoint.engine.conversion import ConversionOptions, run_conversion
from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion
from qwen3vl_bridge.checkpoint.engine.reports import ConversionReport
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE
from qwen3vl_bridge.checkpoint.formats.megatron import folder as megatron
from qwen3vl_bridge.checkpoint.planning.topology import Topology
from qwen3vl_bridge.checkpoint.stored_models.hf_model import open_model
from qwen3vl_bridge.checkpoint.stored_models.megatron_writer import MegatronTarget


def import_checkpoint(
    hf_model: str | Path,
    megatron_path: str | Path,
    *,
    ckpt_format: str = megatron.FSDP_DTENSOR,
    torch_dtype: str | None = None,
    topology: Topology | None = None,
    naming: str = TRANSFORMER_ENGINE,
    vocab_divisor: int | None = None,
    strict: bool = True,
    trust_remote_code: bool = False,
    **options: Unpack[ConversionOptions],
) -> ConversionReport:
    """Write a Megatron checkpoint from a Hugging Face model.

    Args:
        hf_model: its folder, or a hub id.
        megatron_path: the checkpoint's root folder, to be created.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to keep their dtypes.
        topology: parallel sizes for which files are laid out; the checkpoint can be loaded with any others.
        naming: layer spec of parameter names, "transformer_engine" or "local".
        vocab_divisor: pad the vocabulary to a multiple of this times the tensor-parallel size, as Megatron does with
            `make_vocab_size_divisible_by`; None for no padding. An fsdp_dtensor checkpoint must have the model's rows.
        strict: whether tensors that the model does not have are an error; otherwise they are ignored.
        trust_remote_code: whether to copy code that the model's configuration refers to. It is never run here.
        options: overwrite, resume, verify and more, see `ConversionOptions`.

    Returns:
        A report of the conversion.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        model = open_model(hf_model, strict=strict, trust_remote_code=trust_remote_code)
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), model.config, str(hf_model), model.experts, vocab_divisor),
            float32_of_hf=model.float32_as,
        )
        target.check()
        return convert("import", hf_model, megatron_path, model, target, torch_dtype=torch_dtype)

    return run_conversion(planned, options)

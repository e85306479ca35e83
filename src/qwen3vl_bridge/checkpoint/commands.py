"""Import, export and reformat: converting a model from one format to another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import drop_unexpected, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.huggingface import MAX_SHARD_BYTES
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE
from qwen3vl_bridge.checkpoint.stored_models import StoredModel, open_model, open_stored
from qwen3vl_bridge.checkpoint.targets import HFTarget, MegatronTarget
from qwen3vl_bridge.checkpoint.topology import Topology
from qwen3vl_bridge.io.files import CheckpointError, absolute
from qwen3vl_bridge.weights.rows import ExpertLayout


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
    **options: Any,
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

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        model = open_model(hf_model, strict=strict, trust_remote_code=trust_remote_code)
        origin, experts = str(hf_model), model.experts
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), model.config, origin, experts, vocab_divisor),
            model.float32_as,
        )
        return _planned("import", hf_model, megatron_path, model, target, torch_dtype)

    return run_conversion(planned, ConversionOptions(**options))


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
    **options: Any,
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

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code)
        config, experts = stored.config, stored.experts
        if expert_layout is not None:
            if expert_layout.upper() not in ExpertLayout.__members__:
                names = ", ".join(layout.name.lower() for layout in ExpertLayout)
                raise CheckpointError(f"expert_layout is {expert_layout!r}, expected {names}")
            experts = ExpertLayout[expert_layout.upper()]
        if not strict:
            stored.notes[:0] = drop_unexpected(stored.tensors, config.rows(experts), stored.layout)
        moe = bool(config.dimensions.indices["moe_layers"])
        settings = {"from": stored.ckpt_format, "expert_layout": experts.name if moe else None}
        target = HFTarget(config, experts, settings, max_shard_bytes, stored.float32_in_export(torch_dtype))
        return _planned("export", megatron_path, hf_path, stored, target, torch_dtype, drop=drop_vocab_padding)

    return run_conversion(planned, ConversionOptions(**options))


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
    **options: Any,
) -> ConversionReport:
    """Write the weights of a Megatron checkpoint in another format, layer spec or dtype, without Hugging Face between.

    Optimizer state is ignored. Arguments are those of `import_checkpoint` and `export_checkpoint`, except:

    Args:
        new_path: the new checkpoint's root folder, to be created.
        hf_model: folder or hub id of a model whose configuration, tokenizer and processor to use; None for those in the
            checkpoint.
        vocab_divisor: pad the vocabulary to a multiple of this times the tensor-parallel size; None for the present
            padding.

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code).with_padding()
        origin = stored.manifest.get("hf_model") or hf_model or megatron_path
        divisor = stored.vocab_divisor if vocab_divisor is None else vocab_divisor
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), stored.config, str(origin), stored.experts, divisor),
            stored.float32_as,
        )
        return _planned("reformat", megatron_path, new_path, stored, target, torch_dtype)

    return run_conversion(planned, ConversionOptions(**options))


def _planned(
    name: str,
    origin: str | Path,
    path: str | Path,
    source: StoredModel,
    target: HFTarget | MegatronTarget,
    torch_dtype: str | None,
    *,
    drop: bool = False,
) -> Conversion:
    """Plan a conversion; `drop` is whether rows beyond the vocabulary that are not zero are dropped."""
    rows, dtypes = source.config.rows(target.experts), dict(dtype=torch_dtype, float32_as=target.float32_as)
    plan = make_plan(rows, source.layout, target.layout, source.tensors.specs, where=str(source.folder), **dtypes)
    padding = source.check_padding(source.config.dimensions["vocab"], drop=drop)
    target.lay_out(plan)
    folders, notes = (source.folder, source.config.folder), [*padding, *source.notes]
    return Conversion(name, str(origin), absolute(path), plan, source.tensors, folders, target, notes)

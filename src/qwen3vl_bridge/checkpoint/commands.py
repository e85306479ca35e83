"""Import, export and reformat: converting a model from one format to another."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Unpack

from qwen3vl_bridge.checkpoint.conversion import Conversion, ConversionOptions, ConversionReport, Output, run_conversion
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, drop_unexpected, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.huggingface import MAX_SHARD_BYTES
from qwen3vl_bridge.checkpoint.formats.layouts import TRANSFORMER_ENGINE, HuggingFace, TensorLayout
from qwen3vl_bridge.checkpoint.stored_models import StoredModel, open_model, open_stored
from qwen3vl_bridge.checkpoint.targets import HFOutput, MegatronOutput, MegatronTarget
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

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        model = open_model(hf_model, strict=strict, trust_remote_code=trust_remote_code)
        target = MegatronTarget(
            *(ckpt_format, naming, topology or Topology(), model.config, str(hf_model), model.experts, vocab_divisor),
            float32_of_hf=model.float32_as,
        )
        return _to_megatron("import", hf_model, megatron_path, model, target, torch_dtype)

    return run_conversion(planned, options)


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

    Raises:
        CheckpointError: the source, the target or an option is invalid. The target is unchanged.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code)
        config, experts = stored.config, stored.experts
        if expert_layout is not None:
            names = {layout.name.lower(): layout for layout in ExpertLayout}
            if expert_layout.lower() not in names:
                raise CheckpointError(f"expert_layout is {expert_layout!r}, expected {', '.join(names)}")
            experts = names[expert_layout.lower()]
        if not strict:
            stored.notes[:0] = drop_unexpected(stored.tensors, config.rows(experts), stored.layout)
        moe = bool(config.dimensions.indices["moe_layers"])
        settings = {"from": stored.ckpt_format, "expert_layout": experts.name if moe else None}
        return _planned(
            *("export", megatron_path, hf_path, stored, HuggingFace(config.dimensions), experts),
            lambda plan: HFOutput(plan, config, settings, max_shard_bytes),
            torch_dtype=torch_dtype,
            float32_as=stored.float32_in_export(torch_dtype),
            drop_vocab_padding=drop_vocab_padding,
        )

    return run_conversion(planned, options)


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
        return _to_megatron("reformat", megatron_path, new_path, stored, target, torch_dtype)

    return run_conversion(planned, options)


def _to_megatron(
    name: str, origin: str | Path, path: str | Path, source: StoredModel, target: MegatronTarget, dtype: str | None
) -> Conversion:
    target.check()
    return _planned(
        *(name, origin, path, source, target.layout, target.experts),
        lambda plan: MegatronOutput(plan, target),
        torch_dtype=dtype,
        float32_as="float32",  # as in the running model
    )


def _planned(
    name: str,
    origin: str | Path,
    path: str | Path,
    source: StoredModel,
    layout: TensorLayout,
    experts: ExpertLayout,
    output: Callable[[Plan], Output],
    *,
    torch_dtype: str | None,
    float32_as: str | None,
    drop_vocab_padding: bool = False,
) -> Conversion:
    """Plan a conversion to a layout; `experts` is their format in the Hugging Face model on either side."""
    rows = source.config.rows(experts)
    dtypes = dict(dtype=torch_dtype, float32_as=float32_as)
    plan = make_plan(rows, source.layout, layout, source.tensors.specs, where=str(source.folder), **dtypes)
    padding = source.check_padding(source.config.dimensions["vocab"], drop=drop_vocab_padding)
    folders, notes = (source.folder, source.config.folder), [*padding, *source.notes]
    return Conversion(name, str(origin), absolute(path), plan, source.tensors, folders, output(plan), notes)

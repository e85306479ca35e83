"""Export: a Megatron checkpoint becomes a Hugging Face model.

What lives here: what is read and what is made of it. What may not: how anything is done.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from qwen3vl_bridge.checkpoint.engine.conversion import Conversion, How, carry_out
from qwen3vl_bridge.checkpoint.engine.reports import ConversionReport
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import HUGGINGFACE, copy_side_files
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import HFWeights
from qwen3vl_bridge.checkpoint.formats.safetensors.writer import MAX_SHARD_BYTES, layout, write_index
from qwen3vl_bridge.checkpoint.planning.plan import Plan, leave_unexpected, make_plan
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig, with_dtype
from qwen3vl_bridge.checkpoint.stored_models.stored_model import open_stored
from qwen3vl_bridge.files.errors import CheckpointError
from qwen3vl_bridge.files.json_files import write_object
from qwen3vl_bridge.files.paths import place
from qwen3vl_bridge.models.qwen3_vl.table import ExpertLayout


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
    **how: Unpack[How],
) -> ConversionReport:
    """Write a Hugging Face model from a Megatron checkpoint of either format; optimizer state in it is left aside.

    Args:
        megatron_path: the checkpoint's root folder, or an iteration's folder.
        hf_path: the model's folder, to be made.
        hf_model: folder or hub id of a model whose configuration, tokenizer and processor to take; None for those
            that an import put into the checkpoint.
        torch_dtype: "float32", "float16" or "bfloat16" to cast the weights; None to leave their bytes as they are.
        iteration: which iteration; None for the latest.
        expert_layout: "input_major" as released, "output_major" as transformers 5 saves its own, or "per_expert"; None
            for that of the model the checkpoint was imported from.
        strict: whether tensors that the model does not call for are an error; otherwise they are left aside.
        drop_vocab_padding: whether to leave out rows beyond the vocabulary that are not zero, as of a model that was
            trained with a padded vocabulary; otherwise they are an error.
        trust_remote_code: whether to take along code that the configuration of `hf_model` calls for. It is never run
            here.
        max_shard_bytes: how large a file of weights may be.
        how: overwrite, resume, verify and more, see `How`.

    Returns:
        What was done.

    Raises:
        CheckpointError: the source, the target or an option is not as it must be. The target is as it was before.
    """

    def planned() -> Conversion:
        stored = open_stored(megatron_path, iteration, hf_model, trust_remote_code=trust_remote_code)
        experts = stored.experts if expert_layout is None else _layout_named(expert_layout)
        rows, notes = stored.config.rows(experts), []
        if not strict:
            notes += leave_unexpected(stored.tensors, rows, stored.side)
        target, where = HuggingFace(stored.config.dimensions), str(stored.folder)
        plan = make_plan(rows, stored.side, target, stored.tensors.specs, where=where, dtype=torch_dtype)
        notes += stored.check_padding(stored.config.dimensions["vocab"], drop=drop_vocab_padding)
        notes += stored.notes
        moe = bool(stored.config.dimensions.indices["moe_layers"])
        settings = {"from": stored.ckpt_format, "expert_layout": experts.name if moe else None}
        output = HFOutput(plan, stored.config, settings, max_shard_bytes)
        folders = (stored.folder, stored.config.folder)
        return Conversion("export", str(megatron_path), place(hf_path), plan, stored.tensors, folders, output, notes)

    return carry_out(planned, how)


def _layout_named(name: str) -> ExpertLayout:
    try:
        return ExpertLayout[name.upper()]
    except KeyError:
        expected = ", ".join(layout.name.lower() for layout in ExpertLayout)
        raise CheckpointError(f"expert_layout is {name!r}, expected {expected}") from None


class HFOutput:
    """A Hugging Face model to be."""

    inner = "."

    def __init__(self, plan: Plan, config: ModelConfig, said: dict[str, Any], max_shard_bytes: int) -> None:
        """A model to be.

        Args:
            plan: its tensors.
            config: its configuration.
            said: what its manifest says of it.
            max_shard_bytes: how large a file of weights may be.

        Raises:
            CheckpointError: files have no size.
        """
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, expected 1 or more")
        self._plan, self._config, self._max_shard_bytes = plan, config, max_shard_bytes
        self.files = layout(plan.tasks, max_shard_bytes)
        self.settings = {"format": HUGGINGFACE} | said

    def finish(self, root: Path, digest: str) -> None:
        """Write what a model's folder has beside its weights."""
        write_index(root, self._plan.tasks, self._max_shard_bytes)
        copy_side_files(self._config.folder, root)
        if len(self._plan.dtypes) == 1:
            raw = with_dtype(self._config.raw, self._plan.dtypes[0])
            if raw != self._config.raw:
                write_object(root / "config.json", raw)

    def open(self, root: Path) -> HFWeights:
        """The weights as found."""
        return HFWeights(root)

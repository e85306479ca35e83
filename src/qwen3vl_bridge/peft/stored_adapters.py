"""Read the adapters in a run's checkpoint: the settings in its run_config.yaml, and the tensors."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import Plan, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp import DcpTensors, read_metadata
from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace, TensorLayout, TorchDist
from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, compare_with_stored, find_layout, own_config
from qwen3vl_bridge.core.files import CheckpointError, expanded
from qwen3vl_bridge.peft.adapter_rows import AdapterSettings, adaptable_rows, adapter_row, layer_name
from qwen3vl_bridge.weights.rows import (
    ADAPTER_MARK,
    NAMED_IF_MIXED,
    Component,
    ExpertLayout,
    GatedMLP,
    WeightRow,
    local_name,
)

# Classes of adapters, and whether they are DoRA. Megatron-Bridge's classes adapt all components, and LoRA also experts.
_OURS = {"qwen3vl_bridge.peft.Qwen3VLLoRA": False, "qwen3vl_bridge.peft.Qwen3VLDoRA": True}
_BRIDGES = {
    "megatron.bridge.peft.lora.LoRA": False,
    "megatron.bridge.peft.lora.VLMLoRA": False,
    "megatron.bridge.peft.dora.DoRA": True,
}
# Fields that may differ in a resumed run: they do not affect the tensors or their meaning.
_MAY_DIFFER = {
    *("dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method"),
    *("sequence_parallel_input_regather", "a2a_experimental", "params_to_save"),
}
# All indices that names in a torch_dist checkpoint may have.
_NAMED = frozenset({*NAMED_IF_MIXED, "vision_layers", "deepstack_mergers"})


def adapter_settings(config: dict[str, Any], folder: Path) -> AdapterSettings:
    """Return the adapter settings of a run.

    Args:
        config: contents of the folder's run_config.yaml.
        folder: folder of the checkpoint, for error messages.

    Raises:
        CheckpointError: the run had no adapters, adapters of an unknown class, or invalid settings.
    """
    peft, methods = config.get("peft"), _OURS | _BRIDGES
    if not isinstance(peft, dict):
        raise CheckpointError(f"{folder} was saved by a run without adapters: peft is {peft!r} in its {RUN_CONFIG}")
    method = peft.get("_target_")
    if not isinstance(method, str) or method not in methods:
        raise CheckpointError(f"{folder / RUN_CONFIG}: peft is {method!r}, expected one of {', '.join(methods)}")
    fields: dict[str, Any] = peft
    if method in _BRIDGES:
        fields = (
            peft
            | {f"adapt_{component.value}": True for component in Component}
            | {"adapt_experts": not methods[method]}
        )
    try:
        dim, alpha, experts = (fields[name] for name in ("dim", "alpha", "adapt_experts"))
        targets, excluded = (fields[name] or [] for name in ("target_modules", "exclude_modules"))
        components = frozenset(each.value for each in Component if fields[f"adapt_{each.value}"] is True)
    except KeyError as error:
        raise CheckpointError(f"{folder / RUN_CONFIG}: the section peft lacks the field {error}") from error
    are_names = all(isinstance(x, list) and all(isinstance(name, str) for name in x) for x in (targets, excluded))
    if type(dim) is not int or dim < 1 or type(alpha) not in (int, float) or not are_names:
        raise CheckpointError(
            f"{folder / RUN_CONFIG}: peft has dim {dim!r}, alpha {alpha!r}, target_modules {targets!r} and "
            f"exclude_modules {excluded!r}; expected a whole number above 0, a number, and two lists of names"
        )
    return AdapterSettings(dim, alpha, methods[method], components, tuple(targets), tuple(excluded), experts is True)


def check_complete_model(folder: Path) -> None:
    """Raise CheckpointError if a checkpoint contains only adapters instead of a complete model."""
    if (folder / RUN_CONFIG).is_file() and read_run_config(folder).get("peft") is not None:
        raise CheckpointError(
            f"{folder} holds only the adapters and other parameters that a run trained, expected a complete model: "
            "use `qwen3vl adapters merge` to write one"
        )


def check_same_adapters(folder: Path, peft: Any, *, compare: bool = True) -> None:
    """Check that a run has the adapters of the checkpoint that it resumes from, or that neither has adapters.

    Args:
        folder: folder of the checkpoint's iteration.
        peft: `cfg.peft` of the run; None for a run without adapters.
        compare: whether to compare settings of the adapters, such as their rank. If False, only check that both or
            neither have adapters.

    Raises:
        CheckpointError: only one of them has adapters, or the settings differ. The message lists the differences.
    """
    theirs = read_run_config(folder).get("peft") or {}
    if peft is not None and not theirs:
        raise CheckpointError(
            f"{folder} was saved by a run without adapters, and peft is a {type(peft).__name__}: set another "
            "folder as checkpoint.save and checkpoint.load. To begin with that run's weights, set "
            f"checkpoint.pretrained_checkpoint={folder.parent}"
        )
    if peft is None and theirs:
        raise CheckpointError(
            f"{folder} was saved by a run with {theirs.get('_target_')}, this run has no adapters: set the same "
            "peft, or another folder as checkpoint.save and checkpoint.load"
        )
    ours = peft.to_cfg_dict() if compare and peft is not None else theirs
    names = sorted((theirs.keys() | ours.keys()) - _MAY_DIFFER)
    pairs = ((name, theirs.get(name), ours.get(name)) for name in names)
    if differ := [f"peft.{name} was {before!r}, is {now!r}" for name, before, now in pairs if before != now]:
        problem = f"{folder} has different adapters from this run. Set the same peft, or use another folder:"
        raise CheckpointError("\n  ".join([problem, *differ]))


@dataclass(frozen=True)
class StoredAdapters:
    """An opened checkpoint of a run that trains adapters."""

    folder: Path  # of the iteration
    ckpt_format: str
    config: ModelConfig
    settings: AdapterSettings
    tensors: DcpTensors  # adapters, and the model's own weights that were trained, by Megatron parameter name
    base: str  # name or folder of the run's initial weights; empty if unknown
    hf_model: str  # name or folder of the Hugging Face model; empty if unknown

    def layers(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[WeightRow]:
        """Return the weight-table rows of all layers with adapters. Their order does not depend on `experts`."""
        # The default stands for both packed layouts: `peft` has one adapter for all experts of a layer then, with the
        # same names and shapes. Megatron names do not depend on the layout at all.
        return [row for row in adaptable_rows(self.config.rows(experts)) if self.settings.adapts(layer_name(row))]

    @property
    def trained(self) -> set[str]:
        """Return the Megatron names of base weights that the run trained in addition to adapters."""
        dimensions, both = self.config.dimensions, (False, True)
        layouts = [TorchDist(dimensions, named, local) for named in (frozenset(), _NAMED) for local in both]

        def possible_names(row: WeightRow) -> set[str]:
            """Return the names that the tensors of a row may have, in all checkpoint formats and layer specs."""
            return {*row.stored_names, *map(local_name, row.stored_names), *(layout.name(row)[0] for layout in layouts)}

        return {row.megatron for row in self.config.rows() if possible_names(row) & self.tensors.specs.keys()}

    @property
    def base_tensors(self) -> dict[str, TensorSpec]:
        """Return the specs of trained base weights in the checkpoint (all tensors but the adapters), by name."""
        return {name: spec for name, spec in self.tensors.specs.items() if ADAPTER_MARK not in name}

    def rows(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[WeightRow]:
        """Return the weight-table rows of the parameters of all adapters that the settings require."""
        # In checkpoints of Megatron-FSDP, gate and up of an adapter, or its sections, are one tensor.
        dim, names = self.settings.dim, self.tensors.specs
        return [adapter_row(layer, kind, dim, fused=f"{layer_name(layer)}{ADAPTER_MARK}{kind}" in names)
                for layer in self.layers(experts) for kind in self.settings.kinds]  # fmt: skip

    def layout(self, rows: Collection[WeightRow]) -> TensorLayout:
        """Return the tensor layout in which the checkpoint stores the parameters of `rows`, weight-table rows."""
        return find_layout(self.ckpt_format, rows, self.config.dimensions, self.tensors.specs)

    def plan(self, dtype: str | None = None, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> Plan:
        """Return the conversion plan of all adapters to `peft`'s format.

        `peft` has one copy of `linear_in` for each Hugging Face layer. The plan contains only the first copy.

        Raises:
            CheckpointError: tensors are missing, unexpected or misshapen. The message lists them.
        """
        rows, adapters = self.rows(experts), {n: spec for n, spec in self.tensors.specs.items() if ADAPTER_MARK in n}
        target = HuggingFace(self.config.dimensions)
        return make_plan(rows, self.layout(rows), target, adapters, where=str(self.folder), dtype=dtype)


def open_adapters(
    path: str | Path,
    iteration: int | None = None,
    base_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredAdapters:
    """Open the checkpoint of a run with adapters.

    Args:
        path: the run's folder, or the folder of an iteration.
        base_model: name or folder of the model without adapters; None for the model that the run names.

    Raises:
        CheckpointError: the checkpoint is damaged, or the run had no adapters.
    """
    folder = megatron.find_iteration(expanded(path), iteration)
    run, ckpt_format = read_run_config(folder), megatron.format_of(folder)
    base, hf_model = (
        text if isinstance(text := (run.get(section) or {}).get(name), str) else ""
        for section, name in (("checkpoint", "pretrained_checkpoint"), ("model", "hf_model_id"))
    )
    settings = adapter_settings(run, folder)
    config = _config(folder, base_model, base, trust_remote_code=trust_remote_code)
    metadata = read_metadata(folder)
    tensors = DcpTensors(metadata, megatron.model_keys(metadata, ckpt_format))
    stored = StoredAdapters(folder, ckpt_format, config, settings, tensors, base, hf_model)
    ranks = (run.get("model") or {}).get("tensor_model_parallel_size", 1)
    if ranks != 1:
        # torch_dist stores gate and up complete, one after the other. All other tensors of layers with several sections
        # hold each rank's part of every section, rank by rank.
        rows = stored.rows(ExpertLayout.PER_EXPERT)
        stacks = [row for row in rows if type(row) in (WeightRow, GatedMLP) and len(row.hf) > len(row.stored_names)]
        mixed = [row.megatron for row in stacks if ckpt_format == megatron.FSDP_DTENSOR or len(row.hf) > 2]
        if mixed:
            raise CheckpointError(
                f"{folder} was saved by {ranks} tensor-parallel ranks, and stores {mixed[0]} as one tensor in which "
                "each rank's rows of gate and up (or of the sections of linear attention) follow those of the rank "
                "before, so they cannot be separated. Train with one tensor-parallel rank, or "
                f"with checkpoint.ckpt_format={megatron.TORCH_DIST}"
            )
    return stored


def _config(folder: Path, base_model: str | Path | None, base: str, *, trust_remote_code: bool) -> ModelConfig:
    """Return the model config of `base_model` if given, else of the checkpoint, else of the initial weights `base`."""
    own = own_config(folder)
    if base_model is None and own is not None:
        return own
    if not (name := base_model or base):
        raise CheckpointError(
            f"{folder} has no {megatron.HF_FILES}/config.json, and its run names no initial weights; set "
            "--base-model to the base model"
        )
    if megatron.is_megatron_checkpoint(path := expanded(name)):
        config = ModelConfig(megatron.find_iteration(path) / megatron.HF_FILES)
    else:
        config = ModelConfig(find_model(name, weights=False, trust_remote_code=trust_remote_code))
    compare_with_stored(config, folder)
    return config

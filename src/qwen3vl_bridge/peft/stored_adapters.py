"""The adapters in a run's checkpoint: their settings in its run_config.yaml, and their tensors as rows and layouts."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.conversion_plan import Plan, make_plan
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
from qwen3vl_bridge.checkpoint.formats.layouts import HuggingFace, TensorLayout, TorchDist
from qwen3vl_bridge.checkpoint.formats.megatron import RUN_CONFIG, read_run_config
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, compared_with_stored, layout_of, own_config
from qwen3vl_bridge.io.files import CheckpointError, expanded
from qwen3vl_bridge.peft.adapter_rows import AdapterSettings, adapter_row, layer_of, linear_rows
from qwen3vl_bridge.weights.rows import MARK, NAMED_IF_MIXED, ExpertLayout, GatedMLP, Part, WeightRow, local_name

# By class, whether it is DoRA. Megatron-Bridge's own adapt all parts, and experts unless they are DoRA.
_OURS = {"qwen3vl_bridge.peft.Qwen3VLLoRA": False, "qwen3vl_bridge.peft.Qwen3VLDoRA": True}
_BRIDGES = {
    "megatron.bridge.peft.lora.LoRA": False,
    "megatron.bridge.peft.lora.VLMLoRA": False,
    "megatron.bridge.peft.dora.DoRA": True,
}
# Fields that may change in a resumed run: they affect neither which tensors there are nor their meaning.
_FREE = {
    *("dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method"),
    *("sequence_parallel_input_regather", "a2a_experimental", "params_to_save"),
}
# All indices that a torch_dist checkpoint may leave in names.
_NAMED = frozenset({*NAMED_IF_MIXED, "vision_layers", "deepstack_mergers"})


def adapter_settings(config: dict[str, Any], folder: Path) -> AdapterSettings:
    """The adapters of a run, from its configuration as read from a folder; it has to have some of a known kind."""
    peft, methods = config.get("peft"), _OURS | _BRIDGES
    if not isinstance(peft, dict):
        raise CheckpointError(f"{folder} was saved by a run without adapters: its {RUN_CONFIG} has peft {peft!r}")
    method = peft.get("_target_")
    if not isinstance(method, str) or method not in methods:
        raise CheckpointError(f"{folder / RUN_CONFIG}: peft is {method!r}, expected one of {', '.join(methods)}")
    fields: dict[str, Any] = peft
    if method in _BRIDGES:
        fields = peft | {f"adapt_{part.value}": True for part in Part} | {"adapt_experts": not methods[method]}
    try:
        dim, alpha, experts = (fields[name] for name in ("dim", "alpha", "adapt_experts"))
        targets, excluded = (fields[name] or [] for name in ("target_modules", "exclude_modules"))
        parts = frozenset(part.value for part in Part if fields[f"adapt_{part.value}"] is True)
    except KeyError as error:
        raise CheckpointError(f"{folder / RUN_CONFIG}: peft lacks {error}") from error
    named = all(isinstance(one, list) and all(isinstance(name, str) for name in one) for one in (targets, excluded))
    if type(dim) is not int or dim < 1 or type(alpha) not in (int, float) or not named:
        raise CheckpointError(
            f"{folder / RUN_CONFIG}: peft has dim {dim!r}, alpha {alpha!r}, target_modules {targets!r} and "
            f"exclude_modules {excluded!r}; expected a whole number of at least 1, a number, and lists of names"
        )
    return AdapterSettings(dim, alpha, methods[method], parts, tuple(targets), tuple(excluded), experts is True)


def refuse_adapters_alone(folder: Path) -> None:
    """Refuse a checkpoint that contains only adapters where a complete model is required."""
    if (folder / RUN_CONFIG).is_file() and read_run_config(folder).get("peft") is not None:
        raise CheckpointError(
            f"{folder} holds only the adapters and other parameters that a run trained, expected a complete model; "
            "`qwen3vl adapters merge` makes one of it"
        )


def check_same_adapters(folder: Path, peft: Any, *, compare: bool = True) -> None:
    """Refuse a run with adapters where its checkpoint has none, or the other way round; with `compare` also one whose
    adapters differ from the checkpoint's. `peft` is the run's.
    """
    theirs = read_run_config(folder).get("peft") or {}
    if peft is not None and not theirs:
        raise CheckpointError(
            f"{folder} was saved by a run without adapters, and peft is a {type(peft).__name__}: expected another "
            f"folder as checkpoint.save and checkpoint.load; checkpoint.pretrained_checkpoint={folder.parent} begins "
            "with that run's weights"
        )
    if peft is None and theirs:
        raise CheckpointError(
            f"{folder} was saved by a run with {theirs.get('_target_')}, this run has no adapters: expected the same "
            "peft, or another folder as checkpoint.save and checkpoint.load"
        )
    ours = peft.to_cfg_dict() if compare and peft is not None else theirs
    names = sorted((theirs.keys() | ours.keys()) - _FREE)
    pairs = ((name, theirs.get(name), ours.get(name)) for name in names)
    if differ := [f"peft.{name} was {before!r}, is {now!r}" for name, before, now in pairs if before != now]:
        raise CheckpointError("\n  ".join([f"{folder} has different adapters from this run:", *differ]))


@dataclass(frozen=True)
class StoredAdapters:
    """The saved contents of a run that trains adapters."""

    folder: Path  # the iteration's
    ckpt_format: str
    config: ModelConfig
    settings: AdapterSettings
    tensors: DcpTensors  # adapters, and the model's own weights that were trained, by Megatron parameter name
    base: str  # name or folder of the run's initial weights; empty if unknown
    hf_model: str  # the same of the Hugging Face model

    def layers(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[WeightRow]:
        """Rows of the weights of all layers that the settings adapt, in the same order for all formats of experts."""
        return [row for row in linear_rows(self.config.rows(experts)) if self.settings.adapts(layer_of(row))]

    @property
    def trained(self) -> set[str]:
        """Megatron names of the model's own weights that were trained too."""
        dimensions, both = self.config.dimensions, (False, True)
        layouts = [TorchDist(dimensions, named, local) for named in (frozenset(), _NAMED) for local in both]

        def spellings(row: WeightRow) -> set[str]:
            """Possible names of a row's tensors in the formats and layer specs."""
            return {*row.stored, *map(local_name, row.stored), *(layout.name(row)[0] for layout in layouts)}

        return {row.megatron for row in self.config.rows() if spellings(row) & self.tensors.specs.keys()}

    @property
    def own(self) -> dict[str, TensorSpec]:
        """The tensors that are not adapters."""
        return {name: spec for name, spec in self.tensors.specs.items() if MARK not in name}

    def rows(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[WeightRow]:
        """Rows of all adapters that the settings require."""
        # Gate and up of an adapter, or its sections, are one tensor in Megatron-FSDP's checkpoints.
        dim, names = self.settings.dim, self.tensors.specs
        return [adapter_row(layer, kind, dim, whole=f"{layer_of(layer)}{MARK}{kind}" in names)
                for layer in self.layers(experts) for kind in self.settings.kinds]  # fmt: skip

    def layout(self, rows: Collection[WeightRow]) -> TensorLayout:
        """The checkpoint's layout of some of its rows."""
        return layout_of(self.ckpt_format, rows, self.config.dimensions, self.tensors.specs)

    def plan(self, dtype: str | None = None, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> Plan:
        """All adapters in `peft`'s format; of a `linear_in`, the first of its tensors.

        Packed experts of a layer share two matrices.

        Raises:
            CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
        """
        rows, adapters = self.rows(experts), {n: spec for n, spec in self.tensors.specs.items() if MARK in n}
        target = HuggingFace(self.config.dimensions)
        return make_plan(rows, self.layout(rows), target, adapters, where=str(self.folder), dtype=dtype)


def open_adapters(
    path: str | Path,
    iteration: int | None = None,
    base_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredAdapters:
    """Open the checkpoint of a run, or of an iteration; `base_model` None is the model that the run names.

    Raises:
        CheckpointError: it is damaged, or of a run without adapters.
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
        # megatron-core's own format stores gate and up complete, one after the other; otherwise the tensor of a layer
        # with several sections holds each rank's part of every section, rank by rank.
        rows = stored.rows(ExpertLayout.PER_EXPERT)
        stacks = [row for row in rows if type(row) in (WeightRow, GatedMLP) and len(row.hf) > len(row.stored)]
        mixed = [row.megatron for row in stacks if ckpt_format == megatron.FSDP_DTENSOR or len(row.hf) > 2]
        if mixed:
            raise CheckpointError(
                f"{folder} was saved by {ranks} tensor-parallel ranks, and stores {mixed[0]} as one tensor in which "
                "each rank's rows of gate and up (or of the sections of linear attention) follow those of the rank "
                "before, so they cannot be separated. Expected one tensor-parallel rank, or "
                f"checkpoint.ckpt_format={megatron.TORCH_DIST}"
            )
    return stored


def _config(folder: Path, base_model: str | Path | None, base: str, *, trust_remote_code: bool) -> ModelConfig:
    """The configuration of the named model, else the checkpoint's own, else that of the run's initial weights."""
    own = own_config(folder)
    if base_model is None and own is not None:
        return own
    if not (name := base_model or base):
        raise CheckpointError(
            f"{folder} has no {megatron.HF_FILES}/config.json, and its run names no initial weights; name the base "
            "model with --base-model"
        )
    if megatron.is_megatron_checkpoint(path := expanded(name)):
        config = ModelConfig(megatron.find_iteration(path) / megatron.HF_FILES)
    else:
        config = ModelConfig(find_model(name, weights=False, trust_remote_code=trust_remote_code))
    compared_with_stored(config, folder)
    return config

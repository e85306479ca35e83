"""The adapters that a run has saved: folder, settings, tensors and the base model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.adapters.settings import adapter_settings
from qwen3vl_bridge.checkpoint.conversion_plan import Plan, make_plan, naming_of
from qwen3vl_bridge.checkpoint.formats import megatron
from qwen3vl_bridge.checkpoint.formats.dcp_metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp_reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.huggingface import find_model
from qwen3vl_bridge.checkpoint.formats.layouts import FsdpDtensor, HuggingFace, TorchDist
from qwen3vl_bridge.checkpoint.formats.megatron import read_run_config
from qwen3vl_bridge.checkpoint.formats.tensors import TensorSpec
from qwen3vl_bridge.checkpoint.stored_models import ModelConfig, check_same_model, compared_with_run, own_config
from qwen3vl_bridge.io.files import CheckpointError, expanded
from qwen3vl_bridge.weights.adapter_rows import (
    MARK,
    AdapterSettings,
    WholeStack,
    adapter_row,
    layer_of,
    linear_rows,
)
from qwen3vl_bridge.weights.rows import NAMED_IF_MIXED, Dimensions, ExpertLayout, Row, local_name

# All indices that a torch_dist checkpoint may leave in names.
_NAMED = frozenset({*NAMED_IF_MIXED, "vision_layers", "deepstack_mergers"})


@dataclass(frozen=True)
class StoredAdapters:
    """The saved contents of a run that trains adapters.

    Attributes:
        folder: the iteration's.
        ckpt_format: "fsdp_dtensor" or "torch_dist".
        config: the model's configuration.
        settings: of the adapters.
        tensors: adapters, and the model's own weights that were trained, by Megatron parameter name.
        base: name or folder of the run's initial weights; empty if unknown.
        hf_model: name or folder of the Hugging Face model; empty if unknown.
    """

    folder: Path
    ckpt_format: str
    config: ModelConfig
    settings: AdapterSettings
    tensors: DcpTensors
    base: str
    hf_model: str

    def layers(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[Row]:
        """Rows of the weights of all layers that the settings adapt.

        Args:
            experts: format of experts on the Hugging Face side. The order is the same in all formats.
        """
        return [row for row in linear_rows(self.config.rows(experts)) if self.settings.adapts(layer_of(row))]

    @property
    def trained(self) -> set[str]:
        """Megatron names of the model's own weights that were trained too."""
        names, dimensions = self.tensors.specs.keys(), self.config.dimensions
        return {row.megatron for row in self.config.rows() if names & set(_spellings(row, dimensions))}

    @property
    def own(self) -> dict[str, TensorSpec]:
        """The tensors that are not adapters."""
        return {name: spec for name, spec in self.tensors.specs.items() if MARK not in name}

    def rows(self, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> list[Row]:
        """Rows of all adapters that the settings require."""
        return [adapter_row(layer, kind, self.settings.dim, whole=self._whole(layer, kind))
                for layer in self.layers(experts) for kind in self.settings.kinds]  # fmt: skip

    def layout(self, rows: Collection[Row]) -> FsdpDtensor | TorchDist:
        """The checkpoint's layout of some of its rows."""
        dimensions, names = self.config.dimensions, self.tensors.specs
        if self.ckpt_format == megatron.TORCH_DIST:
            return TorchDist.found(rows, dimensions, names)
        return FsdpDtensor(dimensions, naming_of(rows, names))

    def plan(self, dtype: str | None = None, experts: ExpertLayout = ExpertLayout.INPUT_MAJOR) -> Plan:
        """All adapters in Hugging Face `peft`'s format; of a `linear_in`, the first of its tensors.

        Args:
            dtype: dtype of the result; None to keep their dtypes.
            experts: format of experts on the Hugging Face side: if packed, their adapters are together in two matrices,
                else each has its own.

        Raises:
            CheckpointError: tensors are missing, unexpected or misshapen; it lists them.
        """
        rows, found = self.rows(experts), {name: spec for name, spec in self.tensors.specs.items() if MARK in name}
        target = HuggingFace(self.config.dimensions)
        return make_plan(rows, self.layout(rows), target, found, where=str(self.folder), dtype=dtype)

    def _whole(self, layer: Row, kind: str) -> bool:
        """Whether gate and up of an adapter, or its sections, are one tensor, as in Megatron-FSDP's checkpoints."""
        return f"{layer_of(layer)}{MARK}{kind}" in self.tensors.specs


def _spellings(row: Row, dimensions: Dimensions) -> Iterator[str]:
    """Possible names of an expanded row's tensors in the formats and layer specs."""
    for name in row.stored:
        yield from (name, local_name(name))
    for named in (frozenset[str](), _NAMED):
        for local in (False, True):
            yield TorchDist(dimensions, named, local).name(row)[0]


def open_adapters(
    path: str | Path,
    iteration: int | None = None,
    base_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredAdapters:
    """Open a run's checkpoint.

    Args:
        path: the run's folder, or an iteration's.
        iteration: the iteration; None for the latest.
        base_model: folder or hub id of the adapters' base model; None for the one that the run names.
        trust_remote_code: whether that model may contain code.

    Raises:
        CheckpointError: it is damaged, or of a run without adapters.
    """
    folder = megatron.find_iteration(expanded(path), iteration)
    ckpt_format = megatron.format_of(folder)
    run = read_run_config(folder)
    settings = adapter_settings(run, folder)
    base = _text(run, "checkpoint", "pretrained_checkpoint")
    config = _config(folder, base_model, base, trust_remote_code=trust_remote_code)
    metadata = read_metadata(folder)
    tensors = DcpTensors(metadata, megatron.model_keys(metadata, ckpt_format))
    hf_model = _text(run, "model", "hf_model_id")
    stored = StoredAdapters(folder, ckpt_format, config, settings, tensors, base, hf_model)
    ranks = (run.get("model") or {}).get("tensor_model_parallel_size", 1)
    if ranks != 1:
        _refuse_mixed_rows(stored, ranks)
    return stored


def _refuse_mixed_rows(stored: StoredAdapters, ranks: Any) -> None:
    """If a layer's weight has several sections, each rank has a part of every section, and the tensor holds the parts
    rank by rank.

    In megatron-core's own format gate and up are stored complete, one after the other.
    """
    stacks = [row for row in stored.rows(ExpertLayout.PER_EXPERT) if isinstance(row, WholeStack)]
    mixed = [row.megatron for row in stacks if stored.ckpt_format == megatron.FSDP_DTENSOR or len(row.hf) > 2]
    if mixed:
        raise CheckpointError(
            f"{stored.folder} was saved by {ranks} tensor-parallel ranks, and stores {mixed[0]} as one tensor in "
            "which each rank's rows of gate and up (or of the sections of linear attention) follow those of the rank "
            "before, so they cannot be separated. Expected one tensor-parallel rank, or "
            f"checkpoint.ckpt_format={megatron.TORCH_DIST}"
        )


def _text(run: dict[str, Any], section: str, name: str) -> str:
    found = (run.get(section) or {}).get(name)
    return found if isinstance(found, str) else ""


def _config(folder: Path, base_model: str | Path | None, base: str, *, trust_remote_code: bool) -> ModelConfig:
    """The configuration of the named model, else the checkpoint's own, else that of the run's initial weights."""
    own = own_config(folder)
    if base_model is None and own is not None:
        return own
    config = _config_of_initial_weights(folder, base_model or base, trust_remote_code=trust_remote_code)
    if own is not None:
        check_same_model(config, own)
    else:
        compared_with_run(config, folder)
    return config


def _config_of_initial_weights(folder: Path, found: str | Path, *, trust_remote_code: bool) -> ModelConfig:
    """The configuration of a run's initial weights."""
    if not found:
        raise CheckpointError(
            f"{folder} has no {megatron.HF_FILES}/config.json, and its run names no initial weights; name the base "
            "model with --base-model"
        )
    path = expanded(found)
    if megatron.is_megatron_checkpoint(path):
        return ModelConfig(megatron.find_iteration(path) / megatron.HF_FILES)
    return ModelConfig(find_model(found, weights=False, trust_remote_code=trust_remote_code))

"""Opens a Megatron checkpoint on disk, of either format, and finds the configuration of its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.engine.manifest import MANIFEST, read_manifest
from qwen3vl_bridge.checkpoint.formats.dcp.metadata import read_metadata
from qwen3vl_bridge.checkpoint.formats.dcp.reader import DcpTensors
from qwen3vl_bridge.checkpoint.formats.megatron import folder as megatron
from qwen3vl_bridge.checkpoint.formats.megatron.run_config import read_run_config
from qwen3vl_bridge.checkpoint.formats.safetensors.model_folder import find_model
from qwen3vl_bridge.checkpoint.formats.safetensors.reader import HFWeights, has_weights
from qwen3vl_bridge.checkpoint.stored_models.config_comparison import check_model_of_run, check_same_model
from qwen3vl_bridge.checkpoint.stored_models.hf_config import ModelConfig
from qwen3vl_bridge.checkpoint.stored_models.stored_model import StoredModel
from qwen3vl_bridge.io.errors import CheckpointError
from qwen3vl_bridge.io.paths import expanded
from qwen3vl_bridge.weights.rows import MARK, ExpertLayout


def open_stored(
    path: str | Path,
    iteration: int | None = None,
    hf_model: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
) -> StoredModel:
    """Open a Megatron checkpoint.

    Args:
        path: its root folder, or an iteration's folder.
        iteration: the iteration; None for the latest.
        hf_model: folder or hub id of a model whose configuration to use; None for the one in the checkpoint.
        trust_remote_code: whether that model may contain code.

    Raises:
        CheckpointError: it does not exist, or is damaged.
    """
    folder = megatron.find_iteration(expanded(path), iteration)
    ckpt_format = megatron.format_of(folder)
    config, notes = stored_config(folder, hf_model, trust_remote_code)
    manifest = read_manifest(folder)
    metadata = read_metadata(folder)
    keys = megatron.model_keys(metadata, ckpt_format)
    if adapter := next((name for name in keys if MARK in name), None):
        raise CheckpointError(
            f"{folder} holds adapters such as {adapter}, expected a complete model; use `qwen3vl adapters` for adapters"
        )
    tensors = DcpTensors(metadata, keys)
    config = config.having(tensors.specs)
    experts = _experts(config, manifest, folder)
    return StoredModel(folder, ckpt_format, tensors, config, experts, manifest, notes)


def stored_config(
    folder: Path, hf_model: str | Path | None, trust_remote_code: bool = False
) -> tuple[ModelConfig, list[str]]:
    """The configuration of a checkpoint's model.

    Args:
        folder: the iteration's.
        hf_model: folder or hub id of a model whose configuration to use; None for the one in the checkpoint.
        trust_remote_code: whether that model may contain code.

    Returns:
        The configuration, and notes for the user.

    Raises:
        CheckpointError: there is none, or the checkpoint has one of another model.
    """
    own = own_config(folder)
    if hf_model is None:
        if own is None:
            raise CheckpointError(f"{folder} has no {megatron.HF_FILES}/config.json; name the model with --hf-model")
        return own, []
    config = ModelConfig(find_model(hf_model, weights=False, trust_remote_code=trust_remote_code))
    if own is not None:
        check_same_model(config, own)
        return config, []
    return config, compared_with_run(config, folder)


def compared_with_run(config: ModelConfig, folder: Path) -> list[str]:
    """Check a configuration for a checkpoint without one against its run's file.

    Returns:
        A line of text if the file does not describe the model.

    Raises:
        CheckpointError: it is another model's.
    """
    path, run = folder / megatron.RUN_CONFIG, {}
    why = f"no {path.name} that describes a model"
    if path.is_file():
        try:
            run = read_run_config(folder)
        except CheckpointError as error:
            why = str(error)
    if check_model_of_run(config, run, path):
        return []
    return [
        f"{config.folder / 'config.json'} could not be compared with the checkpoint's configuration: {folder} has "
        f"none, and {why}. The shapes match, but heads, rotary embedding and DeepStack taps may be another model's"
    ]


def own_config(folder: Path) -> ModelConfig | None:
    """The configuration in an iteration's folder; None if there is none."""
    beside = folder / megatron.HF_FILES
    return ModelConfig(beside) if (beside / "config.json").is_file() else None


def _experts(config: ModelConfig, manifest: dict[str, Any], folder: Path) -> ExpertLayout:
    """Format of experts: that of the configuration's model, else the manifest's, else that of the released ones."""
    if not config.dimensions.indices["moe_layers"]:
        return config.family.released_experts
    if has_weights(config.folder):
        shapes = {name: spec.shape for name, spec in HFWeights(config.folder).specs.items()}
        return config.having(shapes).expert_layout(shapes)
    name = manifest.get("expert_layout")
    if name is None:
        return config.family.released_experts
    for layout in ExpertLayout:
        if layout.name == name:
            return layout
    expected = ", ".join(layout.name for layout in ExpertLayout)
    raise CheckpointError(f"{folder / MANIFEST}: expert_layout is {name!r}, expected {expected}")

"""Paths of a run's model, data and results, which recipes do not set."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

logger = logging.getLogger(__name__)

# Fields that a Hugging Face configuration has too, and the run determines.
_OF_THE_RUN = {"seq_length"}
_KINDS = ("tensor_model", "pipeline_model", "context", "expert_model")
_PRECISION = {"pipeline_dtype", "autocast_dtype"}


def set_paths(
    cfg: ConfigContainer,
    *,
    hf_path: str | Path | None = None,
    data_path: str | Path | None = None,
    pretrained_checkpoint: str | Path | None = None,
    save: str | Path | None = None,
) -> ConfigContainer:
    """Put a run's paths into its configuration; None keeps the recipe's value.

    Args:
        cfg: a recipe's. It is changed in place.
        hf_path: Hugging Face checkpoint, a folder or a hub id: the model's configuration, its processor and tokenizer.
        data_path: as `dataset.path`.
        pretrained_checkpoint: initial weights: fsdp_dtensor, torch_dist or a Hugging Face folder.
        save: folder of the run's checkpoints, from which it also resumes; logs go there as well.

    Raises:
        ValueError: the recipe has settings that the checkpoint's model does not have.
    """
    if hf_path is not None:
        _use_model(cfg, str(hf_path))
    if data_path is not None:
        cfg.dataset.path = str(data_path)
    if pretrained_checkpoint is not None:
        cfg.checkpoint.pretrained_checkpoint = str(pretrained_checkpoint)
    if save is not None:
        cfg.checkpoint.save = cfg.checkpoint.load = str(save)
        cfg.logger.tensorboard_dir = str(Path(save) / "tensorboard")
    return cfg


def check_data(cfg: ConfigContainer) -> None:
    """Check for data that can be trained on before anything is built, which takes a while.

    Raises:
        ValueError: a path that does not exist, or rows packed with other settings.
        DataError: data that cannot be opened or would all be dropped (see `Qwen3VLConversationProvider.check_samples`).
    """
    from qwen3vl_bridge import Qwen3VLConversationProvider
    from qwen3vl_bridge.data.dataset_provider import SPLITS

    if not isinstance(cfg.dataset, Qwen3VLConversationProvider):
        return
    names = (
        {"dataset.path (--data-path)": cfg.dataset.path}
        if cfg.dataset.path
        else {f"dataset.{split}_path": cfg.dataset.path_of(split) for split in SPLITS}
    )
    names |= {f"the path of {one.name} in dataset.mixture": one.path for one in cfg.dataset.mixed("train")}
    for name, path in names.items():
        if path:
            expect_data(name, path)
    cfg.dataset.check_samples(cfg.model.context_parallel_size)


def expect_data(name: str, path: str) -> None:
    """Refuse a path of data, of a setting, that does not exist (ValueError); patterns and names of the hub may not."""
    from qwen3vl_bridge.data.sources import HUB

    if not any(mark in path for mark in "*?[") and not path.startswith(HUB) and not Path(path).exists():
        raise ValueError(f"{name} is {path}: there is no such file or folder")


def _use_model(cfg: ConfigContainer, hf_path: str) -> None:
    """Apply the recipe's settings to another checkpoint's model: its sizes, precision, processor and tokenizer."""
    import qwen3vl_bridge  # noqa: F401  before Megatron

    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(hf_path)
    model, old = bridge.to_megatron_provider(load_weights=False), cfg.model
    of_the_model = bridge._model_bridge.provider_fields(bridge.hf_pretrained.config).keys() - _OF_THE_RUN
    for name, value in _chosen(old).items():
        if name in of_the_model | _PRECISION:
            continue
        if not hasattr(model, name):
            raise ValueError(
                f"the recipe has model.{name} {value!r}, which does not apply to {hf_path}; choose another"
            )
        setattr(model, name, value)
    splits = any(getattr(model, f"{kind}_parallel_size") > 1 for kind in _KINDS)
    if splits and (model.num_layers, model.hidden_size) != (old.num_layers, old.hidden_size):
        logger.warning(
            "the recipe is for a model of %d layers and width %d, %s has %d and %d: its parallel sizes may not fit "
            "this model",
            *(old.num_layers, old.hidden_size, hf_path, model.num_layers, model.hidden_size),
        )
    model.hf_model_id = hf_path
    cfg.model = model
    if cfg.mixed_precision is None:
        cfg.optimizer.bf16, cfg.optimizer.params_dtype = model.bf16, model.params_dtype
    cfg.dataset.hf_processor_path = cfg.tokenizer.tokenizer_model = hf_path


def _chosen(provider: Any) -> dict[str, Any]:
    """The fields of a provider that differ from its class's defaults."""
    chosen = {}
    for field in dataclasses.fields(provider):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(provider, field.name)
        if type(value) is not type(default) or value != default:
            chosen[field.name] = value
    return chosen

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
_SPLITS = ("tensor_model", "pipeline_model", "context", "expert_model")
_PRECISION = {"pipeline_dtype", "autocast_dtype"}
TITLES = {"qwen3_vl": "Qwen3-VL", "qwen3_5": "Qwen3.5-VL"}


def kind_of_model(family: str, has_experts: bool) -> str:
    """In words, as for a message."""
    return f"a {TITLES.get(family, family)} with{'' if has_experts else 'out'} experts"


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
        ValueError: the recipe is for a model of another kind than the checkpoint's, or has a setting that it does not
            have; or the folder does not exist.
    """
    from qwen3vl_bridge.checkpoint.formats.huggingface import is_path

    if hf_path is not None:
        if is_path(hf_path) and not Path(hf_path).is_dir():
            raise ValueError(f"hf_path is {hf_path}: there is no such folder")
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

    if not isinstance(cfg.dataset, Qwen3VLConversationProvider):
        return
    cfg.dataset.check_paths()
    cfg.dataset.check_samples(cfg.model.context_parallel_size)


def _use_model(cfg: ConfigContainer, hf_path: str) -> None:
    """Apply the recipe's settings to another checkpoint's model: its sizes, precision, processor and tokenizer."""
    import qwen3vl_bridge  # noqa: F401  before Megatron

    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(hf_path)
    model, old = bridge.to_megatron_provider(load_weights=False), cfg.model
    said = [kind_of_model(one.family, bool(one.num_moe_experts)) for one in (old, model)]
    if model.family != old.family or (old.num_moe_experts and not model.num_moe_experts):
        raise ValueError(
            f"the recipe is for {said[0]}, and {hf_path} is {said[1]}: use a recipe for that; `qwen3vl train --list` "
            "shows all"
        )
    of_the_model = bridge._model_bridge.provider_fields(bridge.hf_pretrained.config).keys() - _OF_THE_RUN
    for name, value in _chosen(old).items():
        if name in of_the_model | _PRECISION:
            continue
        if not hasattr(model, name):
            raise ValueError(
                f"the recipe has model.{name} {value!r}, which does not apply to {hf_path}; choose another"
            )
        setattr(model, name, value)
    sizes = [getattr(model, f"{kind}_parallel_size") or 1 for kind in _SPLITS]
    is_split = max(sizes) > 1 or model.dist_train.use_dist_train
    if is_split and (model.num_layers, model.hidden_size) != (old.num_layers, old.hidden_size):
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

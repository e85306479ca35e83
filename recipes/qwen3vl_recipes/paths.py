"""Set and check the paths of a run: model, data and results. Recipes do not set them."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3vl_bridge.registry import titles

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

logger = logging.getLogger(__name__)

# Fields whose value comes from the recipe, not from the Hugging Face configuration.
_RUN_FIELDS = {"seq_length"}
_PARALLELISM = ("tensor_model", "pipeline_model", "context", "expert_model")
_PRECISION = {"pipeline_dtype", "autocast_dtype"}


def describe_model_kind(family: str, has_experts: bool) -> str:
    """Return a model kind for a message, such as "a Qwen3-VL with experts"."""
    return f"a {titles().get(family, family)} with{'' if has_experts else 'out'} experts"


def set_paths(
    cfg: ConfigContainer,
    *,
    hf_path: str | Path | None = None,
    data_path: str | Path | None = None,
    pretrained_checkpoint: str | Path | None = None,
    save: str | Path | None = None,
) -> ConfigContainer:
    """Set the paths of a run; None keeps the recipe's value.

    Args:
        cfg: configuration of a recipe, changed in place.
        hf_path: Hugging Face folder or hub id of the model, its processor and its tokenizer.
        data_path: value of `dataset.path`.
        pretrained_checkpoint: folder of initial weights: a checkpoint in fsdp_dtensor or torch_dist format, or a
            Hugging Face folder.
        save: folder for the run's checkpoints and logs; the run resumes from it.

    Raises:
        ValueError: the folder `hf_path` does not exist, the recipe is for another kind of model, or the recipe sets a
            field that this model does not have.
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
    """Check that the run can train on its data, before the model is built.

    Raises:
        ValueError: a path does not exist, or rows were packed with other settings.
        DataError: data cannot be opened, or all samples would be dropped (`Qwen3VLConversationProvider.check_samples`).
    """
    from qwen3vl_bridge import Qwen3VLConversationProvider
    from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

    if not isinstance(cfg.dataset, Qwen3VLConversationProvider):
        return
    if isinstance(cfg, Qwen3VLConfigContainer):
        cfg.apply_objective()
    cfg.dataset.check_paths()
    cfg.dataset.check_samples(cfg.model.context_parallel_size, evaluated_rows(cfg))


def evaluated_rows(cfg: ConfigContainer) -> dict[str, int]:
    """Return the number of rows that one evaluation reads from the splits "valid" and "test".

    The split "test" is evaluated at the end of a run.
    """
    from qwen3vl_bridge.training.config import rows_per_evaluation

    rows = rows_per_evaluation(cfg)
    return {"valid": rows if cfg.validation.eval_interval else 0, "test": rows}


def _use_model(cfg: ConfigContainer, hf_path: str) -> None:
    """Replace the recipe's model, processor and tokenizer by those in `hf_path`, and keep the recipe's settings."""
    from qwen3vl_bridge.upstream.auto_bridge import model_bridge

    from megatron.bridge import AutoBridge

    bridge = AutoBridge.from_hf_pretrained(hf_path)
    model, old = bridge.to_megatron_provider(load_weights=False), cfg.model
    kinds = [describe_model_kind(provider.family, bool(provider.num_moe_experts)) for provider in (old, model)]
    if model.family != old.family or (old.num_moe_experts and not model.num_moe_experts):
        raise ValueError(
            f"the recipe is for {kinds[0]}, and {hf_path} is {kinds[1]}: use another recipe; `qwen3vl train --list` "
            "shows all"
        )
    model_fields = model_bridge(bridge).provider_fields(bridge.hf_pretrained.config).keys() - _RUN_FIELDS
    for name, value in _changed_fields(old).items():
        if name in model_fields | _PRECISION:
            continue
        if not hasattr(model, name):
            raise ValueError(
                f"the recipe sets model.{name} to {value!r}, but the model {hf_path} has no such field: use another "
                "recipe"
            )
        setattr(model, name, value)
    sizes = [getattr(model, f"{kind}_parallel_size") or 1 for kind in _PARALLELISM]
    is_parallel = max(sizes) > 1 or model.dist_train.use_dist_train
    if is_parallel and (model.num_layers, model.hidden_size) != (old.num_layers, old.hidden_size):
        logger.warning(
            "the recipe is for a model of %d layers and width %d, but %s has %d layers and width %d: check the "
            "parallel sizes",
            *(old.num_layers, old.hidden_size, hf_path, model.num_layers, model.hidden_size),
        )
    model.hf_model_id = hf_path
    cfg.model = model
    if cfg.mixed_precision is None:
        cfg.optimizer.bf16, cfg.optimizer.params_dtype = model.bf16, model.params_dtype
    cfg.dataset.hf_processor_path = cfg.tokenizer.tokenizer_model = hf_path


def _changed_fields(provider: Any) -> dict[str, Any]:
    """Return the fields of a model provider that differ from the defaults of its class, by name."""
    changed = {}
    for field in dataclasses.fields(provider):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        value = getattr(provider, field.name)
        if type(value) is not type(default) or value != default:
            changed[field.name] = value
    return changed

"""x"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qwen3vl_bridge.weights.rows import Part, part_of_wrapped

from megatron.bridge.training.config import (
    ConfigContainer,
    OptimizerConfigOverrideProvider,
    OptimizerConfigOverrideProviderContext,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from torch import Tensor

_FIELD = "optimizer_config_override_provider"


@dataclass(kw_only=True)
class Qwen3VLTowers(OptimizerConfigOverrideProvider):
    """`cfg.optimizer_config_override_provider`: a learning rate for each part of the model.

    The rates follow the run's schedule: `scheduler` warms up to them, and decays them in the ratio of
    `optimizer.min_lr` to `optimizer.lr`. Weight decay does not change.

    Attributes:
        language_model_lr, vision_model_lr, vision_projection_lr: the highest learning rate; None for `optimizer.lr`.
    """

    language_model_lr: float | None = None
    vision_model_lr: float | None = None
    vision_projection_lr: float | None = None

    def rates(self) -> dict[Part, float]:
        """The parts with their own learning rate."""
        rates = {part: getattr(self, f"{part.value}_lr") for part in Part}
        return {part: rate for part, rate in rates.items() if rate is not None}

    def build_config_overrides(
        self, context: OptimizerConfigOverrideProviderContext
    ) -> dict[ParamKey, ParamGroupOverride] | None:
        """Megatron-Bridge's overrides, and the parts' learning rates."""
        overrides = dict(super().build_config_overrides(context) or {})
        config = context.optimizer_config
        for part, rate in self.rates().items():
            if rate != config.lr:  # parameters at optimizer.lr stay in the groups whose rate is logged
                key = ParamKey(
                    with_name_predicate=ParamWithNamePredicate(name=part.value, fn=functools.partial(_is_of, part))
                )
                lowest = rate * (config.min_lr or 0.0) / config.lr
                overrides[key] = ParamGroupOverride(max_lr=rate, min_lr=lowest)
        return overrides or None


def _is_of(part: Part, _: Tensor, name: str) -> bool:
    return part_of_wrapped(name) is part


def check_towers(cfg: ConfigContainer) -> None:
    """Refuse rates that contradict the rest of a configuration, or would have no effect.

    Raises:
        ValueError: an invalid setting; the message names it.
    """
    towers, optimizer = cfg.optimizer_config_override_provider, cfg.optimizer
    if not isinstance(towers, Qwen3VLTowers) or not (rates := towers.rates()):
        return
    if cfg.peft is not None:
        raise ValueError(f"{_FIELD} sets learning rates of parts: expected none with peft, which trains only adapters")
    if not optimizer.lr or (optimizer.min_lr or 0.0) > optimizer.lr:
        raise ValueError(
            f"optimizer.lr is {optimizer.lr} and optimizer.min_lr {optimizer.min_lr}: expected a positive rate that "
            "is at least min_lr; the parts' learning rates keep this ratio"
        )
    frozen = {part for part in Part if getattr(cfg.model, f"freeze_{part.value}", False)}
    for part, rate in rates.items():
        name = f"{_FIELD}.{part.value}_lr"
        if rate <= 0:
            raise ValueError(f"{name} is {rate}, expected more than 0; model.freeze_{part.value} freezes a part")
        if rate < (start := cfg.scheduler.lr_warmup_init):
            raise ValueError(f"{name} is {rate}, expected no less than scheduler.lr_warmup_init, {start}")
        if part in frozen:
            raise ValueError(f"{name} is {rate}, expected None with model.freeze_{part.value}")
        if part is Part.LANGUAGE_MODEL and optimizer.decoupled_lr is not None:
            raise ValueError(f"{name} is {rate}, expected None, or optimizer.decoupled_lr None")
    if all(rates.get(part, optimizer.lr) != optimizer.lr for part in Part if part not in frozen):
        raise ValueError(
            f"{_FIELD}: every trained part has its own learning rate, so optimizer.lr, {optimizer.lr}, would be "
            f"ignored; set it to one of {sorted(set(rates.values()))}"
        )

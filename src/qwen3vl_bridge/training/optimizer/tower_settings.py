"""Learning rates of the model's parts, and parts that are frozen for the first steps.

What lives here: the settings, their checks, and the rates as overrides of megatron-core's parameter groups. What may
not: the freezing (`delayed_unfreezing.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from qwen3vl_bridge.weights.model_parts import Part, part_of_wrapped

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
    """`cfg.optimizer_config_override_provider`: a learning rate and a schedule for each part of the model.

    The rates follow the run's schedule: `scheduler` warms up to them, and decays them in the ratio of
    `optimizer.min_lr` to `optimizer.lr`. Weight decay does not change. When a part that was frozen for the first steps
    starts training, Adam starts with empty moments for it, at the learning rate that the schedule has reached.

    Attributes:
        language_model_lr, vision_model_lr, vision_projection_lr: the highest learning rate; None for `optimizer.lr`.
        freeze_language_model_steps, freeze_vision_model_steps, freeze_vision_projection_steps: number of updates at the
            start of the run during which the part is frozen; skipped steps do not count. Implemented by
            `training_callbacks`.
    """

    language_model_lr: float | None = None
    vision_model_lr: float | None = None
    vision_projection_lr: float | None = None
    freeze_language_model_steps: int = 0
    freeze_vision_model_steps: int = 0
    freeze_vision_projection_steps: int = 0

    def rates(self) -> dict[Part, float]:
        """The parts with their own learning rate."""
        rates = {part: getattr(self, f"{part.value}_lr") for part in Part}
        return {part: rate for part, rate in rates.items() if rate is not None}

    def frozen_updates(self) -> dict[Part, int]:
        """The parts that are frozen for the first updates, with the number of updates."""
        steps = {part: getattr(self, f"freeze_{part.value}_steps") for part in Part}
        return {part: number for part, number in steps.items() if number}

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
    """Refuse rates and schedules that contradict the rest of a configuration, or would have no effect.

    Args:
        cfg: a recipe's configuration.

    Raises:
        ValueError: an invalid setting; the message names it.
    """
    towers = cfg.optimizer_config_override_provider
    if not isinstance(towers, Qwen3VLTowers):
        return
    frozen = {part for part in Part if getattr(cfg.model, f"freeze_{part.value}", False)}
    _check_values(cfg, towers, frozen)
    rates, delayed = towers.rates(), towers.frozen_updates()
    if (rates or delayed) and cfg.peft is not None:
        raise ValueError(
            f"{_FIELD} sets learning rates or schedules of parts: expected none with peft, which trains only adapters"
        )
    trained = [part for part in Part if part not in frozen]
    if trained and all(part in delayed for part in trained):
        raise ValueError(
            f"{_FIELD}: every trained part is frozen for the first steps, expected at least one that is not: "
            f"{', '.join(f'freeze_{part.value}_steps={steps}' for part, steps in delayed.items())}"
        )
    if trained and all(rates.get(part, cfg.optimizer.lr) != cfg.optimizer.lr for part in trained):
        raise ValueError(
            f"{_FIELD}: every trained part has its own learning rate, so optimizer.lr, {cfg.optimizer.lr}, would be "
            f"ignored; set it to one of {sorted(set(rates.values()))}"
        )


def _check_values(cfg: ConfigContainer, towers: Qwen3VLTowers, frozen: set[Part]) -> None:
    optimizer, train_iters = cfg.optimizer, cfg.train.train_iters
    if towers.rates() and (not optimizer.lr or (optimizer.min_lr or 0.0) > optimizer.lr):
        raise ValueError(
            f"optimizer.lr is {optimizer.lr} and optimizer.min_lr {optimizer.min_lr}: expected a positive rate that "
            "is at least min_lr; the parts' learning rates keep this ratio"
        )
    for part, rate in towers.rates().items():
        name = f"{_FIELD}.{part.value}_lr"
        if rate <= 0:
            raise ValueError(f"{name} is {rate}, expected more than 0; model.freeze_{part.value} freezes a part")
        if rate < (start := cfg.scheduler.lr_warmup_init):
            raise ValueError(f"{name} is {rate}, expected no less than scheduler.lr_warmup_init, {start}")
        if part in frozen:
            raise ValueError(f"{name} is {rate}, expected None with model.freeze_{part.value}")
        if part is Part.LANGUAGE_MODEL and optimizer.decoupled_lr is not None:
            raise ValueError(f"{name} is {rate}, expected None, or optimizer.decoupled_lr None")
    for part, steps in {part: getattr(towers, f"freeze_{part.value}_steps") for part in Part}.items():
        name = f"{_FIELD}.freeze_{part.value}_steps"
        if steps < 0:
            raise ValueError(f"{name} is {steps}, expected 0 or more")
        if steps and part in frozen:
            raise ValueError(
                f"{name} is {steps}, expected 0 with model.freeze_{part.value}, which freezes it permanently"
            )
        if steps and train_iters is not None and steps >= train_iters:
            raise ValueError(
                f"{name} is {steps}, expected fewer than train.train_iters, {train_iters}; model.freeze_{part.value} "
                "freezes a part permanently"
            )
    if towers.frozen_updates():
        _check_optimizer(cfg)


def _check_optimizer(cfg: ConfigContainer) -> None:
    """Schedules need an optimizer whose steps can be counted part by part."""
    optimizer = cfg.optimizer
    wrong = {
        "optimizer.optimizer (other than 'adam')": optimizer.optimizer != "adam",
        "optimizer.optimizer_cpu_offload": optimizer.optimizer_cpu_offload,
        "optimizer.optimizer_cuda_graph": optimizer.optimizer_cuda_graph,
    }
    if found := [name for name, is_set in wrong.items() if is_set]:
        raise ValueError(f"{_FIELD} has freeze_*_steps, which do not work with {', '.join(found)}; expected them unset")
    if cfg.ddp.use_megatron_fsdp or cfg.dist.use_megatron_fsdp:
        raise ValueError(
            f"{_FIELD}.freeze_*_steps with ddp.use_megatron_fsdp: expected only one of them: whether frozen parts keep "
            "their weights under Megatron-FSDP is untested"
        )

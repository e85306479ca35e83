"""Check the settings of a run's objective, and other settings that it needs; `run_validation` includes the checks."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from qwen3vl_bridge.config.checks import (
    Check,
    Condition,
    Requires,
    Values,
    is_above,
    is_on,
    requires_default,
)
from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
from qwen3vl_bridge.training.preference import preference_settings
from qwen3vl_bridge.weights.rows import Component

_PAIRS = Condition("objective.kind", preference_settings)
_ADAPTERS_OFF = Condition(
    "objective.kind objective.reference_logps", lambda cfg: _PAIRS(cfg) and cfg.objective.reference_logps is None
)
_BALANCES = is_on("model.moe_aux_loss_coeff")


def _check_objective(cfg: Any) -> None:
    """Raise ValueError if settings of `objective` contradict each other or would be ignored."""
    objective, defaults = cfg.objective, type(cfg.objective)()
    if objective.kind == "sft":
        changed = [f.name for f in fields(objective) if getattr(objective, f.name) != getattr(defaults, f.name)]
        if changed:
            raise ValueError(
                f"objective.{changed[0]} is set, but objective.kind is 'sft', which ignores it: set objective.kind=dpo"
            )
    elif objective.reference_logps is None and objective.reference_model is not None:
        raise ValueError(
            "objective.reference_model is set without objective.reference_logps: compute these log-probabilities with "
            "`qwen3vl data score`"
        )
    if objective.loss_type == "ipo" and objective.label_smoothing:
        raise ValueError(f"objective.label_smoothing is {objective.label_smoothing}, expected 0: 'ipo' ignores it")
    numbers = (objective.beta, objective.label_smoothing, objective.rpo_alpha or 0.0)
    if not (numbers[0] > 0 and 0 <= numbers[1] < 0.5 and numbers[2] >= 0):
        raise ValueError(
            "objective.beta, label_smoothing and rpo_alpha are {}, {} and {}, expected a number above 0, one from 0 to "
            "below 0.5, and one that is not negative".format(*numbers)
        )


def _check_reference(cfg: Any) -> None:
    """Raise ValueError if the model without its adapters is not the reference model: if other weights are trained."""
    if not _ADAPTERS_OFF(cfg):
        return
    trained = [
        component.value
        for component in Component
        if not getattr(cfg.model, name := f"freeze_{component.value}") and not getattr(cfg.peft, name, False)
    ]
    if cfg.peft is None or trained:
        found = "there are no adapters" if cfg.peft is None else f"weights of {' and '.join(trained)} are trained too"
        raise ValueError(
            f"objective.reference_logps is None and {found}, so the model without adapters is not the reference model: "
            "run `qwen3vl data score` and set objective.reference_logps to its folder; or train only adapters, as "
            "recipes such as qwen3_vl_8b_dpo_config do"
        )


def _check_teacher(cfg: Any) -> None:
    """Raise ValueError if a run on pairs also distills a teacher."""
    if _PAIRS(cfg) and getattr(cfg.model, "teacher", None) is not None:
        raise ValueError(
            "objective.kind is 'dpo' and the model has a teacher: distill in a run with objective.kind=sft"
        )


_SCALED = "losses of routers are scaled by tokens, and the loss of pairs is not"
_NOT_TRIED = "it has not been tested with pairs of answers"
OBJECTIVE: tuple[Check, ...] = (
    _check_objective,
    _check_reference,
    _check_teacher,
    Requires(
        "dataset.__class__", Qwen3VLConversationProvider, _PAIRS, why="only this class keeps pairs in the same row"
    ),
    Requires(
        "model.calculate_per_token_loss", True, _PAIRS, why="gradients are divided by the pairs of the global batch"
    ),
    Requires(
        "model.variable_seq_lengths", True, _ADAPTERS_OFF & is_above("model.pipeline_model_parallel_size", 1),
        why="stages send the hidden states of two models",
    ),
    *requires_default("rerun_state_machine.check_for_spiky_loss", "the guard checks losses", _PAIRS),
    Requires("rerun_state_machine.check_for_nan_in_loss", False, _PAIRS, why="the guard checks losses"),
    Requires(
        "model.moe_router_load_balancing_type", "none", _PAIRS & is_above("model.num_moe_experts", 0) & _BALANCES,
        why=_SCALED,
    ),
    Requires(
        "model.moe_z_loss_coeff", Values(lambda value, _: not value, lambda _: "0"),
        _PAIRS & is_above("model.num_moe_experts", 0), why=_SCALED,
    ),
    Requires("model.trains_mtp", False, _PAIRS, why="multi-token prediction is not trained on pairs: set "
             "model.mtp_loss_scaling_factor=0"),
    *requires_default("guard.on_spike", "losses of pairs may be near zero, or negative", _PAIRS),
    *requires_default("model.overlap_moe_expert_parallel_comm", _NOT_TRIED, _PAIRS),
    *requires_default("model.dist_train.use_dist_train", _NOT_TRIED, _PAIRS),
    *requires_default(
        "ddp.use_megatron_fsdp dist.use_megatron_fsdp", "set objective.reference_logps for Megatron-FSDP", _ADAPTERS_OFF
    ),
)  # fmt: skip

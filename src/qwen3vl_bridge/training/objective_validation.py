"""Check the settings of a run's objective, and other settings that it needs; `run_validation` includes the checks."""

from __future__ import annotations

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
from qwen3vl_bridge.training.objectives import LOSS_TYPES, objective_of
from qwen3vl_bridge.weights.rows import Component

# Other objectives than supervised training.
_GROUPED = Condition("objective.kind", objective_of)
_ADAPTERS_OFF = Condition(
    "objective.kind objective.reference_logps",
    lambda cfg: _GROUPED(cfg) and cfg.objective.needs_reference and cfg.objective.reference_logps is None,
)
_EMBEDS = Condition("objective.kind", lambda cfg: _GROUPED(cfg) and cfg.objective.kind == "embedding" and not cfg.peft)
_BALANCES = is_on("model.moe_aux_loss_coeff")


def _check_objective(cfg: Any) -> None:
    """Raise ValueError if settings of `objective` contradict each other, are out of range, or would be ignored."""
    objective = cfg.objective
    if ignored := objective.ignored():
        raise ValueError(f"objective.{ignored[0]} is set, but objective.kind is {objective.kind!r}, which ignores it")
    if objective.needs_reference and objective.formula not in (allowed := LOSS_TYPES[objective.kind]):
        raise ValueError(f"objective.loss_type is {objective.loss_type!r}, expected {' or '.join(map(repr, allowed))}")
    if objective.reference_logps is None and objective.reference_model is not None:
        raise ValueError(
            "objective.reference_model is set without objective.reference_logps: compute these log-probabilities with "
            "`qwen3vl data score`"
        )
    if objective.loss_type == "ipo" and objective.label_smoothing:
        raise ValueError(f"objective.label_smoothing is {objective.label_smoothing}, expected 0: 'ipo' ignores it")
    dims = objective.matryoshka_dims or [1]
    for name, is_valid, expected in (
        ("beta", objective.beta > 0, "a number above 0"),
        ("label_smoothing", 0 <= objective.label_smoothing < 0.5, "a number from 0 to below 0.5"),
        ("rpo_alpha", (objective.rpo_alpha or 0) >= 0, "a number that is not negative, or None"),
        ("desirable_weight", objective.desirable_weight > 0, "a number above 0"),
        ("undesirable_weight", objective.undesirable_weight > 0, "a number above 0"),
        ("temperature", objective.temperature > 0, "a number above 0"),
        ("max_documents", objective.max_documents > 1, "at least 2"),
        ("matryoshka_dims", all(0 < size <= cfg.model.hidden_size for size in dims),
         f"sizes from 1 to model.hidden_size, {cfg.model.hidden_size}"),
    ):  # fmt: skip
        if not is_valid:
            raise ValueError(f"objective.{name} is {getattr(objective, name)}, expected {expected}")


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
    """Raise ValueError if a run with another objective than supervised training also distills a teacher."""
    if _GROUPED(cfg) and getattr(cfg.model, "teacher", None) is not None:
        raise ValueError(
            f"objective.kind is {cfg.objective.kind!r} and the model has a teacher: distill in a run with "
            "objective.kind=sft"
        )


_SCALED = "router losses are scaled by the number of tokens, but the loss of this objective is not"
_NOT_TRIED = "it has not been tested with this objective"
OBJECTIVE: tuple[Check, ...] = (
    _check_objective,
    _check_reference,
    _check_teacher,
    Requires(
        "dataset.__class__", Qwen3VLConversationProvider, _GROUPED,
        why="only this class keeps the documents of a record in a row",
    ),
    Requires(
        "model.calculate_per_token_loss", True, _GROUPED,
        why="gradients are divided by the number of losses in the global batch",
    ),
    Requires(
        "model.variable_seq_lengths", True, _ADAPTERS_OFF & is_above("model.pipeline_model_parallel_size", 1),
        why="stages send the hidden states of two models",
    ),
    *requires_default("rerun_state_machine.check_for_spiky_loss", "the guard checks losses", _GROUPED),
    Requires("rerun_state_machine.check_for_nan_in_loss", False, _GROUPED, why="the guard checks losses"),
    Requires(
        "model.moe_router_load_balancing_type", "none", _GROUPED & is_above("model.num_moe_experts", 0) & _BALANCES,
        why=_SCALED,
    ),
    Requires(
        "model.moe_z_loss_coeff", Values(lambda value, _: not value, lambda _: "0"),
        _GROUPED & is_above("model.num_moe_experts", 0), why=_SCALED,
    ),
    Requires("model.trains_mtp", False, _GROUPED, why="multi-token prediction is not trained: set "
             "model.mtp_loss_scaling_factor=0"),
    Requires(
        "ddp.overlap_grad_reduce", False,
        _EMBEDS & is_on("model.share_embeddings_and_output_weights")
        & is_above("model.pipeline_model_parallel_size", 1),
        why="the last stage's copy of the embedding has no gradient",
    ),
    *requires_default("guard.on_spike", "losses may be near zero, or negative", _GROUPED),
    *requires_default("model.overlap_moe_expert_parallel_comm", _NOT_TRIED, _GROUPED),
    *requires_default("model.dist_train.use_dist_train", _NOT_TRIED, _GROUPED),
    *requires_default(
        "ddp.use_megatron_fsdp dist.use_megatron_fsdp", "set objective.reference_logps for Megatron-FSDP", _ADAPTERS_OFF
    ),
)  # fmt: skip

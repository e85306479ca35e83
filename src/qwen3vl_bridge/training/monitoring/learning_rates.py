"""The learning rate of each part of the model, if they differ.

What lives here: finding the optimizer's group of a part. What may not: setting rates.
"""

from __future__ import annotations

from collections import defaultdict

from qwen3vl_bridge.parallel.collectives import gather_objects
from qwen3vl_bridge.weights.model_parts import part_of_wrapped

from megatron.bridge.training.callbacks import CallbackContext
from megatron.bridge.training.config import OptimizerConfigOverrideProvider, OptimizerConfigOverrideProviderContext
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import combine_param_group_overrides

_Span = tuple[float, float]  # the maximum and minimum rate, which identify groups


class PartRates:
    """Learning rates of the parts. Created on every rank at the same time (a collective call).

    Args:
        context: of a run that is about to start.
    """

    def __init__(self, context: CallbackContext) -> None:
        self._parts: dict[str, _Span] = {}
        if len({_span(group) for group in context.optimizer.param_groups}) < 2:  # the same on every rank
            return
        found: dict[str, set[_Span]] = defaultdict(set)
        for rank in gather_objects(_spans(context)):  # not every rank has all parts
            for part, spans in rank.items():
                found[part] |= spans
        self._parts = {part: next(iter(spans)) for part, spans in found.items() if len(spans) == 1}

    def now(self, optimizer: MegatronOptimizer) -> dict[str, float]:
        """The rate of each part with its own rate; empty if all parameters have the same."""
        rates = {_span(group): group["lr"] for group in optimizer.param_groups}
        return {f"lr_{part}": rates[span] for part, span in self._parts.items()}


def _span(group: dict) -> _Span:
    return group["max_lr"], group["min_lr"]


def _spans(context: CallbackContext) -> dict[str, set[_Span]]:
    """Rates of this rank's parameters, by the rules from which the optimizer's groups were made."""
    cfg, found = context.state.cfg, defaultdict(set)
    provider = cfg.optimizer_config_override_provider or OptimizerConfigOverrideProvider()
    rules = provider.build_config_overrides(
        OptimizerConfigOverrideProviderContext(cfg.scheduler, cfg.optimizer, context.model)
    )
    usual = dict(max_lr=cfg.optimizer.lr, min_lr=cfg.optimizer.min_lr)
    for chunk in context.model:
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                own = [rule for key, rule in (rules or {}).items() if key.matches(parameter, name)]
                found[part_of_wrapped(name).value].add(_span(usual | combine_param_group_overrides(own)))
    return dict(found)

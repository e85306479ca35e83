"""The two balancing losses of megatron-core's router, as public methods to override.

Overridden: `TopKRouter._apply_aux_loss` and `TopKRouter._apply_global_aux_loss`, which the router calls for each
microbatch. Their losses weight tokens by the number of tokens on their rank, and megatron-core 0.19 has no public place
to change that (docs/upstream/router_gradient.md). Delete this module when megatron-core sums these losses over all
ranks of a group.
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancingRouter(TopKRouter):
    """megatron-core's router with balancing losses that a subclass computes."""

    def balance_microbatch(self, probs: Tensor, scores: Tensor, routing_map: Tensor) -> Tensor:
        """Attach the balancing loss over one microbatch to `probs` [tokens, experts], and return the result.

        `scores` and `routing_map` have the same shape.
        """
        raise NotImplementedError

    def balance_global_batch(self, probs: Tensor, scores: Tensor, routing_map: Tensor) -> Tensor:
        """Attach the balancing loss over all microbatches of the step so far to `probs`, and return the result."""
        raise NotImplementedError

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self.balance_microbatch(probs, scores_for_aux_loss, routing_map)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        return self.balance_global_batch(probs, scores_for_aux_loss, routing_map)

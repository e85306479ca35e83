"""Layers with experts: the router with its balancing losses over real tokens, and how megatron-core's layer is
corrected.

Padding is not in the router's map: megatron-core's TopKRouter leaves it out, by the `padding_mask` that the model
passes.
"""

from __future__ import annotations

from qwen3vl_bridge.parallel.collectives import sum_counts

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


class BalancedRouter(TopKRouter):
    """megatron-core's router, with auxiliary losses that weight all real tokens equally, however tokens are split.

    The balancing loss is E / (N^2 k) * sum_e f_e P_e over N real tokens that choose k of E experts each, f_e of them
    expert e, with the sum P_e of their scores. A rank has only the scores of its own tokens, so the sum of the ranks'
    losses is the whole loss. It is averaged over microbatches: weighted by their tokens if losses are divided by the
    tokens of the global batch (`calculate_per_token_loss`), and equally if megatron-core divides by the number of
    microbatches. megatron-core 0.19 weights the first by the rank's own tokens times the ranks; and with a padding mask
    by N times the ranks, because it sums over ranks in place in the tensor that it then uses as the rank's own
    (docs/upstream/router_gradient.md). Source of the loss: Fedus et al., Switch Transformers, equation 4; over all
    ranks, Qiu et al. (arXiv 2501.11873).
    """

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Like TopKRouter's: balance within a microbatch, over the ranks that share it."""
        if not self.get_aux_loss_coeff("aux_loss"):
            return probs
        selected = sum_counts(routing_map.sum(0), self.tp_cp_group)
        return self._balance("aux_loss", probs, scores_for_aux_loss, selected, selected, self.tp_cp_group)

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """Like TopKRouter's: balance over all ranks, and over the microbatches of a step so far."""
        if not self.get_aux_loss_coeff("global_aux_loss"):
            return probs
        selected = sum_counts(routing_map.sum(0), self.tp_dp_cp_group)
        self.global_tokens_per_expert += selected
        self.ga_steps += 1
        mean = self.global_tokens_per_expert / self.ga_steps
        return self._balance("global_aux_loss", probs, scores_for_aux_loss, selected, mean, self.tp_dp_cp_group)

    def _balance(
        self, kind: str, probs: Tensor, scores: Tensor, selected: Tensor, wanted: Tensor, group: ProcessGroup
    ) -> Tensor:
        """Attach a loss to `probs` [tokens, E]; for a microbatch without real tokens it is 0, and so is its gradient.

        Args:
            scores: [tokens, E] of this rank, zero for padding.
            selected: [E] how often each expert is selected by real tokens of all ranks of `group`.
            wanted: [E] the f_e of the loss.
            group: ranks whose tokens are balanced together.
        """
        coefficient, tokens = self.get_aux_loss_coeff(kind), (selected.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            probs=scores,
            tokens_per_expert=wanted,
            total_num_tokens=tokens,
            topk=self.topk,
            num_experts=self.config.num_moe_experts,
            moe_aux_loss_coeff=coefficient,
            # Transformer Engine's kernel needs the number of tokens on the host (before 2.18), and at least one.
            fused=False,
        )
        # If losses are divided by microbatches, gradients are also divided by data-parallel ranks; over all of them,
        # the sum of the ranks' losses is one whole loss, and not one per rank.
        whole = 1 if self.calculate_per_token_loss else group.size() / self.tp_cp_group.size()
        return self.attach_and_log_load_balancing_loss(
            probs,
            coefficient * whole,  # divisor of the logged value
            loss * whole,
            kind.replace("aux_loss", "load_balancing_loss"),  # its name in logs
            group,
            needs_dp_avg=kind == "aux_loss",
            # It multiplies by the ranks that share a microbatch, so that a rank's tokens stand for all of them.
            valid_token_count=tokens / self.tp_cp_group.size(),
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Like TopKRouter's, except that if losses are divided by microbatches it is the mean over all tokens of one.

        megatron-core would take the mean of ranks' means, which depends on where padding is.

        Logits are [tokens, E] of this rank, the mask [tokens] is True for padding.
        """
        coefficient, ranks = self.config.moe_z_loss_coeff, self.tp_cp_group.size()
        learns = coefficient is not None and self.training and torch.is_grad_enabled()
        if not learns or self.calculate_per_token_loss or padding_mask is None or ranks == 1:
            return super().apply_z_loss(logits, padding_mask=padding_mask)
        real = ~padding_mask
        tokens = sum_counts(real.sum(), self.tp_cp_group).clamp(min=1)
        loss = (logits.logsumexp(-1).square() * real).sum() / tokens  # this rank's part of the mean
        row, rows = tracked_row(self), tracked_rows(self.config)
        get_moe_metrics_tracker().record("z_loss", loss * ranks, row + 1, rows, avg_group=self.tp_dp_cp_group)
        return MoEAuxLossAutoScaler.apply(logits, loss * coefficient)


def tracked_rows(config: TransformerConfig) -> int:
    """Values of a loss in megatron-core's tracker: one for each layer, those of multi-token prediction at the end."""
    return config.num_layers + (config.mtp_num_layers or 0)


def tracked_row(router: TopKRouter) -> int:
    """The index of a router's own value."""
    return router.layer_number - 1 + (router.config.num_layers if router.is_mtp_layer else 0)


def forget_other_depths(config: TransformerConfig) -> None:
    """Empty megatron-core's tracker, one for the process, if its values are of a model of another depth.

    Deeper layers of a second model would be outside; and pipeline stages that sum their values need the same rows, also
    those that have recorded nothing. So this is called on all of them, before a microbatch's routers. Needless with
    docs/upstream/metrics_tracker.md.
    """
    if any(len(entry.values) != tracked_rows(config) for entry in get_moe_metrics_tracker().metrics.values()):
        destroy_moe_metrics_tracker()


# Of what a dispatcher has as values alone, maps of tokens to experts are large: [t, experts]; for Transformer Engine's
# permutation twice as wide, in int32.
_MAPS = ("probs", "routing_map", "reversed_local_input_permutation_mapping", "reversed_mapping_for_combine")


class ReleasingMoELayer(MoELayer):
    """megatron-core's, whose dispatcher keeps what it has routed until its next forward pass.

    Under full recomputation that is the finished graph of each layer, with the layer's input and its gradient. Needless
    with docs/upstream/moe_graphs.md.
    """

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """See MoELayer."""
        output = super().postprocess(output, shared_expert_output)
        dispatcher = self.token_dispatcher
        for owner in (dispatcher, getattr(dispatcher, "_comm_manager", dispatcher)):  # of "flex"
            for name, value in vars(owner).items():
                if isinstance(value, Tensor) and (value.grad_fn is not None or name in _MAPS):
                    setattr(owner, name, None)  # autograd has saved what the backward pass needs
        return output

"""The loss of pairs of a chosen and a rejected answer (DPO), computed from the losses of the tokens of a row.

Both answers of a pair are segments of the same row, so that no microbatch depends on another one. The log-probability
of an answer is a sum over tokens, which context-parallel ranks share: each rank sums its tokens, and the sums are added
over the ranks. All of these ranks then compute the same loss, and each gets the gradient of its own tokens. The loss is
summed over pairs; megatron-core divides gradients by the pairs of the global batch, as it does with tokens
(`calculate_per_token_loss`).

Under LoRA, the reference model is the model without its adapters. A second forward pass, without gradients, computes
its losses. A pipeline stage sends the hidden states of both models as one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Self

from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch
from qwen3vl_bridge.core.collectives import sum_own_parts
from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import token_index

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn.functional import logsigmoid

# Means over pairs, with the names of TRL.
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What a run trains its model to do. Settings other than `kind` are for "dpo", and are named as in TRL.

    Attributes:
        kind: "sft" trains on the answers of conversations; "dpo" (direct preference optimization) prefers the chosen to
            the rejected answers of pairs.
        loss_type: the loss of a pair: "sigmoid", "robust" (against wrong labels) or "ipo".
        beta: how much the model is kept near the reference model; for "ipo" the regularization parameter tau.
        label_smoothing: probability that chosen and rejected answers are swapped in the data, from 0 to below 0.5. Not
            for "ipo".
        rpo_alpha: weight of the mean loss of the chosen answer's tokens, which is added to the loss of a pair; None for
            no such term.
        reference_logps: folder with log-probabilities of the answers under the reference model, written by
            `qwen3vl data score`. None: the reference is the model without its adapters.
        reference_model: weights of the reference model that computed `reference_logps`; None for the initial weights of
            the run, `checkpoint.pretrained_checkpoint`.
    """

    kind: Literal["sft", "dpo"] = "sft"
    loss_type: Literal["sigmoid", "robust", "ipo"] = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    rpo_alpha: float | None = None
    reference_logps: str | None = None
    reference_model: str | None = None

    @property
    def trains_pairs(self) -> bool:
        """Return whether the run trains on pairs of a chosen and a rejected answer."""
        return self.kind == "dpo"


def preference_settings(cfg: Any) -> ObjectiveConfig | None:
    """Return the settings of a run's objective if it trains on pairs, otherwise None."""
    objective = getattr(cfg, "objective", None)  # Megatron-Bridge's own configuration has none
    return objective if objective is not None and objective.trains_pairs else None


@dataclass(frozen=True)
class Pairs(Transferable):
    """The pairs of a microbatch, as one context-parallel rank needs them to compute the loss. P is their number."""

    segments: Tensor  # [tokens] int64, the segment of each token of this rank
    loss_mask: Tensor  # [tokens] float32, 1 where the label of a token belongs to an answer
    counts: Tensor  # [P, 2] float64, tokens of the chosen and the rejected answer, over all ranks
    is_counted: Tensor  # [P] float64, 0 for a pair without a chosen or a rejected answer, such as an unreadable record
    num_segments: int
    reference: Tensor | None  # [P, 2] float64, log-probabilities under the reference model, if the batch has them

    @classmethod
    def from_batch(cls, batch: TokenBatch, groups: ProcessGroupCollection) -> Self:
        """Return the pairs of a batch on the host. Raise ValueError for a batch of other samples."""
        if not batch.pairs:
            raise ValueError(
                "objective.kind is 'dpo', but the batch has no pairs of answers: read the data with "
                "Qwen3VLConversationProvider(pairs=True), or set objective.kind=sft"
            )
        layout, mask = batch.layout, batch.loss_mask.flatten()
        segments = layout.segment_ids()
        counts = torch.zeros(len(layout.lengths), dtype=torch.float64).index_add_(0, segments, mask.double())
        counts = counts[: 2 * batch.pairs].view(-1, 2)
        index = token_index(layout, groups.cp.size(), groups.cp.rank()).T.flatten()
        return cls(
            segments=segments[index],
            loss_mask=mask[index],
            counts=counts,
            is_counted=(counts > 0).all(1).double(),
            num_segments=len(layout.lengths),
            reference=batch.reference_logps,
        )

    def logps(self, losses: Tensor, groups: ProcessGroupCollection) -> Tensor:
        """Return the log-probability of each answer [P, 2] in float64, from the losses of this rank's tokens [b, s].

        Sums are in float64, so that they hardly depend on how tokens are divided over ranks.
        """
        logps = -(losses.flatten() * self.loss_mask).double()
        sums = logps.new_zeros(self.num_segments).index_add(0, self.segments, logps)
        return sum_own_parts(sums, groups.cp)[: 2 * len(self.counts)].view(-1, 2)


def pair_losses(settings: ObjectiveConfig, policy: Tensor, reference: Tensor, counts: Tensor) -> Tensor:
    """Return the loss of each pair [P] for log-probabilities and numbers of tokens of its answers [P, 2].

    The formulas are those of TRL (`trl/trainer/dpo_trainer.py`): "sigmoid" of arXiv 2305.18290, with the label
    smoothing of cDPO; "robust" of arXiv 2403.00409; "ipo" of arXiv 2310.12036, of means over tokens. `rpo_alpha` adds
    the mean loss of the tokens of the chosen answer (arXiv 2404.19733).
    """
    scores, smoothing = policy - reference, settings.label_smoothing
    if settings.loss_type == "ipo":
        scores = scores / counts.clamp(min=1)
        losses = (scores[:, 0] - scores[:, 1] - 1 / (2 * settings.beta)) ** 2
    else:
        margins = settings.beta * (scores[:, 0] - scores[:, 1])
        right, wrong = -(1 - smoothing) * logsigmoid(margins), -smoothing * logsigmoid(-margins)
        losses = (right - wrong) / (1 - 2 * smoothing) if settings.loss_type == "robust" else right + wrong
    if settings.rpo_alpha is not None:
        losses = losses - settings.rpo_alpha * policy[:, 0] / counts[:, 0].clamp(min=1)
    return losses


def pair_metrics(settings: ObjectiveConfig, policy: Tensor, reference: Tensor) -> Tensor:
    """Return the values of `METRICS` of each pair, [len(METRICS), P], from log-probabilities [P, 2]."""
    chosen, rejected = (settings.beta * (policy - reference)).unbind(1)
    return torch.stack((chosen, rejected, (chosen > rejected).double(), chosen - rejected, *policy.unbind(1)))


def make_loss(
    settings: ObjectiveConfig, pairs: Pairs, reference_losses: Tensor | None, groups: ProcessGroupCollection
) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Return the loss function of a microbatch of pairs.

    It maps the losses [b, s] of this rank's tokens to (sum of the pairs' losses, number of pairs, values to report).
    Context-parallel ranks compute the same sum; only the first of them counts and reports the pairs.

    Args:
        settings: the objective.
        pairs: the pairs, on the device.
        reference_losses: the losses [b, s] of the reference model; None if `pairs` has its log-probabilities.
        groups: the process groups.
    """

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        policy = pairs.logps(losses, groups)
        reference = pairs.reference if reference_losses is None else pairs.logps(reference_losses, groups)
        assert reference is not None  # `run_validation` requires one of both
        total = (pair_losses(settings, policy, reference, pairs.counts) * pairs.is_counted).sum()
        with torch.no_grad():
            is_first = float(groups.cp.rank() == 0)
            number = pairs.is_counted.sum() * is_first
            sums = (pair_metrics(settings, policy, reference) * pairs.is_counted).sum(1) * is_first
            report = {name: torch.stack((value, number)).float() for name, value in zip(METRICS, sums, strict=True)}
            report = {"lm loss": torch.stack((total.detach() * is_first, number)).float()} | report
        return total.float(), number.int(), report

    return loss


def run_with_reference(model: torch.nn.Module, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
    """Run a pipeline stage with and without adapters.

    Returns:
        On the last stage, the losses [b, s] of the model and of the reference. On other stages, one tensor for the
        next stage, with the hidden states of both models one after the other; and None.
    """
    chunk = get_attr_wrapped_model(model, "take_received", return_model_obj=True)
    policy, reference = (None, None) if chunk.pre_process else chunk.take_received().chunk(2)
    with torch.no_grad(), without_adapters(chunk):
        chunk.set_input_tensor(reference)
        without = model(inputs=inputs)
    chunk.set_input_tensor(policy)
    output = model(inputs=inputs)
    return (output, without) if chunk.post_process else (torch.cat((output, without)), None)


@contextlib.contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Turn off the adapters of a model inside the `with` block."""
    adapted = [module for module in model.modules() if hasattr(module, "disable_adapter_layers")]
    for module in adapted:
        module.disable_adapter_layers()
    try:
        yield
    finally:
        for module in adapted:
            module.enable_adapter_layers()

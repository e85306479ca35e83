"""The loss of preference data (DPO, KTO), computed from the losses of the tokens of a row.

A record has two documents, which are segments of the same row, so that no microbatch depends on another one: for DPO
the chosen and the rejected answer, for KTO the answer and the answer of another record. The log-probability of an
answer is a sum over tokens, which context-parallel ranks share: each rank sums its tokens, and the sums are added over
the ranks. All of these ranks then compute the same loss, and each gets the gradient of its own tokens. The loss is
summed over records; megatron-core divides gradients by the number of records in the global batch, as it does with
tokens (`calculate_per_token_loss`).

Under LoRA, the reference model is the model without its adapters. A second forward pass, without gradients, computes
its losses. A pipeline stage sends the hidden states of both models as one tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch
from qwen3vl_bridge.core.collectives import sum_own_parts
from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import token_index
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class DocumentLosses(Transferable):
    """The inputs with which a context-parallel rank sums the losses of its tokens by document.

    R is the number of records, each of which has two documents.
    """

    segments: Tensor  # [tokens] int64, the segment of each token of this rank
    loss_mask: Tensor  # [tokens] float32, 1 where the label of a token belongs to an answer
    counts: Tensor  # [R, 2] float64, tokens of both answers of a record, over all ranks
    is_counted: Tensor  # [R] float64, 0 for a record without both answers, such as an unreadable one
    num_segments: int
    is_desirable: Tensor | None  # [R] float64, labels of KTO data
    reference: Tensor | None  # [R, 2] float64, log-probabilities under the reference model, if the batch has them

    @classmethod
    def from_batch(cls, batch: TokenBatch, groups: ProcessGroupCollection) -> Self:
        """Return the inputs of this context-parallel rank for a batch, on the host."""
        layout, mask, records = batch.layout, batch.loss_mask.flatten(), batch.groups
        assert records is not None and set(records.sizes) <= {2}
        segments = layout.segment_ids()
        counts = torch.zeros(len(layout.lengths), dtype=torch.float64).index_add_(0, segments, mask.double())
        counts = counts[: records.num_documents].view(-1, 2)
        index = token_index(layout, groups.cp.size(), groups.cp.rank()).T.flatten()
        return cls(
            segments=segments[index],
            loss_mask=mask[index],
            counts=counts,
            is_counted=(counts > 0).all(1).double(),
            num_segments=len(layout.lengths),
            is_desirable=records.is_desirable,
            reference=records.reference_logps,
        )

    def logps(self, losses: Tensor, groups: ProcessGroupCollection) -> Tensor:
        """Return the log-probability of each answer [R, 2] in float64, from the losses of this rank's tokens [b, s].

        Sums are in float64, so that they hardly depend on how tokens are divided over ranks.
        """
        logps = -(losses.flatten() * self.loss_mask).double()
        sums = logps.new_zeros(self.num_segments).index_add(0, self.segments, logps)
        return sum_own_parts(sums, groups.cp)[: 2 * len(self.counts)].view(-1, 2)


def dpo_losses(settings: ObjectiveConfig, policy: Tensor, reference: Tensor, counts: Tensor) -> Tensor:
    """Return the DPO loss of each pair [R].

    The formulas are those of TRL (`trl/trainer/dpo_trainer.py`): "sigmoid" of arXiv 2305.18290, with the label
    smoothing of cDPO; "robust" of arXiv 2403.00409; "ipo" of arXiv 2310.12036, of means over tokens. `rpo_alpha` adds
    the mean loss of the tokens of the chosen answer (arXiv 2404.19733).

    Args:
        settings: the objective.
        policy, reference: [R, 2], log-probabilities of the chosen and the rejected answer under the trained model and
            under the reference model.
        counts: [R, 2], numbers of tokens of the answers.
    """
    scores, smoothing = policy - reference, settings.label_smoothing
    if settings.formula == "ipo":
        scores = scores / counts.clamp(min=1)
        losses = (scores[:, 0] - scores[:, 1] - 1 / (2 * settings.beta)) ** 2
    else:
        margins = settings.beta * (scores[:, 0] - scores[:, 1])
        right, wrong = -(1 - smoothing) * logsigmoid(margins), -smoothing * logsigmoid(-margins)
        losses = (right - wrong) / (1 - 2 * smoothing) if settings.formula == "robust" else right + wrong
    if settings.rpo_alpha is not None:
        losses = losses - settings.rpo_alpha * policy[:, 0] / counts[:, 0].clamp(min=1)
    return losses


def dpo_metrics(settings: ObjectiveConfig, policy: Tensor, reference: Tensor) -> Tensor:
    """Return the six metrics that `ObjectiveConfig.metrics` names, in this order, for each pair: [6, R].

    `policy` and `reference` are log-probabilities [R, 2], see `dpo_losses`.
    """
    chosen, rejected = (settings.beta * (policy - reference)).unbind(1)
    return torch.stack((chosen, rejected, (chosen > rejected).double(), chosen - rejected, *policy.unbind(1)))


def kto_losses(
    settings: ObjectiveConfig, policy: Tensor, reference: Tensor, is_desirable: Tensor, is_counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each record [R], and the estimated divergence of the model from the reference model.

    The divergence is 0 for "apo_zero_unpaired", which does not use it.

    The formulas are those of TRL (`trl/trainer/kto_trainer.py`): "kto" of arXiv 2402.01306 and "apo_zero_unpaired" of
    arXiv 2408.06266. The divergence is the mean over the records of the row, at least 0, and has no gradient.

    Args:
        settings: the objective.
        policy, reference: [R, 2], log-probabilities of two answers to the prompt of a record, its own and the answer of
            another record, under the trained model and under the reference model.
        is_desirable: [R], 1 for desirable answers.
        is_counted: [R], 0 for records that are left out.
    """
    own, mismatched = (policy - reference).unbind(1)
    divergence = (mismatched.detach() * is_counted).sum() / is_counted.sum().clamp(min=1)
    divergence = divergence.clamp(min=0)
    is_good = is_desirable > 0
    if settings.formula == "apo_zero_unpaired":
        probability, divergence = (settings.beta * own).sigmoid(), torch.zeros_like(divergence)
        losses = torch.where(is_good, 1 - probability, probability)
    else:
        losses = 1 - (settings.beta * torch.where(is_good, own - divergence, divergence - own)).sigmoid()
    return losses * torch.where(is_good, settings.desirable_weight, settings.undesirable_weight), divergence


def preference_loss(
    settings: ObjectiveConfig,
    documents: DocumentLosses,
    reference_losses: Tensor | None,
    groups: ProcessGroupCollection,
) -> Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Return the loss function of a microbatch, see `run_objective` of `step.py`.

    Args:
        settings: the objective.
        documents: the documents of the batch, on the device.
        reference_losses: the losses [b, s] of the reference model; None if `documents` has its log-probabilities.
        groups: the process groups.
    """

    def loss(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        policy, counted = documents.logps(losses, groups), documents.is_counted
        reference = documents.reference if reference_losses is None else documents.logps(reference_losses, groups)
        assert reference is not None  # `run_validation` requires one of both
        weights = [counted] * len(settings.metrics)  # which records each metric is a mean of
        if settings.kind == "dpo":
            values = dpo_losses(settings, policy, reference, documents.counts)
            metrics = dpo_metrics(settings, policy.detach(), reference)
        else:
            good = documents.is_desirable
            assert good is not None
            values, divergence = kto_losses(settings, policy, reference, good, counted)
            rewards, logps = settings.beta * (policy - reference).detach()[:, 0], policy.detach()[:, 0]
            metrics = torch.stack((rewards, rewards, logps, logps, divergence.expand_as(rewards)))
            weights = [counted * good, counted * (1 - good)] * 2 + [counted]
        total = (values * counted).sum()
        is_first = float(groups.cp.rank() == 0)
        number = counted.sum() * is_first
        report = {"lm loss": torch.stack((total.detach() * is_first, number)).float()}
        for name, value, weight in zip(settings.metrics, metrics, weights, strict=True):
            report[name] = torch.stack(((value * weight).sum(), weight.sum())).float() * is_first
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

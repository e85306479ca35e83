"""The loss of embedding models and rerankers, computed from the hidden state of the last token of each prompt.

Each rank places the hidden states that it has in a tensor for all documents of the row; the sum over context-parallel
and sequence-parallel ranks is complete. All of these ranks compute the same loss, and each gets the gradient of its own
hidden states. The loss is summed over queries or documents; megatron-core divides gradients by their number in the
global batch, as it does with tokens (`calculate_per_token_loss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import gather_in_group, gather_stacked, scatter_sequence, sum_own_parts
from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import token_index

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

if TYPE_CHECKING:
    from qwen3vl_bridge.training.objectives import ObjectiveConfig


@dataclass(frozen=True)
class PooledDocuments(Transferable):
    """Where the last tokens of prompts are on a rank, and what the documents are. D is the number of documents."""

    slots: Tensor  # [K] int64, indices into the hidden states [s / sp, b] of this rank, flattened
    documents: Tensor  # [K] int64, the document of each of these hidden states
    document_of: Tensor  # [b, s] int64, the document of each token of this context-parallel rank, or -1
    is_first: Tensor  # [D] bool, for the first document of a record, the query of an embedding model
    is_positive: Tensor  # [D] bool, for relevant documents
    is_counted: Tensor  # [D] bool, False for documents of unreadable records
    answer_tokens: tuple[int, int] | None  # ids of "yes" and "no", for a reranker
    config: Any  # the provider
    pg_collection: ProcessGroupCollection

    @classmethod
    def from_batch(cls, batch: TokenBatch, model: torch.nn.Module) -> Self:
        """Return the documents of a batch, on the host."""
        config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
        layout, mask, records = batch.layout, batch.loss_mask.flatten() > 0, batch.groups
        assert records is not None
        count, segments = records.num_documents, layout.segment_ids()
        # The label of a prompt's last token is the first token of the answer.
        tokens = mask.nonzero().squeeze(1)
        is_last = torch.ones_like(tokens, dtype=torch.bool)
        is_last[1:] = segments[tokens[1:]] != segments[tokens[:-1]]
        tokens = tokens[is_last]
        document_of = torch.full((layout.total,), -1).index_copy(0, tokens, segments[tokens])
        cp, sp = (groups.cp.size(), groups.cp.rank()), (1, 0)
        if config.sequence_parallel:
            sp = (groups.tp.size(), groups.tp.rank())
        local = document_of[token_index(layout, *cp, *sp).flatten()]
        slots = (local >= 0).nonzero().squeeze(1)
        sizes = torch.tensor(records.sizes)
        firsts = sizes.cumsum(0) - sizes
        is_first, answers = torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.int64)
        is_first[firsts] = True
        answers[segments[tokens]] = batch.labels.flatten()[tokens]
        if records.answer_tokens is None:  # the second document of an embedding model's record is the positive one
            is_positive = is_first.roll(1)
        else:
            is_positive = answers == records.answer_tokens[0]
        return cls(
            slots=slots,
            documents=local[slots],
            document_of=document_of[token_index(layout, *cp).T],
            is_first=is_first,
            is_positive=is_positive,
            is_counted=torch.zeros(count, dtype=torch.bool).index_fill(0, segments[tokens], True),
            answer_tokens=records.answer_tokens,
            config=config,
            pg_collection=groups,
        )

    @property
    def mask(self) -> Tensor:
        """Return 1 for the last token of each prompt and 0 for other tokens, [b, s] float32."""
        return (self.document_of >= 0).float()

    def per_token(self, values: Tensor) -> Tensor:
        """Return values [D] of the documents at the last tokens of their prompts, and 0 elsewhere, [b, s]."""
        return values[self.document_of.clamp(min=0)] * self.mask

    def pool_or_score(
        self, *, hidden_states: Tensor, output_layer: torch.nn.Module, output_weight: Tensor | None, **_: Any
    ) -> Tensor:
        """Return the hidden states [D, h] of the documents, or for a reranker the logits [D, 2] of "yes" and "no".

        All ranks of a row return the same, in float32. An `output_processor` of GPTModel.
        """
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        hidden = hidden_states.flatten(0, 1)[self.slots].float()
        pooled = hidden.new_zeros(len(self.is_first), hidden.size(-1)).index_copy(0, self.documents, hidden)
        if self.config.sequence_parallel:
            pooled = sum_own_parts(pooled, tp)
        if self.answer_tokens is None:
            return sum_own_parts(pooled, cp)
        # The output layer gathers the sequence, so its length must be a multiple of the ranks. Logits of documents that
        # other context-parallel ranks have are zero here. So a rank adds to the gradient of the layer for its own only.
        padded = F.pad(pooled, (0, 0, 0, -len(pooled) % tp.size())).to(hidden_states.dtype)[:, None]
        local = scatter_sequence(padded, self.config, self.pg_collection)
        logits = output_layer(local, weight=output_weight, runtime_gather_output=False)[0][: len(pooled), 0]
        first, count = tp.rank() * logits.size(-1), logits.size(-1)
        answers = [
            logits[:, token - first] if first <= token < first + count else logits[:, 0] * 0
            for token in self.answer_tokens
        ]
        return sum_own_parts(sum_own_parts(torch.stack(answers, 1).float(), tp), cp)


def info_nce(
    settings: ObjectiveConfig, embedded: Tensor, pooled: PooledDocuments, dp: torch.distributed.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the InfoNCE loss [D] of each query, its similarity to the positive document, and to the nearest other one.

    The candidates of a query are all documents in the rows that data-parallel ranks run at the same time, except for
    queries (arXiv 1807.03748). Values of documents that are not queries have no meaning. Without other candidates the
    nearest similarity is minus infinity.

    Args:
        settings: the objective.
        embedded: [D, h], not normalized.
        pooled: the documents.
        dp: the group of data-parallel ranks.
    """
    count, most = len(embedded), settings.max_documents
    if count > most:
        raise ValueError(f"a row has {count} documents, expected at most objective.max_documents, {most}")
    # Ranks exchange tensors of one size, because they do not know how many documents the others have.
    embedded = F.normalize(embedded, dim=-1)
    candidates = gather_in_group(F.pad(embedded, (0, 0, 0, most - count)), dp).flatten(0, 1)
    is_candidate = gather_stacked(F.pad(pooled.is_counted & ~pooled.is_first, (0, most - count)).float(), dp).flatten()
    similarity = (embedded @ candidates.T).masked_fill(is_candidate == 0, -torch.inf)
    positive = (torch.arange(1, count + 1, device=embedded.device) + dp.rank() * most)[:, None]  # follows its query
    positive = positive.clamp(max=similarity.size(1) - 1)
    own = similarity.gather(1, positive)
    others = similarity.scatter(1, positive, -torch.inf)
    if settings.false_negative_margin is not None:
        others = others.masked_fill(others > own + settings.false_negative_margin, -torch.inf)
    losses = F.softplus(torch.logsumexp(others / settings.temperature, 1) - own[:, 0] / settings.temperature)
    return losses, own[:, 0].detach(), others.amax(1).detach()


def freeze_unused_output(model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Freeze the output layer of an embedding model, unless it shares the weight of the embedding of tokens.

    It would have no gradient, for which the reduction of gradients would wait.
    """
    for chunk in model:
        language_model = get_attr_wrapped_model(chunk, "language_model")
        if language_model.post_process and not language_model.share_embeddings_and_output_weights:
            language_model.output_layer.requires_grad_(False)
    return model


class RetrievalLoss:
    """Loss function of a microbatch, see `run_objective`. `token_losses` is set by the call."""

    def __init__(self, settings: ObjectiveConfig, pooled: PooledDocuments) -> None:
        self.settings, self.pooled = settings, pooled
        self.token_losses: Tensor | None = None  # [b, s], the losses of the documents at the last tokens of prompts

    def __call__(self, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the sum of the losses, their number, and values to report, from the result of `pool_or_score`."""
        pooled, groups = self.pooled, self.pooled.pg_collection
        losses, counted, metrics = (self._embedding if pooled.answer_tokens is None else self._reranker)(output)
        losses = torch.where(counted, losses, 0.0)
        self.token_losses = pooled.per_token(losses.detach())
        is_first = float(groups.cp.rank() == 0)
        total, number = losses.sum(), counted.sum() * is_first
        report = {"lm loss": torch.stack((total.detach() * is_first, number))}
        for name, (values, where) in zip(self.settings.metrics, metrics, strict=True):
            report[name] = torch.stack((torch.where(where, values, 0.0).sum(), where.sum())) * is_first
        return total, number.int(), report

    def _embedding(self, output: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the loss of each document, whether it counts, and (values, where they count) of each metric."""
        pooled, dims = self.pooled, self.settings.matryoshka_dims or [output.size(1)]
        found = [info_nce(self.settings, output[:, :size], pooled, pooled.pg_collection.dp) for size in dims]
        losses = torch.stack([losses for losses, _, _ in found]).mean(0)
        _, own, nearest = found[-1]
        queries = pooled.is_first & pooled.is_counted
        return losses, queries, [
            ((own > nearest).float(), queries), (own, queries), (nearest, queries & nearest.isfinite()),
        ]  # fmt: skip

    def _reranker(self, output: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the same as `_embedding`, for logits [D, 2]."""
        counted, positive = self.pooled.is_counted, self.pooled.is_positive
        scores = output[:, 0] - output[:, 1]
        losses = F.binary_cross_entropy_with_logits(scores, positive.float(), reduction="none")
        probability = scores.detach().sigmoid()
        right = ((scores > 0) == positive).float()
        return losses, counted, [
            (right, counted), (probability, counted & positive), (probability, counted & ~positive),
        ]  # fmt: skip

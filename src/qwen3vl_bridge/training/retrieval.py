"""The loss of embedding models and rerankers, computed from the hidden state of the last token of each prompt.

Each rank fills in the rows of a [documents, h] tensor for the last tokens that it has, and leaves zeros elsewhere. The
sum over context- and sequence-parallel ranks has all rows. All of these ranks compute the same loss, and each gets the
gradient of its own hidden states. The loss is summed over queries or documents; megatron-core divides gradients by
their number in the global batch, as it does with tokens (`calculate_per_token_loss`).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any, Self

from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import gather_in_group, gather_stacked, sum_gradients, sum_own_parts
from qwen3vl_bridge.core.device_transfer import Transferable
from qwen3vl_bridge.core.layout import token_index
from qwen3vl_bridge.training.objective_settings import ObjectiveConfig

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor


@dataclass(frozen=True)
class PooledDocuments(Transferable):
    """Where the last tokens of prompts are on a rank, and what the documents are. D is the number of documents."""

    slots: Tensor  # [K] int64, indices into the hidden states [s / sp, b] of this rank, flattened
    documents: Tensor  # [K] int64, the document of each of these hidden states
    document_of: Tensor  # [b, s] int64, the document that a token of this context-parallel rank ends; -1 for others
    is_query: Tensor  # [D] bool, for the first document of each record
    is_positive: Tensor  # [D] bool, for documents whose answer is "yes" (reranker)
    is_counted: Tensor  # [D] bool, False for documents of unreadable records
    contents: Tensor  # [D] int64, equal for equal texts; unique for documents with images or videos
    answer_tokens: tuple[int, int] | None  # ids of "yes" and "no", for a reranker
    config: Any  # the provider
    pg_collection: ProcessGroupCollection

    @classmethod
    def from_batch(cls, batch: TokenBatch, model: torch.nn.Module) -> Self:
        """Return the documents of a batch, on the host.

        Raises:
            ValueError: an answer for a reranker does not begin with "yes" or "no".
        """
        config, groups = get_model_config(model), get_attr_wrapped_model(model, "pg_collection")
        layout, records, labels = batch.layout, batch.groups, batch.labels.flatten()
        assert records is not None
        count, segments = records.num_documents, layout.segment_ids()
        # The first trained position of a segment is the last token of the prompt: its label begins the answer.
        tokens = (batch.loss_mask.flatten() > 0).nonzero().squeeze(1)
        ends_prompt = torch.ones_like(tokens, dtype=torch.bool)
        ends_prompt[1:] = segments[tokens[1:]] != segments[tokens[:-1]]
        tokens = tokens[ends_prompt]
        document_of = torch.full((layout.total,), -1).index_copy(0, tokens, segments[tokens])
        cp, sp = (groups.cp.size(), groups.cp.rank()), (1, 0)
        if config.sequence_parallel:
            sp = (groups.tp.size(), groups.tp.rank())
        local = document_of[token_index(layout, *cp, *sp).flatten()]
        slots = (local >= 0).nonzero().squeeze(1)
        sizes = torch.tensor(records.sizes)
        no_document = torch.zeros(count, dtype=torch.bool)
        is_positive = no_document
        if records.answer_tokens is not None:
            yes, no = records.answer_tokens
            if not torch.isin(labels[tokens], torch.tensor([yes, no])).all():
                found = sorted({*labels[tokens].tolist()} - {yes, no})
                raise ValueError(f"answers begin with the tokens {found}, expected 'yes', {yes}, or 'no', {no}")
            is_positive = no_document.index_copy(0, segments[tokens], labels[tokens] == yes)
        return cls(
            slots=slots,
            documents=local[slots],
            document_of=document_of[token_index(layout, *cp).T],
            is_query=no_document.index_fill(0, sizes.cumsum(0) - sizes, True),
            is_positive=is_positive,
            is_counted=no_document.index_fill(0, segments[tokens], True),
            contents=_hash_contents(batch, count, groups.dp.rank()),
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
        """Return hidden states [D, h] of the documents, or for a reranker the scores [D], before the sigmoid.

        Results are in float32, and equal on all ranks of a row. An `output_processor` of GPTModel.
        """
        tp, cp = self.pg_collection.tp, self.pg_collection.cp
        hidden = hidden_states.flatten(0, 1)[self.slots].float()
        pooled = hidden.new_zeros(len(self.is_query), hidden.size(-1)).index_copy(0, self.documents, hidden)
        if self.config.sequence_parallel:
            pooled = sum_own_parts(pooled, tp)
        if self.answer_tokens is None:
            return sum_own_parts(pooled, cp)
        # A score is the logit of "yes" minus the logit of "no". It is computed from the difference of their weights in
        # float32, because 16 bits of a logit near 20 differ by 0.1. Each tensor-parallel rank adds the weights that it
        # has. Rows of other context-parallel ranks are zero, so the gradient of the weights is of own documents only.
        weight = output_layer.weight if output_weight is None else output_weight
        first, direction = tp.rank() * len(weight), weight.new_zeros(weight.size(1), dtype=torch.float32)
        for token, sign in zip(self.answer_tokens, (1, -1), strict=True):
            if first <= token < first + len(weight):
                direction = direction + sign * weight[token - first].float()
        return sum_own_parts(sum_own_parts(sum_gradients(pooled, tp) @ direction, tp), cp)


def _hash_contents(batch: TokenBatch, count: int, dp_rank: int) -> Tensor:
    """Return a number [count] for the content of each document, see `PooledDocuments.contents`."""
    starts, lengths = batch.layout.cu_seqlens_padded.tolist(), batch.layout.lengths
    ids, has_vision, hashes = batch.input_ids.flatten(), batch.vision_slot >= 0, []
    for number, (start, length) in enumerate(zip(starts[:count], lengths[:count], strict=True)):
        place = slice(start, start + length)
        unique = -1 - number - (dp_rank << 32)  # negative, unlike a checksum
        hashes.append(unique if has_vision[place].any() else zlib.crc32(ids[place].numpy()))
    return torch.tensor(hashes, dtype=torch.int64)


def info_nce(
    settings: ObjectiveConfig, embedded: Tensor, candidates: Tensor, is_candidate: Tensor, positive: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the InfoNCE losses [D], and the similarities [D] to the positive and to the nearest other document.

    Only their values for queries have a meaning. Without other candidates the nearest similarity is minus infinity.
    The formula is that of arXiv 1807.03748, for cosine similarities divided by a temperature.

    Args:
        settings: the objective.
        embedded: [D, h], not normalized.
        candidates: [C, h], documents of all data-parallel ranks, not normalized.
        is_candidate: [D, C] bool, whether a document is compared with a candidate; False for its positive document.
        positive: [D] int64, the index of the positive document of each query among the candidates.
    """
    similarity = F.normalize(embedded, dim=-1) @ F.normalize(candidates, dim=-1).T
    own = similarity.gather(1, positive[:, None])
    if settings.false_negative_margin is not None:
        is_candidate = is_candidate & (similarity <= own + settings.false_negative_margin)
    # Without any candidate the gradient of logsumexp is NaN, but only where `masked_fill` replaces it by zero.
    others = similarity.masked_fill(~is_candidate, -torch.inf)
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
    """Loss function of a microbatch, see `run_objective` of `step.py`. A call sets `token_losses`."""

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
        pooled, settings, dp = self.pooled, self.settings, self.pooled.pg_collection.dp
        count, most = len(output), settings.max_documents
        if count > most:
            raise ValueError(f"a row has {count} documents, expected at most objective.max_documents, {most}")
        # Ranks exchange tensors of one size, because they do not know how many documents the others have.
        candidates = gather_in_group(F.pad(output, (0, 0, 0, most - count)), dp).flatten(0, 1)
        is_document = F.pad(pooled.is_counted & ~pooled.is_query, (0, most - count)).long()
        contents = F.pad(pooled.contents, (0, most - count))
        is_document, contents = gather_stacked(torch.stack((is_document, contents), 1), dp).flatten(0, 1).unbind(1)
        positive = torch.arange(1, count + 1, device=output.device) + dp.rank() * most  # follows its query
        positive = positive.clamp(max=len(candidates) - 1)
        # The positive document itself, and documents with its text, which are relevant, too.
        is_candidate = (is_document > 0) & (contents != contents[positive][:, None])
        dims = sorted({*(settings.matryoshka_dims or ()), output.size(1)})
        found = [info_nce(settings, output[:, :n], candidates[:, :n], is_candidate, positive) for n in dims]
        losses = torch.stack([losses for losses, _, _ in found]).mean(0)
        _, own, nearest = found[-1]  # of the full embedding
        queries = pooled.is_query & pooled.is_counted
        return losses, queries, [
            ((own > nearest).float(), queries), (own, queries), (nearest, queries & nearest.isfinite()),
        ]  # fmt: skip

    def _reranker(self, output: Tensor) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Return the same as `_embedding`, for scores [D]."""
        counted, positive = self.pooled.is_counted, self.pooled.is_positive
        losses = F.binary_cross_entropy_with_logits(output, positive.float(), reduction="none")
        probability = output.detach().sigmoid()
        right = ((output > 0) == positive).float()
        return losses, counted, [
            (right, counted), (probability, counted & positive), (probability, counted & ~positive),
        ]  # fmt: skip

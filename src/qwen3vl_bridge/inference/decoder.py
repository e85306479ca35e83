"""Forward passes of generation: all prompts at once, then one new token of each, through all pipeline stages.

A stage receives hidden states from the previous one and sends them to the next, as in training. Each rank holds the
cache of its own layers. Context-parallel ranks divide the prompts as in training, and all compute the new tokens. A
step of one token is padded to the number of tokens that sequence parallelism and the products of FP8 layers need.

Legend of shapes: b rows, S tokens of a row with space for the answer, s tokens of a step, h hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.config.fields import token_multiple
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import gather_logits, gather_sequence, sum_in_group
from qwen3vl_bridge.core.layout import SequenceLayout, segment_multiple, token_index
from qwen3vl_bridge.models.common.decoding import PaddedContext, step_batch
from qwen3vl_bridge.models.common.model import VisionLanguageModel

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn


def step_multiple(model: VisionLanguageModel) -> int:
    """Return the number that must divide the tokens of a step on each rank, for sequence parallelism and FP8."""
    return model.config.local_arguments(model.pg_collection)["sp_size"] * token_multiple(model.config)


def row_multiple(model: VisionLanguageModel) -> int:
    """Return the number that must divide the length of a row."""
    return step_multiple(model) * segment_multiple(model.pg_collection.cp.size())


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than `tokens`."""
    return -(-tokens // multiple) * multiple


class Decoder:
    """Computes the logits of the next token of each row.

    Args:
        chunks: the model; several chunks with a virtual pipeline.
        batch: rows on the device of the model, each a prompt and space for its answer.
        lengths: number of tokens of each prompt.
    """

    def __init__(self, chunks: Sequence[VisionLanguageModel], batch: TokenBatch, lengths: Sequence[int]) -> None:
        self.chunks, self.batch, self.lengths = chunks, batch, lengths
        self.config, self.groups = chunks[0].config, chunks[0].pg_collection
        self.ends = torch.tensor(lengths).to(batch.input_ids.device)  # [b] tokens of each row so far
        self.generated = 0
        # None for layers that keep no state: each step then computes the full rows again.
        self.cache: PaddedContext | None = None
        if chunks[0].language_model.keeps_states:
            columns = self._columns(self._full_rows())[:, 0]
            max_new_tokens = batch.input_ids.size(1) - max(lengths)
            self.cache = PaddedContext(self.ends, columns, max_new_tokens, self.groups.cp)
        self.encoded: tuple[Tensor, Tensor] | None = None  # vision tokens, on the first stage
        self.pipeline: P2PCommunicator | None = None
        if self.groups.pp.size() > 1:
            # Steps differ in size from microbatches of training, so each tensor is sent after its shape.
            settings = copy.copy(self.config)
            settings.variable_seq_lengths = True
            self.pipeline = P2PCommunicator(self.groups.pp, settings)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes logits."""
        return self.chunks[-1].post_process

    def next_logits(self) -> Tensor | None:
        """Return logits [b, vocabulary] of the token after each row; None on pipeline stages before the last."""
        ranks = self.config.local_arguments(self.groups) | dict(with_next_tokens=False)
        if self.cache is None or not self.generated:
            step = self._full_rows()
            is_last = self._columns(step) == self.ends - 1
        else:
            self.cache.begin_step()
            step = self._newest_tokens()
            ranks |= dict(cp_size=1, cp_rank=0)  # every context-parallel rank computes the token
            is_last = None
        for chunk in self.chunks:
            inputs = step.local(**ranks | chunk.stage_arguments())
            if chunk.pre_process:
                if self.encoded is None or (self.cache is None and self.groups.cp.size() > 1):
                    self.encoded = chunk.encode(inputs)  # longer rows are divided differently over ranks
                hidden, layer_arguments = chunk.embed(inputs, self.encoded)
            else:
                chunk.set_input_tensor(self.pipeline.recv_forward((0, 0, 0), is_first_stage=False))
                hidden, layer_arguments = chunk.receive(inputs)
            output = chunk.decode(
                inputs.without_labels(),
                hidden,
                layer_arguments,
                inference_context=self.cache,
                output_processor=_logits_of_tokens,
                output_processor_context=(is_last, self.config, self.groups),
            )
            if not chunk.post_process:
                self.pipeline.send_forward(chunk.pack(output, layer_arguments), is_last_stage=False)
        return output[:, : self.config.vocab_size] if self.is_last_stage else None

    def append(self, tokens: Tensor) -> None:
        """Add a token [b] to each row."""
        self.batch.input_ids.scatter_(1, self.ends[:, None], tokens[:, None])
        self.ends = self.ends + 1
        self.generated += 1

    def _columns(self, step: TokenBatch) -> Tensor:
        """Return which token of its row [s, b] each token of this context-parallel rank is."""
        return token_index(step.layout, self.groups.cp.size(), self.groups.cp.rank()) % step.input_ids.size(1)

    def _full_rows(self) -> TokenBatch:
        """Return the rows up to the longest one's last token."""
        lengths = [length + self.generated for length in self.lengths]
        size = round_up(max(lengths), row_multiple(self.chunks[0]))
        slots = self.batch.vision_slot.view(self.batch.input_ids.shape)
        return replace(
            self.batch,
            input_ids=self.batch.input_ids[:, :size],
            labels=self.batch.labels[:, :size],
            loss_mask=self.batch.loss_mask[:, :size],
            position_ids=self.batch.position_ids[:, :, :size],
            vision_slot=slots[:, :size].flatten(),
            layout=SequenceLayout.padded_rows(lengths, size).to(slots.device),
        )

    def _newest_tokens(self) -> TokenBatch:
        """Return the last token of each row, and padding."""
        columns = self.ends[:, None] - 1 + torch.arange(step_multiple(self.chunks[0]), device=self.ends.device)
        columns = columns.clamp(max=self.batch.input_ids.size(1) - 1)
        positions = self.batch.position_ids.gather(2, columns.expand(3, -1, -1))
        return step_batch(self.batch.input_ids.gather(1, columns), positions)


def _logits_of_tokens(
    *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: Any, **_: Any
) -> Tensor:
    """Return logits [b, padded vocabulary] of one token of each row. An `output_processor` of GPTModel.

    `context` contains which tokens [s, b] of this rank these are, or None for the first ones, and the provider and its
    process groups.
    """
    is_last, config, groups = context
    hidden = gather_sequence(hidden_states, config, groups)
    if is_last is None:
        chosen = hidden[:1]
    else:  # one context-parallel rank has the last token of a row
        chosen = sum_in_group(torch.einsum("sbh,sb->bh", hidden, is_last.to(hidden.dtype)), groups.cp)[None]
    # The output layer gathers the tokens of sequence-parallel ranks, which are then copies of this one.
    logits, _ = output_layer(chosen, weight=output_weight, runtime_gather_output=False)
    return gather_logits(logits[0], groups)

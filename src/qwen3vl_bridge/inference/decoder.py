"""Forward passes of generation: all prompts at once, then one new token of each, through all pipeline stages.

A stage receives hidden states from the previous one and sends them to the next, as in training. Each rank holds the
cache of its own layers. Context-parallel ranks divide the prompts as in training, and all compute the new tokens. A
step of one token is padded to the number of tokens that sequence parallelism and the GEMMs of FP8 layers need.

Legend of shapes: b rows, S tokens of a row with space for the answer, s tokens of a step, h hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from qwen3vl_bridge.config.fields import VisionLanguageFields, token_multiple
from qwen3vl_bridge.core.batch import ModelInputs, TokenBatch
from qwen3vl_bridge.core.collectives import gather_logits, gather_sequence, sum_in_group
from qwen3vl_bridge.core.layout import SequenceLayout, segment_multiple, token_index
from qwen3vl_bridge.models.common.decoding import PaddedContext, step_inputs
from qwen3vl_bridge.models.common.model import VisionLanguageModel

import torch
import torch.nn.functional as F
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn


def step_multiple(model: VisionLanguageModel) -> int:
    """Return the number that must divide the tokens of a row in each step, for sequence parallelism and FP8 GEMMs."""
    return model.config.local_arguments(model.pg_collection)["sp_size"] * token_multiple(model.config)


def row_multiple(model: VisionLanguageModel) -> int:
    """Return the number that must divide the length of a row, for `step_multiple` and context parallelism."""
    return step_multiple(model) * segment_multiple(model.pg_collection.cp.size())


def round_up(tokens: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than `tokens`."""
    return -(-tokens // multiple) * multiple


def make_pipeline(config: VisionLanguageFields, groups: ProcessGroupCollection) -> P2PCommunicator | None:
    """Return a communicator between pipeline stages for generation; None if there is a single stage."""
    if groups.pp.size() == 1:
        return None
    # Steps differ in size from microbatches of training, so each tensor is sent after its shape.
    settings = copy.copy(config)
    settings.variable_seq_lengths = True
    return P2PCommunicator(groups.pp, settings)


def run_stages(
    chunks: Sequence[VisionLanguageModel],
    pipeline: P2PCommunicator | None,
    inputs_of: Callable[[VisionLanguageModel], ModelInputs],
    encode: Callable[[VisionLanguageModel, ModelInputs], tuple[Tensor, Tensor]] | None = None,
    **arguments: Any,
) -> Any:
    """Run a forward pass through the chunks of this rank, and return the output of the last chunk.

    Args:
        chunks: this rank's chunks of the model.
        pipeline: the communicator from `make_pipeline`.
        inputs_of: function that returns the inputs of a chunk.
        encode: function that returns vision tokens and DeepStack features for a chunk and its inputs; None to encode
            the images and videos of the inputs.
        arguments: further arguments of `VisionLanguageModel.decode`.
    """
    output = None
    for chunk in chunks:
        inputs = inputs_of(chunk)
        if chunk.pre_process:
            hidden, layer_arguments = chunk.embed(inputs, encode and encode(chunk, inputs))
        else:
            assert pipeline is not None
            chunk.set_input_tensor(pipeline.recv_forward((0, 0, 0), is_first_stage=False))
            hidden, layer_arguments = chunk.receive(inputs)
        output = chunk.decode(inputs, hidden, layer_arguments, **arguments)
        if not chunk.post_process:
            assert pipeline is not None
            pipeline.send_forward(chunk.pack(output, layer_arguments), is_last_stage=False)
    return output


class Decoder:
    """Computes the logits of the next token of each row.

    Args:
        chunks: the model; several chunks with a virtual pipeline.
        batch: rows on the host, each a prompt and space for its answer.
        lengths: number of tokens of each prompt.
        device: the device of the model.
    """

    def __init__(
        self, chunks: Sequence[VisionLanguageModel], batch: TokenBatch, lengths: Sequence[int], device: torch.device
    ) -> None:
        self.chunks, self.batch, self.device = chunks, batch, device
        self.config, self.groups = chunks[0].config, chunks[0].pg_collection
        self.ranks = self.config.local_arguments(self.groups)
        self.step_multiple, self.row_multiple = step_multiple(chunks[0]), row_multiple(chunks[0])
        self.ends = torch.tensor(lengths)  # [b] tokens of each row so far, on the host
        self.newest: Tensor | None = None  # [b] the latest token of each row
        self.encoded: tuple[Tensor, Tensor] | None = None  # vision tokens, on the first stage
        # None for layers that keep no state: each step then computes the full rows again.
        self.cache: PaddedContext | None = None
        if chunks[0].language_model.keeps_states:
            columns = self._columns(self._full_rows())[:, 0]
            max_new_tokens = batch.input_ids.size(1) - max(lengths)
            self.cache = PaddedContext(self.ends, columns, max_new_tokens, self.groups.cp, device)
            self.positions = batch.position_ids.to(device)  # [3, b, S]
            self.next_positions = self.ends.to(device)  # [b] where each row continues
        self.pipeline = make_pipeline(self.config, self.groups)

    @property
    def is_last_stage(self) -> bool:
        """Return True if this rank has the last pipeline stage, which computes logits."""
        return self.chunks[-1].post_process

    def next_logits(self) -> Tensor | None:
        """Return logits [b, vocabulary] of the token after each row; None on pipeline stages before the last."""
        newest = rows = is_last = None
        if self.cache is None or self.newest is None:
            rows = self._full_rows()
            is_last = (self._columns(rows) == self.ends - 1).to(self.device)
        else:  # every context-parallel rank computes the token
            self.cache.begin_step()
            newest = self._newest_tokens(self.newest)

        def inputs_of(chunk: VisionLanguageModel) -> ModelInputs:
            return newest or chunk.select_local(rows, with_next_tokens=False).without_labels().to(self.device)

        output = run_stages(
            self.chunks,
            self.pipeline,
            inputs_of,
            self._encode,
            inference_context=self.cache,
            output_processor=_logits_of_tokens,
            output_processor_context=(is_last, self.config, self.groups),
        )
        if self.cache is not None:  # later steps have no images
            self.batch, self.encoded = replace(self.batch, vision=None), None
        return output[:, : self.config.vocab_size] if self.is_last_stage else None

    def append(self, tokens: Tensor) -> None:
        """Append one token to each row. `tokens` has the shape [b]."""
        self.newest = tokens
        if self.cache is None:  # the full rows are computed again, from the host
            self.batch.input_ids[torch.arange(len(tokens)), self.ends] = tokens.cpu()
            self.ends = self.ends + 1

    def _encode(self, chunk: VisionLanguageModel, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return the vision tokens and DeepStack features of a step. They are empty if it only decodes a new token."""
        if self.cache is not None and self.newest is not None:
            return chunk.no_vision_tokens(self.device)
        # Longer rows are divided differently over context-parallel ranks, which then need other vision tokens.
        if self.encoded is None or self.groups.cp.size() > 1:
            self.encoded = chunk.encode(inputs)
        return self.encoded

    def _columns(self, step: TokenBatch) -> Tensor:
        """Return the index in its row of each token that this context-parallel rank computes, [s, b]."""
        return token_index(step.layout, self.groups.cp.size(), self.groups.cp.rank()) % step.input_ids.size(1)

    def _full_rows(self) -> TokenBatch:
        """Return the rows so far, on the host, padded to the longest row and to a multiple of `row_multiple`."""
        lengths = self.ends.tolist()
        size = round_up(max(lengths), self.row_multiple)
        slots = self.batch.vision_slot.view(self.batch.input_ids.shape)
        return replace(
            self.batch,
            input_ids=self.batch.input_ids[:, :size],
            labels=self.batch.labels[:, :size],
            loss_mask=self.batch.loss_mask[:, :size],
            position_ids=self.batch.position_ids[:, :, :size],
            vision_slot=slots[:, :size].flatten(),
            layout=SequenceLayout.padded_rows(lengths, size),
        )

    def _newest_tokens(self, tokens: Tensor) -> ModelInputs:
        """Return the inputs of this rank for a step with one token per row, and advance the positions by one.

        `tokens` [b] are the latest tokens. Padding follows each token, because sequence parallelism and FP8 GEMMs need
        `step_multiple` tokens per row.
        """
        padding = self.step_multiple - 1
        index = self.next_positions[None, :, None].expand(3, -1, 1)
        self.next_positions = self.next_positions + 1
        positions = F.pad(self.positions.gather(2, index), (0, padding))
        return step_inputs(
            F.pad(tokens[:, None], (0, padding)), positions, self.ranks["sp_size"], self.ranks["sp_rank"]
        )


def _logits_of_tokens(
    *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, context: Any, **_: Any
) -> Tensor:
    """Return logits [b, padded vocabulary] of one token of each row. An `output_processor` of GPTModel.

    `context` is (mask, provider, process groups). The mask [s, b] is True for the chosen token of each row; None
    chooses the first token of each row.
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

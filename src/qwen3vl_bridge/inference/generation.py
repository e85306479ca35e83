"""Greedy decoding with the Megatron model, without exporting a checkpoint. For sampling and serving, export it.

Legend of shapes: B prompts, S tokens of a prompt with padding, b prompts of equal length, s tokens of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.config.fields import token_multiple
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.core.collectives import broadcast_in_group, gather_logits
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.inputs.caller_batches import as_model_inputs
from qwen3vl_bridge.upstream.fsdp_parameters import module_parameters

import torch
import torch.nn.functional as F
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import GenerationConfig


@torch.no_grad()
def generate(
    model: nn.Module | list[nn.Module],
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    pixel_values_videos: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    mm_token_type_ids: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
) -> Tensor:
    """Generate answers greedily, like `generate(do_sample=False)` of transformers with the outputs of its processor.

    The vision tower runs once. Keys and values are cached, so each new token costs the compute of one token. There is
    no cache under sequence parallelism, which cannot shard a single token, and in models with linear attention, because
    megatron-core does not cache its state: each token then costs the compute of the full sequence. Prompts of equal
    length are decoded together, so there is no padding between a prompt and its answer.

    All ranks that `ranks_in_step` returns must get the same prompts. They return the answers of the first of them.

    Args:
        model: a VisionLanguageModel, wrapped or not, or a list with one. It is in eval mode during the call.
        input_ids, attention_mask: [prompts, tokens]. The mask is 0 at padding, on either side; None without padding.
        max_new_tokens: maximum length of an answer.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: outputs of the processor.
        mm_token_type_ids: ignored; the processor returns it, but `input_ids` contain the same information.
        eos_token_id: ids that end an answer, for example from `end_token_ids`. An empty list for none; None for the
            provider's id, which may mark the end of a text instead of a turn.
        pad_token_id: fills rows after the end of an answer. None for the provider's id, or else the first of
            `eos_token_id`.

    Returns:
        [prompts, tokens + longest answer] int64: `input_ids`, then the answers with their end tokens.

    Raises:
        ValueError: the model has pipeline or context parallelism, shapes are inconsistent, a prompt has no tokens, or
            images or videos do not match the tokens.
    """
    wrapped, model = model, _unwrap_single(model)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
    ends = model.config.eos_token_id if eos_token_id is None else eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends)
    pad = next((i for i in (pad_token_id, model.config.pad_token_id, *ends) if i is not None), 0)
    prompts = _remove_padding(input_ids, attention_mask)
    size = _round_up(max(map(len, prompts)) + max_new_tokens, model)
    ids = torch.stack([F.pad(prompt, (0, size - len(prompt)), value=pad) for prompt in prompts]).to(input_ids.device)
    inputs, _ = as_model_inputs(
        model.config,
        model.pg_collection,
        ids,
        attention_mask=torch.ones_like(ids),  # tokens of answers count as text
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grid_thw,
    )
    answers = input_ids.new_full((len(prompts), max_new_tokens), pad)
    longest, group = 0, ranks_in_step(wrapped)
    slots = ids.new_full((ids.numel(),), -1)  # by index in hidden states, flattened from [s, b]
    slots[inputs.fuse.targets] = inputs.fuse.sources
    slots = slots.view(ids.T.shape).T
    with _eval_mode(model), direct_module_calls(_first(wrapped)):
        encoded = model.encode(inputs)
        for length in dict.fromkeys(map(len, prompts)):
            rows = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            end = _round_up(length + max_new_tokens, model)
            batch = TokenBatch(
                input_ids=inputs.input_ids[rows, :end],  # the prompt, then padding that the answer overwrites
                labels=inputs.input_ids[rows, :end],  # required, but not used, like the mask
                loss_mask=torch.zeros(len(rows), end, device=ids.device),
                position_ids=inputs.position_ids[:, rows, :end],
                vision_slot=slots[rows, :end],
                layout=SequenceLayout.padded_rows([length] * len(rows), end),
                vision=inputs.vision,
            )
            decoded = _decode(model, batch, encoded, length, max_new_tokens, ends, pad, group)
            answers[rows, : decoded.shape[1]] = decoded
            longest = max(longest, decoded.shape[1])
    return torch.cat((input_ids, answers[:, :longest]), dim=1)


def end_token_ids(model: nn.Module | list[nn.Module], tokenizer: Any, hf_model: str | Path | None = None) -> list[int]:
    """Return the token ids that end an answer, for the argument `eos_token_id` of `generate`.

    These are the ids of the provider (end of a text), of the tokenizer (end of a turn in chat models), and of
    `generation_config.json` in `hf_model`, a folder or hub id.
    """
    ends = [_unwrap_single(model).config.eos_token_id, tokenizer.eos_token_id]
    if hf_model is not None:
        with contextlib.suppress(OSError):  # the model has no such file
            named = GenerationConfig.from_pretrained(str(hf_model)).eos_token_id
            ends += named if isinstance(named, list) else [named]
    return [end for end in dict.fromkeys(ends) if end is not None]


def ranks_in_step(model: nn.Module | list[nn.Module]) -> ProcessGroup | None:
    """Return the group of ranks over which Megatron-FSDP or expert parallelism shards weights; None if there is none.

    These ranks compute each forward pass together, so they must get the same prompts.
    """
    groups = _unwrap_single(model).pg_collection
    if megatron_fsdp(_first(model)) is not None:
        return groups.dp
    return groups.ep if groups.ep.size() > 1 else None


def _first(model: nn.Module | list[nn.Module]) -> nn.Module:
    return model[0] if isinstance(model, list) else model


def _unwrap_single(model: nn.Module | list[nn.Module]) -> VisionLanguageModel:
    """Return the model without wrappers. Raise ValueError if it is not a single model that can generate."""
    # megatron-core's `unwrap_model` stops at Megatron-FSDP, which has two wrappers.
    chunks = [[*_wrappers(chunk)][-1] for chunk in (model if isinstance(model, list) else [model])]
    if len(chunks) != 1 or not isinstance(chunks[0], VisionLanguageModel):
        found = [type(chunk).__name__ for chunk in chunks]
        raise ValueError(
            f"model is {found}, expected one VisionLanguageModel, such as Qwen3VLModel: chunks of a pipeline cannot "
            "generate"
        )
    groups = chunks[0].pg_collection
    for name, size in (("pipeline", groups.pp.size()), ("context", groups.cp.size())):
        if size > 1:
            raise ValueError(f"{name}-parallel size is {size}, expected 1 for generation: load the checkpoint with 1")
    return chunks[0]


def _remove_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each prompt without padding, on the host."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)} and attention_mask {list(mask.shape)}, expected "
            "[prompts, tokens] both"
        )
    prompts = [ids[keep] for ids, keep in zip(input_ids.cpu(), mask.cpu().bool(), strict=True)]
    empty = [row for row, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not prompts:
        raise ValueError(
            f"found {len(prompts)} prompts, and prompts {empty} have no tokens: expected at least one token in each"
        )
    return prompts


def _round_up(tokens: int, model: VisionLanguageModel) -> int:
    """Return a number of tokens, rounded up to the multiple that sequence parallelism and FP8 need."""
    multiple = model.config.local_arguments(model.pg_collection)["sp_size"] * token_multiple(model.config)
    return -(-tokens // multiple) * multiple


def _decode(
    model: VisionLanguageModel,
    batch: TokenBatch,
    encoded: tuple[Tensor, Tensor],
    length: int,
    max_new_tokens: int,
    ends: list[int],
    pad: int,
    group: ProcessGroup | None,
) -> Tensor:
    """Return answers [prompts, at most max_new_tokens] to prompts of equal length.

    Args:
        model: the model.
        batch: the prompts, in rows with space for the answers.
        encoded: the result of `model.encode` for all prompts.
        length: the length of the prompts.
        max_new_tokens: the maximum length of an answer.
        ends: ids that end an answer.
        pad: fills rows after the end of an answer.
        group: ranks that must generate the same tokens, those of the first rank; None for this rank alone.
    """
    ids, config, groups = batch.input_ids, model.config, model.pg_collection
    # A cache needs steps of one token. It would lack the state of linear attention.
    has_cache = _round_up(1, model) == 1 and config.experimental_attention_variant is None
    cache = StaticInferenceContext(*ids.shape) if has_cache else None
    running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    end_ids = torch.tensor(ends, dtype=torch.long, device=ids.device)
    start = 0
    for stop in range(length, length + max_new_tokens):
        # The cache has the tokens before `start`.
        size = _round_up(stop - start, model)
        span = slice(start, start + size)
        step = replace(
            batch,
            input_ids=ids[:, span],
            labels=ids[:, span],
            loss_mask=batch.loss_mask[:, span],
            position_ids=batch.position_ids[:, :, span],
            vision_slot=batch.vision_slot[:, span].flatten(),
            layout=SequenceLayout.padded_rows([stop - start] * len(ids), size).to(ids.device),
        )
        inputs = step.local(**config.local_arguments(groups))
        hidden, block_kwargs = model.embed(inputs, encoded)
        logits = model.language_model(
            inputs.input_ids,
            inputs.position_ids,
            attention_mask=None,
            decoder_input=hidden,
            inference_context=cache,
            padding_mask=inputs.padding_mask,
            extra_block_kwargs=block_kwargs | model.text_arguments(inputs),
            runtime_gather_output=False,
        )
        # The output layer may have padding rows.
        tokens = gather_logits(logits[:, stop - start - 1], groups)[:, : config.vocab_size].argmax(-1)
        if group is not None:
            tokens = broadcast_in_group(tokens, group)
        ids[:, stop] = torch.where(running, tokens, pad)
        running &= ~torch.isin(tokens, end_ids)
        if not running.any():
            break
        if cache is not None:
            cache.sequence_len_offset = start = stop
    return ids[:, length : stop + 1]


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """Return the Megatron-FSDP wrapper of a model; None if Megatron-FSDP does not wrap the model."""
    return next((layer for layer in _wrappers(model) if isinstance(layer, MegatronFSDP)), None)


@contextlib.contextmanager
def direct_module_calls(model: nn.Module) -> Iterator[None]:
    """Context manager that allows calls of single modules of a model under Megatron-FSDP, instead of the full model."""
    sharded = megatron_fsdp(model)
    with contextlib.nullcontext() if sharded is None else module_parameters(sharded):
        yield


def _wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield a model and the modules that it wraps, from the outermost wrapper to the innermost module."""
    yield model
    while isinstance(model := getattr(model, "module", None), nn.Module):  # pyright: ignore[reportAssignmentType]
        yield model

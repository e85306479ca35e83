"""Greedy decoding with the Megatron model, to get answers from a checkpoint without exporting it.

For sampling and serving, export the checkpoint.
Legend: B prompts, S tokens of a prompt with its padding, b prompts of one length n, r tokens of a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout, TokenBatch
from qwen3vl_bridge.models.inputs import as_model_inputs
from qwen3vl_bridge.models.model import VisionLanguageModel
from qwen3vl_bridge.models.settings import token_multiple
from qwen3vl_bridge.parallel.collectives import broadcast_in_group, gather_vocabulary

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
    """Generate what transformers' `generate(do_sample=False)` returns for the same arguments of its processor.

    The vision tower runs once. Keys and values are cached, so a new token costs the work of one token. Under sequence
    parallelism, where a single token cannot be split over the ranks, and in models with linear attention, whose state
    megatron-core does not cache, each token costs the work of the whole sequence. Prompts of equal length are decoded
    together, one length after the other, so that there is no padding between a prompt and its answer. Ranks that share
    weights must be given the same prompts (`ranks_in_step`), and return the answers of the first one.

    Args:
        model: a VisionLanguageModel, wrapped or not, or a list of one. It is in eval mode during the call.
        input_ids, attention_mask: [B, S]; the mask is 0 at padding, on either side. None: no padding.
        max_new_tokens: maximum length of an answer.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: as the processor gives them.
        mm_token_type_ids: accepted because the processor returns it; it is redundant with `input_ids`.
        eos_token_id: ids that end an answer, such as those from `end_token_ids`; an empty list for none, None for the
            provider's, which may be the end of a text rather than of a turn.
        pad_token_id: fills rows after an answer's end; None for the provider's, or the first of `eos_token_id`.

    Returns:
        [B, S + longest answer] int64: `input_ids` unchanged, then the answers with their end tokens.

    Raises:
        ValueError: a model split by pipeline or context parallelism, inconsistent shapes, a prompt without tokens, or
            images or videos that do not match the tokens.
    """
    wrapped, model = model, _whole_model(model)
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
    ends = model.config.eos_token_id if eos_token_id is None else eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends)
    pad = next((i for i in (pad_token_id, model.config.pad_token_id, *ends) if i is not None), 0)
    prompts = _prompts(input_ids, attention_mask)
    room = _round_up(max(map(len, prompts)) + max_new_tokens, model)
    ids = torch.stack([F.pad(prompt, (0, room - len(prompt)), value=pad) for prompt in prompts]).to(input_ids.device)
    inputs, _ = as_model_inputs(
        model.config,
        model.pg_collection,
        ids,
        attention_mask=torch.ones_like(ids),  # answers too: their tokens all count as text
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grid_thw,
    )
    answers = input_ids.new_full((len(prompts), max_new_tokens), pad)
    longest, group = 0, ranks_in_step(wrapped)
    slots = ids.new_full((ids.numel(),), -1)  # of hidden states [s, b]
    slots[inputs.fuse.targets] = inputs.fuse.sources
    slots = slots.view(ids.T.shape).T
    with _evaluating(model), callable_in_parts(_only(wrapped)):
        encoded = model.encode(inputs)
        for length in dict.fromkeys(map(len, prompts)):
            same = [row for row, prompt in enumerate(prompts) if len(prompt) == length]
            end = _round_up(length + max_new_tokens, model)
            rows = TokenBatch(
                input_ids=inputs.input_ids[same, :end],  # the prompt and then padding, which the answer overwrites
                labels=inputs.input_ids[same, :end],  # neither these nor the mask is used
                loss_mask=torch.zeros(len(same), end, device=ids.device),
                position_ids=inputs.position_ids[:, same, :end],
                vision_slot=slots[same, :end],
                layout=SequenceLayout.rows([length] * len(same), end),
                vision=inputs.vision,
            )
            decoded = _decode(model, rows, encoded, length, max_new_tokens, ends, pad, group)
            answers[same, : decoded.shape[1]] = decoded
            longest = max(longest, decoded.shape[1])
    return torch.cat((input_ids, answers[:, :longest]), dim=1)


def end_token_ids(model: nn.Module | list[nn.Module], tokenizer: Any, hf_model: str | Path | None = None) -> list[int]:
    """Ids that end an answer, for `generate`: the provider's (a text's), and the tokenizer's (a turn's in chat models).

    No file reliably names both; `generation_config.json` of `hf_model` (folder or hub id) may name more.
    """
    ends = [_whole_model(model).config.eos_token_id, tokenizer.eos_token_id]
    if hf_model is not None:
        with contextlib.suppress(OSError):  # it has none
            named = GenerationConfig.from_pretrained(str(hf_model)).eos_token_id
            ends += named if isinstance(named, list) else [named]
    return [end for end in dict.fromkeys(ends) if end is not None]


def ranks_in_step(model: nn.Module | list[nn.Module]) -> ProcessGroup | None:
    """The ranks that must be given the same prompts because a forward pass of one needs all of them, if there are any.

    Beside tensor-parallel ranks these are ranks over which Megatron-FSDP shards parameters, or with other experts.
    """
    groups = _whole_model(model).pg_collection
    if megatron_fsdp(_only(model)) is not None:
        return groups.dp
    return groups.ep if groups.ep.size() > 1 else None


def _only(model: nn.Module | list[nn.Module]) -> nn.Module:
    return model[0] if isinstance(model, list) else model


def _whole_model(model: nn.Module | list[nn.Module]) -> VisionLanguageModel:
    # megatron-core's `unwrap_model` stops at Megatron-FSDP, which is a wrapper in a wrapper.
    chunks = [[*_layers(chunk)][-1] for chunk in (model if isinstance(model, list) else [model])]
    if len(chunks) != 1 or not isinstance(chunks[0], VisionLanguageModel):
        found = [type(chunk).__name__ for chunk in chunks]
        raise ValueError(
            f"model is {found}, expected one Qwen3VLModel or another VisionLanguageModel: "
            "a pipeline stage cannot generate"
        )
    groups = chunks[0].pg_collection
    for name, size in (("pipeline", groups.pp.size()), ("context", groups.cp.size())):
        if size > 1:
            raise ValueError(f"{name}-parallel size is {size}, expected 1: load the checkpoint without it to generate")
    return chunks[0]


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """The tokens of each row without its padding, on the host."""
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
            f"found {len(prompts)} prompts, of which {empty} are empty, expected at least one token in each"
        )
    return prompts


def _round_up(tokens: int, model: VisionLanguageModel) -> int:
    parts = model.config.local_arguments(model.pg_collection)["sp_size"] * token_multiple(model.config)
    return -(-tokens // parts) * parts


def _decode(
    model: VisionLanguageModel,
    rows: TokenBatch,
    encoded: tuple[Tensor, Tensor],
    length: int,
    new: int,
    ends: list[int],
    pad: int,
    group: ProcessGroup | None,
) -> Tensor:
    """[b, at most new] answers to prompts of one length, whose rows have room for them; `encoded` is of all prompts.

    Ranks use the first one's tokens, since a last bit may differ.
    """
    ids, config, groups = rows.input_ids, model.config, model.pg_collection
    single, has_state = _round_up(1, model) == 1, config.experimental_attention_variant is not None
    cache = StaticInferenceContext(*ids.shape) if single and not has_state else None
    running = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    ends_of = torch.tensor(ends, dtype=torch.long, device=ids.device)
    start = 0
    for stop in range(length, length + new):
        # Tokens from `start` on, with padding to a multiple of the ranks; the cache has those before.
        size = _round_up(stop - start, model)
        piece = slice(start, start + size)
        batch = replace(
            rows,
            input_ids=ids[:, piece],
            labels=ids[:, piece],
            loss_mask=rows.loss_mask[:, piece],
            position_ids=rows.position_ids[:, :, piece],
            vision_slot=rows.vision_slot[:, piece].flatten(),
            layout=SequenceLayout.rows([stop - start] * len(ids), size).to(ids.device),
        )
        inputs = batch.local(**config.local_arguments(groups))
        hidden, block_kwargs = model.embed(inputs, encoded)
        logits = model.language_model(
            inputs.input_ids,
            inputs.position_ids,
            attention_mask=None,
            decoder_input=hidden,
            inference_context=cache,
            padding_mask=inputs.padding_mask,
            extra_block_kwargs=block_kwargs,
            runtime_gather_output=False,
        )
        # The output layer may have more rows than there are tokens.
        tokens = gather_vocabulary(logits[:, stop - start - 1], groups)[:, : config.vocab_size].argmax(-1)
        if group is not None:
            tokens = broadcast_in_group(tokens, group)
        ids[:, stop] = torch.where(running, tokens, pad)
        running &= ~torch.isin(tokens, ends_of)
        if not running.any():
            break
        if cache is not None:
            cache.sequence_len_offset = start = stop
    return ids[:, length : stop + 1]


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    in_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def megatron_fsdp(model: nn.Module) -> MegatronFSDP | None:
    """The Megatron-FSDP wrapper of a model, if any: its ranks gather each other's parameters in every forward pass."""
    return next((layer for layer in _layers(model) if isinstance(layer, MegatronFSDP)), None)


@contextlib.contextmanager
def callable_in_parts(model: nn.Module) -> Iterator[None]:
    """Let the innermost model's modules be called one by one: hooks gather a module's parameters when it is called.

    Between steps, the optimizer's own parameters are in place until the whole model is called.
    """
    sharded = megatron_fsdp(model)
    if sharded is None or not sharded.is_param_fsdp_distributed:
        yield
        return
    sharded._replace_param_with_raw_if_needed()
    try:
        yield
    finally:
        sharded._replace_param_with_distributed_if_needed()


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    """A model, the module inside it, and so on."""
    yield model
    while isinstance(model := getattr(model, "module", None), nn.Module):  # pyright: ignore[reportAssignmentType]
        yield model

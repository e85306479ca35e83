"""Generation with the Megatron model, without exporting a checkpoint: greedy or sampled, in every parallel layout.

Legend of shapes: b prompts, S tokens of a row with space for the answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from qwen3vl_bridge.core.collectives import broadcast_from_rank, broadcast_in_group
from qwen3vl_bridge.inference.decoder import Decoder, round_up, row_multiple
from qwen3vl_bridge.inference.sampling import Sampling
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.inputs.caller_batches import as_token_batch
from qwen3vl_bridge.upstream.fsdp_parameters import module_parameters

import torch
import torch.nn.functional as F
from megatron.core.distributed.fsdp.src.megatron_fsdp import MegatronFSDP
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
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> Tensor:
    """Generate answers, like transformers' `generate` with the outputs of its processor.

    The vision tower runs once. Keys, values and states of linear attention are cached, so each new token costs the
    compute of one token; only Qwen3.8-Flash-Next computes the full row for each. Prompts of all lengths are decoded
    together.

    Pipeline and context-parallel ranks, and those that `ranks_in_step` returns, must get the same prompts. They return
    the same answers.

    Args:
        model: a VisionLanguageModel, wrapped or not, or a list of the chunks of this rank. It is in eval mode during
            the call.
        input_ids, attention_mask: [prompts, tokens]. The mask is 0 at padding, on either side; None without padding.
        max_new_tokens: maximum length of an answer.
        pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw: outputs of the processor.
        mm_token_type_ids: ignored; the processor returns it, but `input_ids` contain the same information.
        eos_token_id: ids that end an answer, for example from `end_token_ids`. An empty list for none; None for the
            provider's id, which may mark the end of a text instead of a turn.
        pad_token_id: fills rows after the end of an answer. None for the provider's id, or else the first of
            `eos_token_id`.
        do_sample, temperature, top_k, top_p, seed: see `Sampling`. By default the most likely token is chosen. The same
            call with the same seed gives the same answers.

    Returns:
        [prompts, tokens + longest answer] int64: `input_ids`, then the answers with their end tokens.

    Raises:
        ValueError: the vision tower is on separate ranks, shapes are inconsistent, a prompt has no tokens, images or
            videos do not match the tokens, or a setting of `Sampling` is wrong.
    """
    sampling = Sampling(do_sample, temperature, top_k, top_p, seed)
    input_ids = input_ids.long()
    chunks = unwrap(model)
    config = chunks[0].config
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}, expected 1 or more")
    ends = config.eos_token_id if eos_token_id is None else eos_token_id
    ends = [ends] if isinstance(ends, int) else list(ends)
    pad = next((i for i in (pad_token_id, config.pad_token_id, *ends) if i is not None), 0)
    prompts = _remove_padding(input_ids, attention_mask)
    lengths = [len(prompt) for prompt in prompts]
    # Padding follows each prompt, and the answer overwrites it. Any token will do; `pad` may be outside the vocabulary.
    size = round_up(max(lengths) + max_new_tokens, row_multiple(chunks[0]))
    rows = torch.stack([F.pad(prompt, (0, size - len(prompt))) for prompt in prompts])
    batch, _ = as_token_batch(
        config,
        rows.to(input_ids.device),
        attention_mask=torch.ones_like(rows),  # tokens of answers count as text
        pixel_values=pixel_values,
        image_grid_thw=image_grid_thw,
        pixel_values_videos=pixel_values_videos,
        video_grid_thw=video_grid_thw,
    )
    generator = torch.Generator(input_ids.device).manual_seed(seed or 0)
    with contextlib.ExitStack() as stack:
        for chunk, wrapped in zip(chunks, _as_list(model), strict=True):
            stack.enter_context(eval_mode(chunk))
            stack.enter_context(direct_module_calls(wrapped))
        decoder = Decoder(chunks, batch, lengths, input_ids.device)
        answers = _decode(decoder, max_new_tokens, ends, pad, ranks_in_step(model), sampling, generator)
    return torch.cat((input_ids, answers), dim=1)


def _decode(
    decoder: Decoder,
    max_new_tokens: int,
    ends: list[int],
    pad: int,
    together: ProcessGroup | None,
    sampling: Sampling,
    generator: torch.Generator,
) -> Tensor:
    """Return the token ids of the answers, [prompts, length of the longest answer].

    Args:
        decoder: computes logits.
        max_new_tokens: the maximum length of an answer.
        ends: ids that end an answer.
        pad: id that fills rows after the end of an answer.
        together: group of ranks, besides tensor and context parallelism, that must generate the same tokens; None for
            no such group. Its first rank chooses the tokens.
        sampling, generator: choose tokens.
    """
    rows, groups, device = len(decoder.ends), decoder.groups, decoder.device
    answers = torch.full((rows, max_new_tokens), pad, device=device)
    running = torch.ones(rows, dtype=torch.bool, device=device)
    end_ids = torch.tensor(ends, dtype=torch.long, device=device)
    # Ranks compute the same logits, but rounding may differ, and each token must be that of one rank.
    agreeing = [group for group in (groups.tp, groups.cp, together) if group is not None and group.size() > 1]
    for number in range(max_new_tokens):
        logits = decoder.next_logits()
        tokens = answers.new_empty(rows) if logits is None else sampling.choose(logits, generator)
        for group in agreeing:
            tokens = broadcast_in_group(tokens, group)
        tokens = broadcast_from_rank(tokens, groups.pp.size() - 1, groups.pp)
        tokens = torch.where(running, tokens, pad)
        answers[:, number] = tokens
        running &= ~torch.isin(tokens, end_ids)
        if ends and not running.any():  # waits for the device
            break
        decoder.append(tokens.masked_fill(~running, 0))
    return answers[:, : number + 1]


def end_token_ids(model: nn.Module | list[nn.Module], tokenizer: Any, hf_model: str | Path | None = None) -> list[int]:
    """Return the token ids that end an answer, for the argument `eos_token_id` of `generate`.

    These are the ids of the provider (end of a text), of the tokenizer (end of a turn in chat models), and of
    `generation_config.json` in `hf_model`, a folder or hub id.
    """
    ends = [unwrap(model)[0].config.eos_token_id, tokenizer.eos_token_id]
    if hf_model is not None:
        with contextlib.suppress(OSError):  # the model has no such file
            named = GenerationConfig.from_pretrained(str(hf_model)).eos_token_id
            ends += named if isinstance(named, list) else [named]
    return [end for end in dict.fromkeys(ends) if end is not None]


def ranks_in_step(model: nn.Module | list[nn.Module]) -> ProcessGroup | None:
    """Return the group of ranks over which Megatron-FSDP or expert parallelism shards weights; None if there is none.

    These ranks compute each forward pass together, so they must get the same prompts. Tensor-parallel ranks always get
    the same prompts, so the result is None if expert weights are sharded over tensor-parallel ranks only.
    """
    groups = unwrap(model)[0].pg_collection
    if megatron_fsdp(_as_list(model)[0]) is not None:
        return groups.dp
    return groups.tp_ep if groups.ep.size() * groups.expt_tp.size() > groups.tp.size() else None


def _as_list(model: nn.Module | list[nn.Module]) -> list[nn.Module]:
    return model if isinstance(model, list) else [model]


def unwrap(model: nn.Module | list[nn.Module]) -> list[VisionLanguageModel]:
    """Return the chunks of a model without wrappers. Raise ValueError if they cannot generate."""
    # megatron-core's `unwrap_model` stops at Megatron-FSDP, which has two wrappers.
    chunks = [[*_wrappers(chunk)][-1] for chunk in _as_list(model)]
    wrong = [type(chunk).__name__ for chunk in chunks if not isinstance(chunk, VisionLanguageModel)]
    if wrong or not chunks:
        raise ValueError(
            f"model is {wrong}, expected a VisionLanguageModel, such as Qwen3VLModel, or a list of its chunks"
        )
    if chunks[0].pre_process and chunks[0].vision_model is None:
        raise ValueError("the vision tower is on separate ranks (dist_train), expected a complete model for generation")
    return chunks


def _remove_padding(input_ids: Tensor, attention_mask: Tensor | None) -> list[Tensor]:
    """Return the tokens of each prompt without padding, on the host."""
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if input_ids.dim() != 2 or mask.shape != input_ids.shape:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)} and attention_mask {list(mask.shape)}, expected "
            "[prompts, tokens] for both"
        )
    prompts = [ids[keep] for ids, keep in zip(input_ids.cpu(), mask.cpu().bool(), strict=True)]
    empty = [row for row, prompt in enumerate(prompts) if not len(prompt)]
    if empty or not prompts:
        raise ValueError(
            f"found {len(prompts)} prompts, and prompts {empty} have no tokens: expected one prompt or more. Each "
            "prompt needs at least one token"
        )
    return prompts


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Context manager that puts a model in eval mode."""
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

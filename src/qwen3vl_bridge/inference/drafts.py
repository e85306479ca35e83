"""Count how many drafts of multi-token prediction (MTP) speculative decoding would accept.

Speculative decoding with one draft token: the MTP layer predicts the token after the newest one, from the hidden state
before the newest token and the embedding of the newest token. The model accepts the draft if it would choose the same
token. Here, a draft is made for every token of the model's own greedy answer, except for the first. One forward pass
over prompt and answer computes all drafts, because the layer sees earlier tokens only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from qwen3vl_bridge.core.batch import ModelInputs
from qwen3vl_bridge.core.collectives import broadcast_from_rank, sum_in_group
from qwen3vl_bridge.inference.decoder import make_pipeline, round_up, row_multiple, run_stages
from qwen3vl_bridge.inference.generation import direct_module_calls, eval_mode, unwrap
from qwen3vl_bridge.models.common.model import VisionLanguageModel
from qwen3vl_bridge.models.inputs.caller_batches import as_token_batch

import torch
import torch.nn.functional as F
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch import Tensor, nn


def drafts_tokens(model: Sequence[nn.Module]) -> bool:
    """Return whether the model has a layer for multi-token prediction."""
    return bool(getattr(unwrap([*model])[0].config, "mtp_num_layers", None))


@torch.no_grad()
def count_accepted_drafts(
    model: Sequence[nn.Module], prompt: Tensor, answer: Tensor, vision: Mapping[str, Tensor]
) -> int:
    """Return the number of accepted drafts among the `len(answer) - 1` tokens after the first of a greedy answer.

    All ranks that must call `generate` together must call this function together. All get the result.

    Args:
        model: the chunks of this rank, with a layer for MTP, as for `generate`.
        prompt, answer: [tokens] int64 on the host.
        vision: outputs of the processor for the prompt's images and videos.
    """
    chunks = unwrap([*model])
    config, groups, device = chunks[0].config, chunks[0].pg_collection, next(model[0].parameters()).device
    tokens, drafted = torch.cat((prompt, answer)), len(answer) - 1
    if drafted < 1:
        return 0
    # The last token is only a label. The draft for a token is made two tokens earlier, which `NextTokens` looks up.
    length = len(tokens) - 1
    padding = (0, round_up(length, row_multiple(chunks[0])) - length)
    batch, _ = as_token_batch(
        config,
        F.pad(tokens[:-1], padding)[None].to(device),
        labels=F.pad(tokens[1:], padding)[None],
        loss_mask=F.pad((torch.arange(length) >= len(prompt)).float(), padding)[None],
        attention_mask=F.pad(torch.ones_like(tokens[1:]), padding)[None],
        **vision,
    )

    def inputs_of(chunk: VisionLanguageModel) -> ModelInputs:
        inputs = chunk.select_local(batch, with_next_tokens=True)
        return replace(inputs, next_tokens=replace(inputs.next_tokens, measured=True)).to(device)

    MTPLossLoggingHelper.clean_metrics_in_tracker()
    with contextlib.ExitStack() as stack:
        for chunk, wrapped in zip(chunks, model, strict=True):
            stack.enter_context(eval_mode(chunk))
            stack.enter_context(direct_module_calls(wrapped))
        run_stages(chunks, make_pipeline(config, groups), inputs_of)
    accepted = torch.zeros(1, device=device)
    if chunks[-1].post_process:
        accepted += MTPLossLoggingHelper.tracker["correct_values"].to(device)
        MTPLossLoggingHelper.clean_metrics_in_tracker()
        accepted = sum_in_group(accepted, groups.cp)
    return int(broadcast_from_rank(accepted, groups.pp.size() - 1, groups.pp))

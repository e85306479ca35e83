"""Multi-token prediction built of transformers' parts, which transformers itself leaves out of its models."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen3_5Config, Qwen3_5MoeConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as with_experts

from tests.parity.batches import Sample


class MTPReference(nn.Module):
    """Its parameters' names are those of released files, after "mtp."."""

    def __init__(self, config: Qwen3_5Config | Qwen3_5MoeConfig) -> None:
        super().__init__()
        text = copy.deepcopy(config.text_config)
        text.layer_types, text.num_hidden_layers = ["full_attention"], 1
        text._attn_implementation = "eager"
        moe = isinstance(config, Qwen3_5MoeConfig)
        layer = with_experts.Qwen3_5MoeDecoderLayer if moe else dense.Qwen3_5DecoderLayer
        norm = with_experts.Qwen3_5MoeRMSNorm if moe else dense.Qwen3_5RMSNorm
        width, eps = text.hidden_size, text.rms_norm_eps
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = norm(width, eps=eps), norm(width, eps=eps)
        self.layers = nn.ModuleList([layer(text, 0)])
        self.norm = norm(width, eps=eps)

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor, angles: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[1, s, h] of tokens that have a next one, from their hidden states and the next tokens' embeddings."""
        joined = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        length = hidden.size(1)
        mask = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)[None, None]
        return self.norm(self.layers[0](self.fc(joined), position_embeddings=angles, attention_mask=mask))


def run_with_mtp(model: nn.Module, samples: list[Sample], factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of the losses of tokens, and of these and `factor` times those of multi-token prediction."""
    seen = {}
    text = model.model.language_model
    hooks = [
        text.register_forward_pre_hook(lambda _, __, given: seen.update(given), with_kwargs=True),
        text.rotary_emb.register_forward_hook(lambda _, __, angles: seen.update(angles=angles)),
        text.register_forward_hook(lambda _, __, output: seen.update(hidden=output.last_hidden_state)),
    ]
    main, predicted = torch.zeros(()), torch.zeros(())
    for sample in samples:
        ids = sample.ids[None]
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **sample.pixels).logits[0]
        main = main + (F.cross_entropy(logits, sample.labels, reduction="none") * sample.loss_mask).sum()
        angles = tuple(one[:, :-1] for one in seen["angles"])
        output = model.mtp(seen["hidden"][:, :-1], seen["inputs_embeds"][:, 1:], angles)
        losses = F.cross_entropy(model.lm_head(output)[0], sample.labels[1:], reduction="none")
        predicted = predicted + (losses * sample.loss_mask[1:]).sum()
    for hook in hooks:
        hook.remove()
    return main, main + factor * predicted

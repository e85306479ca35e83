"""Rotary embeddings (multimodal for the text model, 2-D for the vision tower), and self attention that applies them.

One tensor with the rotations of all tokens passes through Megatron's transformer block, so rotations are computed once
per step instead of once per layer. The tensor contains angles for Transformer Engine's kernel, otherwise cosines and
sines.

Legend of shapes: b rows, s local tokens, t = s * b, d head dimension, r rotated dimensions of a head, N vision patches.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.core.device_transfer import copy_to_device
from qwen3vl_bridge.models.common.decoding import attend_to_cache, has_tokens
from qwen3vl_bridge.upstream.dynamic_shapes import call_compiled

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Transformer Engine's kernel has 32-bit offsets. Source: common/fused_rope/fused_rope.cu, until 2.20.
_MAX_ELEMENTS = 2**31 - 1


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """Return theta^(-2i/dim) for i in [0, dim/2), float32. It is not a buffer: a 16-bit model would round it.

    Source: Su et al., RoFormer, equation 15.
    """
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rotation(angles: Tensor, dtype: torch.dtype, scale: float = 1.0, *, fused: bool) -> Tensor:
    """Return the rotary tensor for `rotate`, for angles [s, b, r / 2] that both halves of r rotated dimensions share.

    Returns:
        Angles [s * b, 1, 1, r] float32 for Transformer Engine's kernel, if `fused` and `scale` is 1. Otherwise cosines
        and sines [2, s, b, 1, r] times `scale` in `dtype`.
    """
    angles = torch.cat((angles, angles), dim=-1)
    if fused and scale == 1.0:
        return angles.flatten(0, 1)[:, None, None]
    return (torch.stack((angles.cos(), angles.sin())) * scale).to(dtype)[:, :, :, None]


def rotate(query: Tensor, key: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first r dimensions of queries and keys [s, b, heads, d] by `rotary`, the result of `rotation`."""
    if rotary.dim() == 4:
        return _rotate_fused(query, rotary), _rotate_fused(key, rotary)
    # Compiled, each pass has one kernel for queries and one for keys.
    rotated_query, rotated_key = call_compiled(_rotate_both, *(x.flatten(0, 1) for x in (query, key, *rotary)))
    return rotated_query.view(query.shape), rotated_key.view(key.shape)


def rotate_heads(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate the first r dimensions of x [s, b, heads, d] by `rotary`, the result of `rotation`."""
    if rotary.dim() == 4:
        return _rotate_fused(x, rotary)
    return call_compiled(_rotate_one, *(part.flatten(0, 1) for part in (x, *rotary))).view(x.shape)


def _rotate_both(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [t, heads, d] by cosines and sines [t, 1, r], in the dtype of the cosines."""
    return _rotate_one(query, cos, sin), _rotate_one(key, cos, sin)


def _rotate_one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary, passthrough = x.tensor_split([cos.size(-1)], dim=-1)
    heads = rotary.to(cos.dtype)
    first, second = heads.chunk(2, dim=-1)
    rotated = (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((rotated, passthrough), dim=-1) if passthrough.size(-1) else rotated


def _rotate_fused(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [s, b, heads, d] by angles [s * b, 1, 1, r] with Transformer Engine's kernel."""
    tokens = x.flatten(0, 1)[:, None]
    max_tokens = _MAX_ELEMENTS // max(tokens.stride(0), tokens[0].numel())
    if len(tokens) <= max_tokens:  # the backward pass of a split would copy the gradient, even for a single piece
        return rope_utils.fused_apply_rotary_pos_emb(tokens, angles).view(x.shape)
    pieces = zip(tokens.split(max_tokens), angles.split(max_tokens), strict=True)
    return torch.cat([rope_utils.fused_apply_rotary_pos_emb(*piece) for piece in pieces]).view(x.shape)


class InterleavedMRoPE(nn.Module):
    """Multimodal rotary embedding of the text model, with frequencies of three axes interleaved.

    Frequencies belong to the temporal, height and width axis in turn. If the sections of height and width are
    complete, the remaining frequencies belong to the temporal axis.
    Source: transformers, Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope.

    Args:
        dim: number of rotated dimensions of a head.
        theta: RoPE base.
        mrope_section: how many of the dim / 2 frequencies belong to each axis (temporal, height, width).
        dtype: dtype in which heads are rotated.
        scaled: transformers' `rope_parameters` of a scaled embedding; None if it is not scaled.
        fused: rotate with Transformer Engine's kernel, unless the embedding has a scale.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        mrope_section: list[int],
        dtype: torch.dtype,
        scaled: dict[str, Any] | None = None,
        *,
        fused: bool = False,
    ) -> None:
        super().__init__()
        self.dim, self.theta, self.mrope_section, self.scaled = dim, theta, mrope_section, scaled
        self.dtype, self.fused = dtype, fused
        self._constants: dict[torch.device, tuple[Tensor, Tensor, float]] = {}

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Return the axis of each frequency, the frequencies, and the scale of cosines and sines."""
        if device not in self._constants:
            host, scale = torch.device("cpu"), 1.0
            if self.scaled is None:
                frequencies = inverse_frequencies(self.dim, self.theta, host)
            else:  # on a GPU, transformers' functions would copy from memory that is not pinned
                # All r dimensions are rotated: `dim` does not count the others.
                rope = {**self.scaled, "partial_rotary_factor": 1.0}
                config = Qwen3VLTextConfig(head_dim=self.dim, rope_parameters=rope)
                frequencies, scale = ROPE_INIT_FUNCTIONS[self.scaled["rope_type"]](config, host)
            frequency = torch.arange(self.dim // 2)
            _, height, width = (3 * n for n in self.mrope_section)
            is_height = (frequency % 3 == 1) & (frequency < height)
            is_width = (frequency % 3 == 2) & (frequency < width)
            axes = is_height.long() + 2 * is_width.long()
            self._constants[device] = copy_to_device(axes, device), copy_to_device(frequencies, device), scale
        return self._constants[device]

    def forward(self, position_ids: Tensor | None, mrope_section: object = None, cp_group: object = None) -> Tensor:
        """Return the result of `rotation` for local positions [3, b, s], or for text positions [b, s] on all axes.

        The other arguments, which GPTModel passes, are not used.

        Raises:
            ValueError: positions have another shape, or are None.
        """
        shape = None if position_ids is None else list(position_ids.shape)
        if shape is None or len(shape) < 2 or shape[:-2] not in ([], [3]):
            raise ValueError(f"position_ids has shape {shape}, expected [3, rows, tokens], or [rows, tokens] for text")
        axes, frequencies, scale = self.constants(position_ids.device)
        positions = position_ids.float().expand(3, -1, -1)[axes].permute(2, 1, 0)  # [s, b, r/2]
        return rotation(positions * frequencies, self.dtype, scale, fused=self.fused)


def vision_rotary(position_ids: Tensor, dim: int, theta: float = 10000.0, *, fused: bool = False) -> Tensor:
    """Return the result of `rotation`, in float32, for one row of N patches at positions [N, 2] (row, column).

    Each of the two axes has half of the frequencies. Source: transformers, Qwen3VLVisionRotaryEmbedding and
    apply_rotary_pos_emb_vision.
    """
    frequencies = inverse_frequencies(dim // 2, theta, position_ids.device)
    angles = (position_ids[:, :, None] * frequencies).flatten(1)
    return rotation(angles[:, None], torch.float32, fused=fused)


class RotarySelfAttention(SelfAttention):
    """Self attention that rotates queries and keys right after the QKV projection, by angles of the local tokens.

    Megatron would rotate after removing the batch dimension of packed rows, and look up positions by segment and
    context-parallel rank.
    """

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        key_value_states: Tensor | None = None,
        inference_context: Any = None,
        rotary_pos_emb: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self attention as in SelfAttention. `rotary_pos_emb` is the result of `rotation`.

        With an `inference_context`, keys and values are stored in it; see `decoding.py`.
        """
        if inference_context is not None and has_tokens(inference_context):
            return self.decode(hidden_states, rotary_pos_emb, inference_context)
        # key_value_states is unused in self attention; it passes the angles to get_query_key_value_tensors.
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb, inference_context, rotary_pos_emb=None, **kwargs
        )

    def decode(
        self, hidden_states: Tensor, rotary_pos_emb: Tensor | None, context: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute self attention of a generation step [s / sp, b, h], whose first token attends to the context.

        The other tokens of the step are padding. Their attention is not computed but set to zero.
        """
        query, key, value, *gate = self.get_query_key_value_tensors(
            hidden_states, rotary_pos_emb, output_gate=self.config.attention_output_gate
        )
        tokens = (x[:1] for x in (query, key, value))
        output = attend_to_cache(context, self.layer_number, *tokens, self.config.softmax_scale)
        if gate:
            output = (output * gate[0][:1].reshape(output.shape).float().sigmoid()).to(output.dtype)
        return self.linear_proj(F.pad(output, (0, 0, 0, 0, 0, len(query) - 1)))

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Return query, key and value [s, b, heads, d] and, if requested by `output_gate`, the gate.

        SelfAttention does not use `key_value_states`. Here it is the result of `rotation`, by which query and key are
        rotated; None: do not rotate.
        """
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, None, **kwargs)
        if key_value_states is None:
            return query, key, *rest
        return *rotate(query, key, key_value_states), *rest

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """Return `linear_qkv`, and the number of its rows per query group: queries, gates (if any), keys, values."""
        head_dim, heads = self.config.kv_channels, self.config.num_attention_heads // self.config.num_query_groups
        queries = [heads * head_dim] * (2 if self.config.attention_output_gate else 1)
        return self.linear_qkv, [*queries, head_dim, head_dim]

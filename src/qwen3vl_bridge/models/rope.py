"""Rotary embeddings: interleaved multimodal RoPE of the text model, 2-D RoPE of the vision tower, and self attention
that takes its angles.

Angles are passed through Megatron's transformer block as one tensor, so that they are computed once per step instead of
once per layer: unchanged for Transformer Engine's kernel, otherwise as stacked cosines and sines.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch.device_transfer import sent
from qwen3vl_bridge.models.compilation import compiles, run_by_token

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# Transformer Engine's kernel uses 32-bit offsets. Source: common/fused_rope/fused_rope.cu, until 2.20.
_ELEMENTS = 2**31 - 1


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2i/dim) for i in [0, dim/2), float32. Not a buffer: a half-precision model would round it.

    Source: Su et al., RoFormer, equation 15.
    """
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def rotation(angles: Tensor, dtype: torch.dtype, scale: float = 1.0, *, fused: bool) -> Tensor:
    """The rotary tensor for the layers, from angles [s, b, r/2] of the first half of a head; the second has the same.

    Returns:
        [s * b, 1, 1, r] float32 angles if `fused`, for Transformer Engine's kernel, which has no factor and computes
        in float32; or cosine and sine [2, s, b, 1, r] times `scale` in `dtype`.
    """
    angles = torch.cat((angles, angles), dim=-1)
    if fused and scale == 1.0:
        return angles.flatten(0, 1)[:, None, None]
    return (torch.stack((angles.cos(), angles.sin())) * scale).to(dtype)[:, :, :, None]


def rotate(query: Tensor, key: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys [s, b, heads, d] by their tokens' angles, from `rotation`, of the first r dimensions."""
    if rotary.dim() == 4:
        return _by_kernel(query, rotary), _by_kernel(key, rotary)
    return (_by_compiled if compiles(query) else _formula)(query, key, *rotary)


def _formula(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """In the dtype of cosines and sines [..., 1, r], for queries and keys [..., heads, d]."""
    return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turning, staying = x.tensor_split([cos.size(-1)], dim=-1)
    heads = turning.to(cos.dtype)
    first, second = heads.chunk(2, dim=-1)
    turned = (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, staying), dim=-1) if staying.size(-1) else turned


def _by_compiled(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Like `_formula` for [s, b, heads, d] and [s, b, 1, r]: a kernel for queries and one for keys, in each pass."""
    turned = run_by_token(_formula, *(x.flatten(0, 1) for x in (query, key, cos, sin)))
    return turned[0].view(query.shape), turned[1].view(key.shape)


def _by_kernel(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate with Transformer Engine's kernel, with all tokens as one row: it uses the same angles for all rows."""
    tokens = x.flatten(0, 1)[:, None]
    most = _ELEMENTS // max(tokens.stride(0), tokens[0].numel())
    if len(tokens) <= most:  # the gradient of a split would be copied, also of one into one part
        return rope_utils.fused_apply_rotary_pos_emb(tokens, angles).view(x.shape)
    parts = zip(tokens.split(most), angles.split(most), strict=True)
    return torch.cat([rope_utils.fused_apply_rotary_pos_emb(*part) for part in parts]).view(x.shape)


class InterleavedMRoPE(nn.Module):
    """Angles of the text model: frequencies are assigned to the axes t, h, w, t, h, w, ..., the rest to t.

    Source: transformers, Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope.

    Args:
        dim: rotated dimensions d of a head.
        theta: RoPE base.
        mrope_section: number of the d/2 frequencies for each axis (temporal, height, width).
        dtype: dtype in which heads are rotated.
        scaled: transformers' `rope_parameters` of a scaled embedding; None if it is not scaled.
        fused: rotate with Transformer Engine's kernel, if the embedding has no factor.
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
        """The axis of each frequency [d/2], the frequencies [d/2], and cosines' and sines' factor, kept per device.

        They are not buffers: a model on the meta device would keep them empty, a half-precision model would round them.
        """
        if device not in self._constants:
            host, scale = torch.device("cpu"), 1.0
            if self.scaled is None:
                frequencies = inverse_frequencies(self.dim, self.theta, host)
            else:  # on a GPU, transformers' functions would copy from memory that is not pinned
                whole = {"partial_rotary_factor": 1.0}  # of the dimensions that are rotated at all
                config = Qwen3VLTextConfig(head_dim=self.dim, rope_parameters={**self.scaled, **whole})
                frequencies, scale = ROPE_INIT_FUNCTIONS[self.scaled["rope_type"]](config, host)
            frequency = torch.arange(self.dim // 2)
            _, height, width = (3 * n for n in self.mrope_section)
            by_height = (frequency % 3 == 1) & (frequency < height)
            by_width = (frequency % 3 == 2) & (frequency < width)
            axes = by_height.long() + 2 * by_width.long()
            self._constants[device] = sent(axes, device), sent(frequencies, device), scale
        return self._constants[device]

    def forward(self, position_ids: Tensor | None, mrope_section: object = None, cp_group: object = None) -> Tensor:
        """The `rotation` of local positions [3, b, s], or [b, s] text positions for all axes; GPTModel passes the rest.

        Raises:
            ValueError: positions have another shape, or are None.
        """
        shape = None if position_ids is None else list(position_ids.shape)
        if shape is None or len(shape) < 2 or shape[:-2] not in ([], [3]):
            raise ValueError(f"position_ids has shape {shape}, expected [3, rows, tokens], or [rows, tokens] for text")
        axes, frequencies, scale = self.constants(position_ids.device)
        positions = position_ids.float().expand(3, -1, -1)[axes].permute(2, 1, 0)  # [s, b, d/2]
        return rotation(positions * frequencies, self.dtype, scale, fused=self.fused)


def vision_rotary(position_ids: Tensor, dim: int, theta: float = 10000.0, *, fused: bool = False) -> Tensor:
    """The `rotation` of one row [N, 1] of patches with [N, 2] row and column; each has half of the frequencies.

    Always in float32, like the reference. Source: transformers, Qwen3VLVisionRotaryEmbedding and
    apply_rotary_pos_emb_vision.
    """
    frequencies = inverse_frequencies(dim // 2, theta, position_ids.device)
    angles = (position_ids[:, :, None] * frequencies).flatten(1)
    return rotation(angles[:, None], torch.float32, fused=fused)


class RotarySelfAttention(SelfAttention):
    """Self attention whose rotary argument contains the angles of its local tokens, for padded and packed rows.

    Megatron would rotate after it has removed the batch dimension of packed rows, and look up positions by segment and
    context-parallel rank. Our angles are local, so queries and keys are rotated right after the QKV projection.
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
        """Like SelfAttention.forward; `rotary_pos_emb` is from `rope.rotation`."""
        # key_value_states is unused in self attention; it passes the angles to get_query_key_value_tensors.
        return super().forward(
            hidden_states, attention_mask, rotary_pos_emb, inference_context, rotary_pos_emb=None, **kwargs
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, ...]:
        """Query, key and value [s, b, heads, d], with query and key rotated by the angles in `key_value_states`."""
        query, key, *rest = super().get_query_key_value_tensors(hidden_states, None, **kwargs)
        if key_value_states is None:
            return query, key, *rest
        return *rotate(query, key, key_value_states), *rest

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """`linear_qkv`, and its rows in each query group: of queries, of gates if there are any, of keys, of values."""
        head, heads = self.config.kv_channels, self.config.num_attention_heads // self.config.num_query_groups
        queries = [heads * head] * (2 if self.config.attention_output_gate else 1)
        return self.linear_qkv, [*queries, head, head]

"""Rotary embeddings: interleaved multimodal RoPE of the text model and 2-D RoPE of the vision tower.

What lives here: angles from positions, and the rotation itself. What may not: positions (`batch/positions.py`,
`batch/vision_indices.py`). Angles travel through Megatron's transformer block as one tensor, cosine and sine stacked,
so that they are computed once a step and not once a layer.
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.batch.device_transfer import sent

import torch
from torch import Tensor, nn
from transformers import Qwen3VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def inverse_frequencies(dim: int, theta: float, device: torch.device) -> Tensor:
    """theta^(-2i/dim) for i in [0, dim/2), float32. Not a buffer: a half-precision model would round it.

    Source: Su et al., RoFormer, equation 15.
    """
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def cos_sin(angles: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """[..., d/2] angles -> [2, ..., d] cosine and sine, both halves of a head rotating by the same angles."""
    angles = torch.cat((angles, angles), dim=-1)
    return (torch.stack((angles.cos(), angles.sin())) * scale).to(dtype)


def scaled_frequencies(parameters: dict[str, Any], dim: int) -> tuple[Tensor, float]:
    """Frequencies [d/2] of a scaled rotary embedding (YaRN and the like), and the factor of its cosines and sines.

    On the host: transformers' own functions compute them, and would copy from memory that is not pinned to a GPU.

    Args:
        parameters: as transformers' `rope_parameters`.
        dim: head dimension d.
    """
    config = Qwen3VLTextConfig(head_dim=dim, rope_parameters=dict(parameters))
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate heads by their angles, in the precision of the angles.

    Args:
        x: [s, b, heads, d].
        rotary: [2, s, b, 1, r] from `cos_sin`; the first r of the d dimensions turn, the others stay.
    """
    cos, sin = rotary
    turning, staying = x.tensor_split([cos.size(-1)], dim=-1)
    heads = turning.to(cos.dtype)
    first, second = heads.chunk(2, dim=-1)
    turned = (heads * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)
    return torch.cat((turned, staying), dim=-1) if staying.size(-1) else turned


class InterleavedMRoPE(nn.Module):
    """Angles of the text model: frequencies are assigned to the axes t, h, w, t, h, w, ..., the rest to t.

    Source: transformers, Qwen3VLTextRotaryEmbedding.apply_interleaved_mrope.

    Args:
        dim: head dimension d.
        theta: RoPE base.
        mrope_section: how many of the d/2 frequencies each axis (temporal, height, width) has.
        dtype: precision in which heads are rotated.
        scaled: transformers' `rope_parameters` of a scaled embedding; None for unscaled.
    """

    def __init__(
        self,
        dim: int,
        theta: float,
        mrope_section: list[int],
        dtype: torch.dtype,
        scaled: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if sum(mrope_section) != dim // 2:
            raise ValueError(f"mrope_section {mrope_section} has sum {sum(mrope_section)}, expected {dim // 2}")
        self.dim, self.theta, self.dtype, self.mrope_section, self.scaled = dim, theta, dtype, mrope_section, scaled
        self._constants: dict[torch.device, tuple[Tensor, Tensor, float]] = {}

    def constants(self, device: torch.device) -> tuple[Tensor, Tensor, float]:
        """Which axis each frequency turns by, [d/2]; frequencies [d/2]; and the factor of cosines and sines.

        Computed on the host once, and kept on each device. Not buffers: those of a model that is made on the meta
        device would stay empty, and a half-precision model would round them.
        """
        if device not in self._constants:
            host, scale = torch.device("cpu"), 1.0
            if self.scaled is None:
                frequencies = inverse_frequencies(self.dim, self.theta, host)
            else:
                frequencies, scale = scaled_frequencies(self.scaled, self.dim)
            frequency = torch.arange(self.dim // 2)
            _, height, width = (3 * n for n in self.mrope_section)
            by_height = (frequency % 3 == 1) & (frequency < height)
            by_width = (frequency % 3 == 2) & (frequency < width)
            axes = by_height.long() + 2 * by_width.long()
            self._constants[device] = sent(axes, device), sent(frequencies, device), scale
        return self._constants[device]

    def forward(self, position_ids: Tensor | None, mrope_section: object = None, cp_group: object = None) -> Tensor:
        """Angles of local positions.

        Args:
            position_ids: [3, b, s] temporal, height and width positions, or [b, s] of text, the same on all axes.
            mrope_section, cp_group: GPTModel's, and not needed.

        Returns:
            [2, s, b, 1, d].

        Raises:
            ValueError: positions of another shape, or none.
        """
        shape = None if position_ids is None else list(position_ids.shape)
        if shape is None or len(shape) < 2 or shape[:-2] not in ([], [3]):
            raise ValueError(f"position_ids has shape {shape}, expected [3, rows, tokens], or [rows, tokens] for text")
        axes, frequencies, scale = self.constants(position_ids.device)
        positions = position_ids.float().expand(3, -1, -1)[axes].permute(2, 1, 0)  # [s, b, d/2]
        return cos_sin(positions * frequencies, self.dtype, scale)[:, :, :, None]


def vision_rotary(position_ids: Tensor, dim: int, theta: float = 10000.0) -> Tensor:
    """[N, 2] row and column of each patch -> [2, N, 1, 1, d]: half of the frequencies turn by row, half by column.

    In float32 whatever the model's precision, as the reference rotates. Source: transformers,
    Qwen3VLVisionRotaryEmbedding and apply_rotary_pos_emb_vision.
    """
    frequencies = inverse_frequencies(dim // 2, theta, position_ids.device)
    angles = (position_ids[:, :, None] * frequencies).flatten(1)
    return cos_sin(angles, torch.float32)[:, :, None, None]

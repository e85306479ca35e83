"""The gated delta rule and the preceding causal convolution in torch, which restart at every segment.

Segment offsets stay on the device. Tensors that depend on them have sizes that do not: T tokens in n segments fill at
most T // 64 + n chunks, and unused chunks are empty.
They replace GatedDeltaNet's kernels if flash-linear-attention or a GPU is missing: megatron-core does not build the
layer without that package, and the package needs a GPU. If both are present, its kernels compute, even if the package
cannot be imported: megatron-core reports that.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK = 64  # tokens, of flash-linear-attention's kernels too
# Of flash-linear-attention. Earlier ones wait for the GPU, or fail or compute other gradients on a Hopper GPU; before
# 0.4.2 the convolution's chunks differ. (github.com/fla-org/flash-linear-attention/issues/640)
LOWEST = "0.6.0"
_PACKAGE = f"flash-linear-attention>={LOWEST}"
_HOPPER = 9  # compute capability


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """X / sqrt(|x|^2 + eps) over the last dimension, in float32.

    Source: transformers, modeling_qwen3_5.l2norm.
    """
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Causal depthwise convolution of x [b, s, d] by [d, w] within each segment; the last weight is the token's own.

    `activation` is "silu", "swish" or None; b is 1 for packed rows with `cu_seqlens` [n + 1]. megatron-core passes no
    other, and no states.
    """
    tokens, width = x.shape[1], weight.shape[-1]
    position = _place_in_segment(_offsets(cu_seqlens, tokens, x.device), tokens)
    y = x * weight[:, -1]
    for back in range(1, min(width, tokens)):
        before = F.pad(x, (0, 0, back, 0))[:, :tokens]
        y = y + before * weight[:, -1 - back] * (position >= back)[:, None]
    if bias is not None:
        y = y + bias
    return F.silu(y) if activation else y, None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, None]:
    """Chunked gated delta rule: S <- S exp(g_t); S <- S + k_t (beta_t (v_t - k_t S)); o_t = scale q_t S.

    It is applied to each head and segment. All tokens of a chunk are processed in parallel: their updates are the
    solution of a triangular system. Only the state is passed from chunk to chunk. A chunk never contains tokens of two
    segments, and a segment's first chunk resets the state. Computed in float32 for all input dtypes.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025), section 3.3; transformers,
    modeling_qwen3_5.torch_chunk_gated_delta_rule.

    Args:
        q, k: [b, s, h, d]; b is 1 for packed rows.
        v: [b, s, h, e], as the result, in its dtype.
        g: [b, s, h] logarithm of the decay, at most 0.
        beta: [b, s, h] writing strength, 0 to 1.
        scale: factor applied to the queries; None for 1 / sqrt(d).
        initial_state, output_final_state: None and False in megatron-core's calls; states begin at zero here.
        use_qk_l2norm_in_kernel: apply the L2 norm to q and k here.
        cu_seqlens: [n + 1] offsets of the segments in a packed row; None if each row is one segment.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    tokens, dtype = v.shape[1], v.dtype
    slots, is_first = _chunks(_offsets(cu_seqlens, tokens, v.device), tokens)

    def cut(x: Tensor) -> Tensor:
        """[b, s, h, ...] -> [b, chunks, h, CHUNK, ...] float32; empty slots are zeros, which have no effect."""
        padded = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, 1))
        return padded[:, slots].transpose(2, 3)

    q, k, v, g, beta = (cut(x) for x in (q, k, v, g, beta))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = g.cumsum(-1)  # cumulative within the chunk
    since = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [.., i, j] decay from token j to token i
    written = beta[..., None] * k
    system = torch.eye(CHUNK, device=g.device) + ((written @ k.mT) * since).tril(-1)
    right = torch.cat((beta[..., None] * v, written * g.exp()[..., None]), -1)
    values, seen = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    within = (q @ k.mT) * since
    q_in, k_out = q * g.exp()[..., None], k * (g[..., -1:] - g).exp()[..., None]
    decay = g[..., -1].exp()[..., None, None]

    state, outputs = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), []
    for c, keep in enumerate((~is_first).float().unbind()):
        state = state * keep
        new = values[:, c] - seen[:, c] @ state
        outputs.append(q_in[:, c] @ state + within[:, c] @ new)
        state = state * decay[:, c] + k_out[:, c].mT @ new
    out = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)  # [b, chunks * CHUNK, h, e]
    flat = slots.flatten()  # empty slots write to an extra row at the end
    return out.new_zeros(out.shape[0], tokens + 1, *out.shape[2:]).index_copy(1, flat, out)[:, :-1].to(dtype), None


def _offsets(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """[n + 1] int64."""
    return torch.arange(2, device=device) * tokens if cu_seqlens is None else cu_seqlens.to(device, torch.int64)


def _place_in_segment(offsets: Tensor, tokens: int) -> Tensor:
    """[T] each token's index within its segment."""
    index = torch.arange(tokens, device=offsets.device)
    return index - offsets[torch.searchsorted(offsets, index, right=True) - 1]


def _chunks(offsets: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[c, CHUNK] the token in each slot, T for empty slots; [c] whether a chunk is the first of its segment."""
    segment, number = _places_of_chunks(offsets, tokens // CHUNK + len(offsets) - 1)
    token = (offsets[segment] + number * CHUNK)[:, None] + torch.arange(CHUNK, device=offsets.device)
    return torch.where(token < offsets[segment + 1][:, None], token, tokens), number == 0


def _places_of_chunks(offsets: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
    """[c] each chunk's segment, and its number in it; chunks after the last one continue the last segment."""
    lengths = offsets.diff()
    ends = ((lengths + CHUNK - 1) // CHUNK).cumsum(0)
    number = torch.arange(chunks, device=offsets.device)
    segment = torch.searchsorted(ends, number, right=True).clamp(max=len(lengths) - 1)
    begins = F.pad(ends, (1, 0))[segment]
    return segment, number - begins


def are_missing() -> bool:
    """Whether our functions are used."""
    return not torch.cuda.is_available() or importlib.util.find_spec("fla") is None


def check_package() -> None:
    """Say on a machine with a GPU whether flash-linear-attention is missing.

    Raises:
        ValueError: it is too old, or Triton compiles its kernels wrongly for this GPU.
    """
    if not torch.cuda.is_available():
        return
    if are_missing():
        logger.warning(
            "flash-linear-attention is not installed: layers of linear attention take torch functions, which need "
            f"many times as long and much more memory; pip install '{_PACKAGE}'"
        )
        return
    package, triton = (Version(importlib.import_module(name).__version__) for name in ("fla", "triton"))
    if package < Version(LOWEST):
        raise ValueError(f"flash-linear-attention is {package}, expected {LOWEST} or newer: pip install '{_PACKAGE}'")
    wrong = Version("3.4") <= triton < Version("3.7.1") and importlib.util.find_spec("tilelang") is None
    if wrong and torch.cuda.get_device_capability()[0] == _HOPPER:
        raise ValueError(
            f"Triton is {triton}, which compiles gradients of linear attention wrongly for a Hopper GPU "
            "(flash-linear-attention refuses it in the first backward pass): expected Triton 3.7.1 or newer, or "
            "tilelang, which the package then takes"
        )


def build_without_package(module: Any) -> None:
    """In `megatron.core.ssm.gated_delta_net.common`, which refuses to build the layer without the package."""
    if are_missing():
        module.HAVE_FLA, module.l2norm = True, l2norm


def choose_kernels(module: Any) -> None:
    """In `megatron.core.ssm.gated_delta_net.gdn`, which calls the kernels."""
    ours = are_missing()
    module.causal_conv1d = causal_conv1d if ours else with_chunks(module.causal_conv1d)
    module.chunk_gated_delta_rule = chunk_gated_delta_rule if ours else with_chunks(module.chunk_gated_delta_rule)


def with_chunks(kernel: Callable) -> Callable:
    """A kernel of flash-linear-attention that is told a packed row's chunks, which it would ask the GPU for."""

    @functools.wraps(kernel)
    def call(*args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        return kernel(*args, cu_seqlens=cu_seqlens, chunk_indices=_chunks_of_row(cu_seqlens), **kwargs)

    return call


def _chunks_of_row(cu_seqlens: Any) -> Tensor | None:
    """[c, 2] of the offsets' dtype, each chunk's segment and its number in it, kept with the offsets for all layers;
    None for rows that are one segment each, and for offsets of others.
    """
    if not hasattr(cu_seqlens, "lengths"):
        return None
    if not hasattr(cu_seqlens, "chunks"):
        chunks = sum(-(-length // CHUNK) for length in cu_seqlens.lengths)
        cu_seqlens.chunks = torch.stack(_places_of_chunks(cu_seqlens, chunks), 1).to(cu_seqlens.dtype)
    return cu_seqlens.chunks

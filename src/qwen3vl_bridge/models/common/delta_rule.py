"""The gated delta rule and the causal convolution before it, in torch. Both restart at every segment.

With a GPU and the package flash-linear-attention, the package's kernels are used, otherwise this module's functions.
megatron-core does not build the layer without the package (`upstream/gated_delta_kernels.py`).

Segment offsets stay on the device. The sizes of tensors do not depend on their values: T tokens in n segments fill at
most T // 64 + n chunks, and unused chunks are empty.

Legend of shapes: b rows, s tokens, T tokens of a packed row, n segments, c chunks, h heads, d and e head dimensions of
keys and values.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Protocol

from qwen3vl_bridge.core.layout import locate_chunks, segment_ids, segment_offsets
from qwen3vl_bridge.models.common.chunkwise import continue_convolution
from qwen3vl_bridge.upstream import gated_delta_kernels

import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor

logger = logging.getLogger(__name__)

CHUNK = 64  # tokens; flash-linear-attention uses the same size
# Earlier releases of flash-linear-attention synchronize with the GPU, or fail or compute wrong gradients on a Hopper
# GPU (github.com/fla-org/flash-linear-attention/issues/640). Before 0.4.2 the chunks of the convolution differ.
MINIMUM_VERSION = "0.6.0"
_PACKAGE = f"flash-linear-attention>={MINIMUM_VERSION}"
_HOPPER = 9  # compute capability


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return x / sqrt(|x|^2 + eps) over the last dimension, computed in float32.

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
    """Apply a causal depthwise convolution within each segment.

    Args:
        x: [b, s, d]; b is 1 for packed rows.
        weight: [d, w]; the last weight belongs to the token itself.
        bias: [d].
        activation: "silu", "swish" or None.
        initial_state: [n, d, w]; the last w - 1 entries are the tokens before each segment. None for zeros.
        output_final_state: ignored; megatron-core passes False.
        cu_seqlens: [n + 1] offsets of the n segments of a packed row; None if each row is one segment.

    Returns:
        The result [b, s, d], and None in place of a final state.
    """
    tokens, width = x.shape[1], weight.shape[-1]
    lengths = _offsets(cu_seqlens, tokens, x.device).diff()
    position = segment_offsets(lengths, tokens)
    y = x * weight[:, -1]
    for back in range(1, width):
        before = F.pad(x, (0, 0, back, 0))[:, :tokens] * (position >= back)[:, None]
        if initial_state is not None:  # [n, w, d], of which a token reads the entry `back` before itself
            state, entry = initial_state.mT, (position + width - back).clamp(max=width - 1)
            held = state[:, entry] if cu_seqlens is None else state[segment_ids(lengths, tokens), entry][None]
            before = before + held * (position < back)[:, None]
        y = y + before * weight[:, -1 - back]
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
) -> tuple[Tensor, Tensor | None]:
    """Compute the gated delta rule: S <- S exp(g_t); S <- S + k_t (beta_t (v_t - k_t S)); o_t = scale q_t S.

    Each head and segment has its own state S, which starts at zero. Tokens of a chunk are processed in parallel: their
    updates solve a triangular system. Everything is computed in float32.

    Source: Yang, Kautz and Hatamizadeh, Gated Delta Networks (2025), section 3.3; transformers,
    modeling_qwen3_5.torch_chunk_gated_delta_rule.

    Args:
        q, k: [b, s, h, d]; b is 1 for packed rows.
        v: [b, s, h, e].
        g: [b, s, h] logarithm of the decay, at most 0.
        beta: [b, s, h] writing strength, 0 to 1.
        scale: factor of the queries; None for 1 / sqrt(d).
        initial_state: [n, h, d, e] float32, the state before each segment; None for zeros. For padded rows, n is b.
        output_final_state: return the state after the last token of each segment.
        use_qk_l2norm_in_kernel: normalize q and k with `l2norm`.
        cu_seqlens: [n + 1] offsets of the n segments of a packed row; None if each row is one segment.

    Returns:
        [b, s, h, e] in the dtype of v, and the final state [n, h, d, e] float32 or None.
    """
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    tokens, dtype = v.shape[1], v.dtype
    # The token in each slot [c, CHUNK], `tokens` for empty slots; and [c] which chunks begin a segment.
    offsets = _offsets(cu_seqlens, tokens, v.device)
    segment, number = locate_chunks(offsets, tokens // CHUNK + len(offsets) - 1, CHUNK)
    slots = (offsets[segment] + number * CHUNK)[:, None] + torch.arange(CHUNK, device=offsets.device)
    slots = torch.where(slots < offsets[segment + 1][:, None], slots, tokens)
    is_first = number == 0

    def to_chunks(x: Tensor) -> Tensor:
        """Rearrange x [b, s, h, ...] to chunks [b, c, h, CHUNK, ...] float32. Empty slots are zeros."""
        padded = F.pad(x.float(), (0, 0) * (x.ndim - 2) + (0, 1))
        return padded[:, slots].transpose(2, 3)

    q, k, v, g, beta = (to_chunks(x) for x in (q, k, v, g, beta))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = g.cumsum(-1)  # cumulative within the chunk
    decay_between = (g[..., :, None] - g[..., None, :]).tril().exp().tril()  # [..., i, j] from token j to token i
    k_beta = beta[..., None] * k
    system = torch.eye(CHUNK, device=g.device) + ((k_beta @ k.mT) * decay_between).tril(-1)
    right = torch.cat((beta[..., None] * v, k_beta * g.exp()[..., None]), -1)
    values, state_keys = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    attention = (q @ k.mT) * decay_between
    q_in, k_out = q * g.exp()[..., None], k * (g[..., -1:] - g).exp()[..., None]
    decay = g[..., -1].exp()[..., None, None]

    state, outputs, states = v.new_zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1]), [], []
    for c, begins in enumerate(is_first.float().unbind()):
        state = state * (1 - begins)
        if initial_state is not None:
            state = state + begins * (initial_state if cu_seqlens is None else initial_state[segment[c : c + 1]])
        new = values[:, c] - state_keys[:, c] @ state
        outputs.append(q_in[:, c] @ state + attention[:, c] @ new)
        state = state * decay[:, c] + k_out[:, c].mT @ new
        if output_final_state and cu_seqlens is not None:
            states.append(state)
    final = state if output_final_state else None
    if states:
        last = torch.searchsorted(segment, torch.arange(len(offsets) - 1, device=offsets.device), right=True) - 1
        final = torch.cat(states)[last]
    out = torch.stack(outputs, 1).transpose(2, 3).flatten(1, 2)  # [b, c * CHUNK, h, e]
    flat = slots.flatten()  # empty slots write to an extra row at the end
    out = out.new_zeros(out.shape[0], tokens + 1, *out.shape[2:]).index_copy(1, flat, out)[:, :-1]
    return out.to(dtype), final


def recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gated delta rule for one token of each row, in float32; see `chunk_gated_delta_rule`.

    Args:
        q, k, v, g, beta: as for `chunk_gated_delta_rule`, with s = 1.
        state: [b, h, d, e] float32, the state before the token.

    Returns:
        [b, 1, h, e] in the dtype of v, and the new state.
    """
    query, key, value, decay, strength = (x[:, 0].float() for x in (q, k, v, g, beta))
    state = state * decay.exp()[..., None, None]
    change = strength[..., None] * (value - (key[..., None, :] @ state)[..., 0, :])
    state = state + key[..., :, None] * change[..., None, :]
    output = (query[..., None, :] @ state)[..., 0, :] * q.shape[-1] ** -0.5
    return output[:, None].to(v.dtype), state


def _offsets(cu_seqlens: Tensor | None, tokens: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens` [n + 1] as int64. If it is None, return the offsets of one segment with all tokens."""
    return torch.arange(2, device=device) * tokens if cu_seqlens is None else cu_seqlens.to(device, torch.int64)


def uses_torch_functions() -> bool:
    """Return True if this module's functions are used, because there is no GPU or no flash-linear-attention."""
    return not torch.cuda.is_available() or importlib.util.find_spec("fla") is None


def check_package() -> None:
    """Check flash-linear-attention on a machine with a GPU, and warn if it is missing.

    Raises:
        ValueError: the package is too old, or the installed Triton compiles its kernels wrongly for this GPU.
    """
    if not torch.cuda.is_available():
        return
    if uses_torch_functions():
        logger.warning(
            "flash-linear-attention is not installed: linear attention uses torch functions, which are many times "
            f"slower and need much more memory. Run pip install '{_PACKAGE}'"
        )
        return
    package, triton = (Version(importlib.import_module(name).__version__) for name in ("fla", "triton"))
    if package < Version(MINIMUM_VERSION):
        raise ValueError(
            f"flash-linear-attention is {package}, expected {MINIMUM_VERSION} or newer: pip install '{_PACKAGE}'"
        )
    is_wrong = Version("3.4") <= triton < Version("3.7.1") and importlib.util.find_spec("tilelang") is None
    if is_wrong and torch.cuda.get_device_capability()[0] == _HOPPER:
        raise ValueError(
            f"Triton is {triton}, which compiles gradients of linear attention wrongly for a Hopper GPU "
            "(flash-linear-attention raises an error in the first backward pass). Install Triton 3.7.1 or newer, or "
            "tilelang, which flash-linear-attention then uses"
        )


@functools.cache
def choose_kernels() -> None:
    """Replace the functions that megatron-core's GatedDeltaNet calls, once per process.

    Without a GPU or flash-linear-attention, replace the norm and the convolution by this module's functions. Otherwise
    wrap the convolution of the package, to pass it `chunk_indices`. Inside `chunkwise.chunks_of`, the convolution
    continues chunks of other ranks.
    """
    if uses_torch_functions():
        gated_delta_kernels.use_functions(l2norm, continue_convolution(causal_conv1d))
    else:
        gated_delta_kernels.wrap_convolution(lambda convolution: continue_convolution(with_chunks(convolution)))


class PackedRow(Protocol):
    """The part of `HostPackedSeqParams` that kernels need. Importing its module here would be circular."""

    cu_seqlens_q: Tensor | None

    def chunk_indices(self, size: int) -> Tensor:
        """Return [c, 2], the segment of each chunk of at most `size` tokens, and the chunk's index in the segment."""
        ...


# The packed row of the layer that is being computed. megatron-core passes only its offsets to kernels.
_packed_row: ContextVar[PackedRow | None] = ContextVar("packed_row", default=None)


@contextlib.contextmanager
def packed_row(row: PackedRow | None) -> Iterator[None]:
    """Context manager that sets the packed row from which kernels wrapped by `with_chunks` get `chunk_indices`."""
    token = _packed_row.set(row)
    try:
        yield
    finally:
        _packed_row.reset(token)


def with_chunks(kernel: Callable) -> Callable:
    """Wrap a kernel of flash-linear-attention to pass it the `chunk_indices` of the current packed row.

    Without these indices the host would wait for the GPU. The indices are None for padded rows, and for offsets that
    do not belong to the current packed row.
    """

    @functools.wraps(kernel)
    def call(*args: Any, cu_seqlens: Tensor | None = None, **kwargs: Any) -> Any:
        row = _packed_row.get()
        is_row = row is not None and cu_seqlens is not None and cu_seqlens is row.cu_seqlens_q
        chunks = row.chunk_indices(CHUNK) if is_row else None
        return kernel(*args, cu_seqlens=cu_seqlens, chunk_indices=chunks, **kwargs)

    return call

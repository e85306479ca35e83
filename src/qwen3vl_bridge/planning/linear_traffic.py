"""Compute the bytes that context-parallel ranks send for linear attention, for each value of `linear_cp_mode`."""

from __future__ import annotations

from qwen3vl_bridge.config.divisibility import CHUNKWISE
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout
from qwen3vl_bridge.weights.rows import Dimensions

_FLOAT = 4  # bytes of an element of a state


def bytes_sent(
    dims: Dimensions, layout: ParallelLayout, mode: str, *, tokens: float, segments: float, element_bytes: int = 2
) -> float:
    """Return the bytes that a rank sends to others, on average, in the forward pass of one layer.

    The backward pass sends the same number of bytes.

    Args:
        dims: dimensions of a hybrid model.
        layout: the parallel layout.
        mode: "headwise" or "chunkwise".
        tokens: number of tokens of a microbatch on the rank.
        segments: number of padded rows, or of documents of a packed row, in the microbatch.
        element_bytes: bytes of an element of a hidden state.
    """
    heads, channels, value = (dims[name] / layout.tp for name in ("l_value_heads", "l_qkv", "l_value"))
    key_dim, value_dim = dims["l_key_dim"], dims["l_value_dim"]
    to_others = 1 - 1 / layout.cp
    if mode != CHUNKWISE:  # the outputs of the input projection, and the inputs of the output projection
        return tokens * (channels + 2 * value + 2 * heads) * element_bytes * to_others
    # Of each chunk: its map of states and the state before it, and the last tokens and those before it.
    states = heads * key_dim * (key_dim + 2 * value_dim) * _FLOAT
    borders = 2 * (dims["l_conv"] - 1) * channels * element_bytes
    return 2 * segments * (states + borders) * to_others

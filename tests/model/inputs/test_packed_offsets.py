"""What attention and multi-token prediction are told of a packed row: where its segments lie, and no gaps between."""

from __future__ import annotations

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.models.core_attention import layout_packed_seq_params
from qwen3vl_bridge.models.vision_tower import packed_seq_params

import pytest
import torch

from tests.parity.batches import make_batch, make_samples

LENGTHS = [5, 0, 3]


@pytest.fixture
def layout():
    """Padding behind each segment, a segment of padding alone, and padding behind all."""
    return SequenceLayout._build(1, [*LENGTHS, 0], [8, 4, 4, 8])


def test_transformer_engine_sees_segments_without_gaps(layout):
    """With real lengths beside physical ones it would drop FlashAttention, and have nothing in float32."""
    found = layout_packed_seq_params(layout)
    assert found.cu_seqlens_q.tolist() == [0, 8, 12, 16, 24] and found.cu_seqlens_q.dtype == torch.int32
    assert found.pad_between_seqs is False
    # One tensor: releases that compare the offsets compare it with itself, and the latest ask for no more than that.
    assert found.cu_seqlens_q is found.cu_seqlens_kv is found.cu_seqlens_q_padded is found.cu_seqlens_kv_padded
    assert found.max_seqlen_q == found.max_seqlen_kv == 8 and found.lengths == (8, 4, 4, 8)
    assert layout_packed_seq_params(SequenceLayout.rows([5, 3], 8)) is None


@pytest.mark.parametrize("cp", [2, 4])
def test_segments_divide_as_context_parallelism_needs_them(cp):
    """Transformer Engine halves each rank's part of every offset."""
    layout = SequenceLayout.packed_row([5, 9, 1], multiple=2 * cp, total=64)
    assert (layout_packed_seq_params(layout).cu_seqlens_q % (2 * cp) == 0).all()


def test_frames_are_segments(config):
    frames = make_batch(make_samples("video", config, seed=0), config).vision
    found = packed_seq_params(frames.cu_seqlens, frames.lengths)
    assert found.cu_seqlens_q is found.cu_seqlens_kv_padded is frames.cu_seqlens
    assert found.pad_between_seqs is False and found.max_seqlen_q == max(frames.lengths)

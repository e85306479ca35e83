"""Pieces of tensors as bytes: turned matrices against torch's own transpose."""

from __future__ import annotations

import itertools

from qwen3vl_bridge.checkpoint.formats import tensors
from qwen3vl_bridge.checkpoint.formats.huggingface import SINGLE, HFWeights
from qwen3vl_bridge.checkpoint.formats.tensors import ITEMSIZE, Slice, TransposedSlice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    generator = torch.Generator().manual_seed(0)
    values = {
        f"{part} {dtype}": torch.randn(3000, generator=generator).to(getattr(torch, dtype))
        for dtype in DTYPES
        for part in ("gate", "up")
    }
    save_file(values, folder / SINGLE)
    return folder, values


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 50),
    more_rows=st.integers(0, 10),
    columns=st.integers(1, 50),
    dtypes=st.tuples(*[st.sampled_from(DTYPES)] * 3),
    strip=st.sampled_from([1, 64, 1000, 1 << 18]),
    cuts=st.lists(st.integers(0, 3000), max_size=3),
)
def test_a_turned_matrix_is_the_transpose(stored, rows, more_rows, columns, dtypes, strip, cuts):
    """Of one run or of two, read strip by strip, asked for in parts, in the dtype that is stored or another."""
    folder, values = stored
    lengths, (first, second, target) = [rows * columns, more_rows * columns], dtypes
    names = [f"gate {first}", f"up {second}"]
    runs = tuple(Slice(name, 7, length) for name, length in zip(names, lengths, strict=True) if length)
    parts = [values[run.source][7 : 7 + run.length].to(getattr(torch, target)) for run in runs]
    expected = torch.cat(parts).view(-1, columns).t().contiguous().view(-1)
    places = sorted({0, len(expected), *(cut for cut in cuts if cut < len(expected))})
    matrix = TransposedSlice(runs, columns, 0, len(expected))
    with pytest.MonkeyPatch.context() as patch, tensors.SegmentReader(HFWeights(folder), block=64) as reader:
        patch.setattr(tensors, "_STRIP", strip)
        found = b"".join(
            bytes(block)
            for start, end in itertools.pairwise(places)
            for block in reader.blocks([matrix.part(start, end - start)], target)
        )
    assert len(found) == len(expected) * ITEMSIZE[target]
    assert torch.equal(torch.frombuffer(bytearray(found), dtype=expected.dtype), expected)


def test_a_matrix_gives_its_memory_to_the_next(stored):
    """Experts come by the thousand; each must not take memory of its own."""
    folder, _ = stored
    with tensors.SegmentReader(HFWeights(folder)) as reader:
        memory = set()
        for start in range(3):
            list(reader.blocks([TransposedSlice((Slice("gate float32", start, 12),), 3, 0, 12)], "float32"))
            memory.add(id(reader._matrix[1]))
        assert len(memory) == 1
        list(reader.blocks([TransposedSlice((Slice("gate float32", 0, 20),), 5, 0, 20)], "float32"))
        assert len(reader._matrix[1]) == 80

"""Hashed n-grams, compared with a loop over documents in plain integers."""

from dataclasses import replace
from math import prod

from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.core.ngrams import NgramHash, ngram_ids
from qwen3vl_bridge.models.qwen4_exp.hash_constants import head_sizes, multipliers, table_rows

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.support import layouts, random_batch

VOCABULARY, EOS = 12, 7


def make_hash(ngram_size: int, heads_per_ngram: int = 2, layer: int = 0, eos: int = EOS) -> NgramHash:
    sizes = head_sizes(50, (ngram_size - 1) * heads_per_ngram, layer)
    factors = multipliers(VOCABULARY, ngram_size, layer, seed=3)
    return NgramHash(factors, sizes, ngram_size, heads_per_ngram, eos)


def wrapped(number: int) -> int:
    """Return a number as int64 arithmetic has it."""
    return (number + 2**63) % 2**64 - 2**63


def hash_document(tokens: list[int], constants: NgramHash) -> list[list[int]]:
    """Return the ids of each token of a document without padding."""
    eos, found = constants.eos_token_id, []
    for last in range(len(tokens)):
        seen = [tokens[last]]  # the token, the one before it, ...
        for back in range(1, constants.ngram_size):
            ended = last < back or eos in tokens[last - back : last]
            seen.append(eos if ended else tokens[last - back])
        ids = []
        for head, size in enumerate(constants.head_sizes):
            mixed = 0
            for token, factor in zip(
                seen[: 2 + head // constants.heads_per_ngram], constants.multipliers, strict=False
            ):
                mixed ^= wrapped(token * factor)
            ids.append(mixed % size)
        found.append(ids)
    return found


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, SequenceLayout, int, int]:
    layout, cp, sp = draw(layouts())
    if draw(st.booleans()):  # many documents of 1 to 3 tokens
        layout, cp, sp = SequenceLayout.packed_row(draw(st.lists(st.integers(1, 3), min_size=1, max_size=12))), 1, 1
    ids = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=layout.total, max_size=layout.total))
    return torch.tensor(ids).view(layout.num_rows, -1), layout, cp, sp


@given(batches(), st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_ngram_ids_match_loop_over_documents(case, ngram_size):
    ids, layout, _, _ = case
    hashes = [make_hash(ngram_size, layer=0), make_hash(ngram_size, layer=1, eos=3)]
    found = ngram_ids(ids, layout, hashes)
    assert found.dtype == torch.int64 and found.shape == (2, layout.total, len(hashes[0].head_sizes))
    starts = layout.cu_seqlens_padded.tolist()
    for constants, of_layer in zip(hashes, found.tolist(), strict=True):
        for start, length, padded in zip(starts[:-1], layout.lengths, layout.padded_lengths, strict=True):
            document = ids.flatten()[start : start + length].tolist() + [constants.eos_token_id] * (padded - length)
            assert of_layer[start : start + padded] == hash_document(document, constants)


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=9), min_size=1, max_size=5))
@settings(max_examples=100, deadline=None)
def test_ngram_ids_are_equal_for_packed_padded_and_single_documents(documents):
    lengths, constants = [len(document) for document in documents], make_hash(3)
    single = [
        ngram_ids(torch.tensor([document]), SequenceLayout.packed_row([len(document)]), [constants])[0]
        for document in documents
    ]
    for layout in (SequenceLayout.packed_row(lengths, multiple=4), SequenceLayout.padded_rows(lengths, max(lengths))):
        ids = layout.place_tokens([torch.tensor(document) for document in documents], padding=5)
        found = ngram_ids(ids, layout, [constants])[0]
        assert torch.equal(found[~layout.padding_mask()], torch.cat(single))


def test_ngram_ids_are_not_negative_if_products_overflow_int64():
    constants = replace(make_hash(3), multipliers=(2**62 + 1, 2**61 + 3, 2**60 + 5))
    tokens = [11, 10, 9, EOS, 8, 11]
    found = ngram_ids(torch.tensor([tokens]), SequenceLayout.packed_row([6]), [constants])[0]
    assert found.tolist() == hash_document(tokens, constants) and bool((found >= 0).all())


@given(batches())
@settings(max_examples=50, deadline=None)
def test_token_batch_local_returns_ngram_ids_of_tokens_of_rank(case):
    ids, layout, cp, sp = case
    batch = replace(
        random_batch(np.random.default_rng(0), 1, packed=True, pictures=False), input_ids=ids, layout=layout
    )
    flat = {name: torch.zeros(prod(ids.shape), dtype=torch.int64).view(ids.shape) for name in ("labels", "loss_mask")}
    positions, slots = torch.zeros(3, *ids.shape), torch.full((layout.total,), -1)
    batch = replace(batch, **flat, position_ids=positions, vision_slot=slots)
    hashes = [make_hash(3, layer=layer) for layer in range(2)]
    expected = ngram_ids(ids, layout, hashes)
    for cp_rank in range(cp):
        for sp_rank in range(sp):
            found = batch.local(cp, cp_rank, sp, sp_rank, ngram_hashes=hashes).ngram_ids
            index = token_index(layout, cp, cp_rank, sp, sp_rank)
            assert found.shape == (2, *index.shape, 4) and torch.equal(found, expected[:, index])
    assert batch.local().ngram_ids is None


def test_ngram_hash_raises_if_number_of_heads_is_wrong():
    with pytest.raises(ValueError, match="found 3 multipliers and 5 head sizes, expected 3 and 4"):
        replace(make_hash(3), head_sizes=(2, 3, 5, 7, 11))


def test_ngram_head_sizes_add_up_to_rows_of_released_table():
    """The sum of the sizes is that of the released table. splitmix64 is checked with its published test vector."""
    sizes = head_sizes(20_000_000, 16, 0)
    assert sum(sizes) == 320_001_446 and sizes[0] == 20_000_003
    rows = table_rows(20_000_000, 16, 0, 128)
    assert rows[:-1] == sizes[:-1] and sum(rows) == 320_001_536
    assert table_rows(20_000_000, 16, 0, 1) == sizes
    assert head_sizes(20_000_000, 8, 1) == sizes[8:]
    assert multipliers(248_320, 3, 0, 1234) == (23703573157769, 20109073645365, 8052911324071)
    # With a vocabulary of one token, factors have the generator's outputs modulo 2^62 - 1. Source: Rosetta Code,
    # Pseudo-random numbers/Splitmix64, from the state 1234567.
    stream = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    start = 1234567 - 0x9E3779B97F4A7C15  # the generator moves on before each output
    assert multipliers(1, 3, 0, start) == tuple(2 * (value % (2**62 - 1)) + 1 for value in stream)


def test_ngram_head_sizes_are_consecutive_primes_across_layers():
    assert head_sizes(1, 5, 0) == (2, 3, 5, 7, 11)
    assert head_sizes(7, 2, 0) + head_sizes(7, 2, 1) == (7, 11, 13, 17)

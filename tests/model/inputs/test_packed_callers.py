"""Whole calls with packed-sequence parameters: what goes in as rows comes out where Megatron callers look for it."""

from __future__ import annotations

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)

import pytest
import torch
import torch.nn.functional as F

from tests.parity.batches import make_samples

from .support import gaps, make_rows, no_grad, offsets, packed_params, reference_logits, sides, unpack

# Absolute errors, measured over all cases of this file.
LOGITS = 1e-5  # measured 2.0e-6, of logits up to about 2 and losses up to 8


@pytest.mark.parametrize("rounded", [False, True], ids=["true lengths", "lengths rounded up"])
@pytest.mark.parametrize("side", ["right", "left", "both"])
def test_rows_with_packed_seq_params(pair, side, rounded):
    """As RL frameworks call: rows and mask go in, a packed row as the parameters describe it comes out."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows = make_rows(samples, sides(samples)[side])
    lengths = [len(s.ids) for s in samples]
    padded = [-(-n // 8) * 8 for n in lengths]
    params = packed_params(offsets(padded if rounded else lengths), offsets(padded))
    call = dict(attention_mask=rows.attention_mask.bool(), packed_seq_params=params, **rows.pixels)
    expected = reference_logits(pair, rows)

    logits = no_grad(pair.megatron, rows.input_ids, **call)
    assert logits.shape[:2] == (1, sum(padded))
    assert (unpack(logits, lengths, padded) - rows.real(expected)).abs().max() <= LOGITS

    wanted = F.cross_entropy(rows.real(expected), rows.real(rows.labels), reduction="none")
    losses = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)
    assert losses.shape == rows.labels.shape
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS
    assert not losses[rows.attention_mask == 0].any()

    labels = torch.cat([F.pad(s.labels, (0, p - len(s.ids))) for s, p in zip(samples, padded, strict=True)])[None]
    losses = no_grad(pair.megatron, rows.input_ids, labels=labels, **call)
    assert losses.shape == labels.shape
    assert (unpack(losses, lengths, padded) - wanted).abs().max() <= LOGITS


def test_rows_with_packed_seq_params_and_no_mask(pair):
    """The offsets tell which tokens of rows padded on the right are real."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows, lengths = make_rows(samples, [0] * 4), [len(s.ids) for s in samples]
    logits = no_grad(pair.megatron, rows.input_ids, packed_seq_params=packed_params(offsets(lengths)), **rows.pixels)
    assert (logits[0] - rows.real(reference_logits(pair, rows))).abs().max() <= LOGITS


def test_one_row_with_packed_seq_params(pair):
    samples = make_samples("one image", pair.config, seed=2)
    rows, lengths = make_rows(samples, gaps(samples)), [len(s.ids) for s in samples]
    call = dict(attention_mask=rows.attention_mask, packed_seq_params=packed_params(offsets(lengths)), **rows.pixels)
    expected = rows.real(reference_logits(pair, rows))
    assert (no_grad(pair.megatron, rows.input_ids, **call)[0] - expected).abs().max() <= LOGITS
    losses = no_grad(pair.megatron, rows.input_ids, labels=rows.labels, **call)
    wanted = F.cross_entropy(expected, rows.real(rows.labels), reduction="none")
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS


def test_several_documents_in_each_row(pair):
    """Rows one after the other are the packed row; this is also Megatron-Bridge's step with full rows."""
    samples = make_samples("mixed", pair.config, seed=2)
    length = max(len(a.ids) + len(b.ids) for a, b in (samples[:2], samples[2:])) + 3
    lengths = [len(s.ids) for s in samples]
    padded = [lengths[0], length - lengths[0], lengths[2], length - lengths[2]]
    flat = torch.cat([F.pad(s.ids, (0, p - len(s.ids)), value=7) for s, p in zip(samples, padded, strict=True)])
    labels = torch.cat([F.pad(s.labels, (0, p - len(s.ids))) for s, p in zip(samples, padded, strict=True)])
    alone = make_rows(samples, [0] * 4)
    expected = alone.real(reference_logits(pair, alone))
    wanted = F.cross_entropy(expected, alone.real(alone.labels), reduction="none")

    call = dict(packed_seq_params=packed_params(offsets(lengths), offsets(padded)), **alone.pixels)
    logits = no_grad(pair.megatron, flat.view(2, length), **call)
    assert logits.shape[:2] == (1, 2 * length)
    assert (unpack(logits, lengths, padded) - expected).abs().max() <= LOGITS
    for shape in ((2, length), (1, 2 * length)):
        losses = no_grad(pair.megatron, flat.view(2, length), labels=labels.view(shape), **call)
        assert losses.shape == shape
        assert (unpack(losses.view(1, -1), lengths, padded) - wanted).abs().max() <= LOGITS

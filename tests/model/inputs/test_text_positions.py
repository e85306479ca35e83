"""Positions [rows, tokens], as people give them for text: with pictures, and to the text model alone."""

from __future__ import annotations

import logging

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models import inputs
from qwen3vl_bridge.models.inputs import as_model_inputs
from qwen3vl_bridge.models.rope import InterleavedMRoPE

import pytest
import torch
import torch.nn.functional as F

from tests.parity.batches import make_batch, make_samples

from .support import GROUPS, make_rows, no_grad, offsets, packed_params, sides
from .test_inputs import pictures

LOGITS = 1e-5  # absolute, measured 1.4e-6, of logits up to about 2


@pytest.mark.parametrize("side", ["right", "left"])
def test_counting_positions_beside_pictures_are_ignored(pair, side):
    """As Megatron-Bridge's generate scripts and `vlm_step` (arange) and Hugging Face's (of real tokens) give them."""
    samples = make_samples("mixed", pair.config, seed=2)
    rows = make_rows(samples, sides(samples)[side])
    call = dict(attention_mask=rows.attention_mask, **rows.pixels)
    expected = no_grad(pair.megatron, rows.input_ids, **call)
    of_row = torch.arange(rows.input_ids.shape[1]).expand_as(rows.input_ids)
    of_tokens = (rows.attention_mask.cumsum(-1) - 1).masked_fill(rows.attention_mask == 0, 1)
    for positions in (of_row, of_tokens):
        assert torch.equal(no_grad(pair.megatron, rows.input_ids, positions, **call), expected)


def test_without_a_mask_the_whole_row_counts(provider, config):
    samples = make_samples("one image", config, seed=0)
    ids = samples[0].ids[None]
    ours, _ = as_model_inputs(provider, GROUPS, ids, position_ids=torch.arange(ids.shape[1])[None], **pictures(samples))
    assert torch.equal(ours.position_ids, make_batch(samples, config, packed=True).position_ids[:, :, : ids.shape[1]])


@pytest.mark.parametrize("restart", [True, False], ids=["in each document", "over the row"])
def test_a_packed_row_counts_in_its_documents(provider, config, restart):
    samples = make_samples("mixed", config, seed=0)
    lengths = [len(s.ids) for s in samples]
    positions = torch.cat([torch.arange(n) for n in lengths]) if restart else torch.arange(sum(lengths))
    call = dict(packed_seq_params=packed_params(offsets(lengths)), **pictures(samples))
    ids = torch.cat([s.ids for s in samples])[None]
    ours, _ = as_model_inputs(provider, GROUPS, ids, position_ids=positions[None], **call)
    expected, _ = as_model_inputs(provider, GROUPS, ids, **call)
    assert torch.equal(ours.position_ids, expected.position_ids)


def test_it_is_said_once(provider, config, caplog):
    inputs._warn_once.cache_clear()
    samples = make_samples("one image", config, seed=0)
    ids = samples[0].ids[None]
    given = dict(position_ids=torch.arange(ids.shape[1])[None], **pictures(samples))
    with caplog.at_level(logging.WARNING, logger=inputs.__name__):
        for _ in range(2):
            as_model_inputs(provider, GROUPS, ids, **given)
            as_model_inputs(provider, GROUPS, ids % 7, position_ids=given["position_ids"])  # text: nothing to say
    assert [record.message.split(" are ")[0] for record in caplog.records] == ["position_ids [rows, tokens]"]


def test_the_text_model_alone_takes_them(pair):
    """Text positions stand for all three axes, as in Megatron-Bridge's own text model."""
    samples = make_samples("text only", pair.config, seed=2)
    rows = make_rows(samples, [0] * len(samples))
    positions = torch.arange(rows.input_ids.shape[1]).expand_as(rows.input_ids)
    found = no_grad(pair.megatron.language_model, rows.input_ids, positions, None)
    expected = no_grad(pair.megatron, rows.input_ids, attention_mask=rows.attention_mask)
    assert (rows.real(found) - rows.real(expected)).abs().max() <= LOGITS
    losses = no_grad(pair.megatron.language_model, rows.input_ids, positions, None, labels=rows.labels)
    wanted = F.cross_entropy(rows.real(found), rows.real(rows.labels), reduction="none")
    assert (rows.real(losses) - wanted).abs().max() <= LOGITS


@pytest.mark.parametrize("shape", [(5,), (2, 4, 5), (1, 4, 5), (3, 1, 4, 5)])
def test_positions_of_other_shapes_are_refused(shape):
    rope = InterleavedMRoPE(8, 1e4, [2, 1, 1], torch.float32)
    assert rope(torch.zeros(4, 5).long()).shape == rope(torch.zeros(3, 4, 5).long()).shape == (2, 5, 4, 1, 8)
    with pytest.raises(ValueError, match=r"expected \[3, rows, tokens\], or \[rows, tokens\] for text"):
        rope(torch.zeros(shape).long())
    with pytest.raises(ValueError, match="position_ids has shape None"):
        rope(None)

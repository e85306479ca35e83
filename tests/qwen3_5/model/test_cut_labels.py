"""Labels that callers have cut over context-parallel ranks, where multi-token prediction reads those of other ranks.

Ranks are threads here, as in `tests/model/inputs/test_cp_sharded_inputs.py`. Whole models on real ranks, with the steps
of Megatron-Bridge and verl that cut labels so: `tests/frameworks/megatron_bridge/test_upstream_steps.py`.
"""

from __future__ import annotations

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.batch import SequenceLayout, token_index

import pytest
import torch
from megatron.bridge import AutoBridge
from transformers import AutoConfig

from tests.model.inputs.support import packed_params
from tests.model.inputs.test_cp_sharded_inputs import Ranks, assert_equal, layout_of
from tests.model.inputs.test_inputs import params_of, pictures
from tests.parity.batches import make_batch, make_samples

IDS = torch.arange(1, 17).view(2, 8)


@pytest.fixture(scope="module")
def provider(qwen3_5_folders):
    provider = AutoBridge.from_hf_pretrained(str(qwen3_5_folders["dense"])).to_megatron_provider(load_weights=False)
    provider.mtp_loss_scaling_factor = 0.1
    return provider


@pytest.mark.parametrize("masked", ["loss mask", "labels of -100"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("cp", [2, 4])
def test_cut_labels_give_the_inputs_of_whole_ones(provider, qwen3_5_folders, monkeypatch, cp, packed, masked):
    """Next tokens, their labels and their masks among them."""
    config = AutoConfig.from_pretrained(qwen3_5_folders["dense"])
    samples = make_samples("mixed", config, seed=3)
    longest = max(len(sample.ids) for sample in samples)
    rows = SequenceLayout.rows([len(sample.ids) for sample in samples], -(-longest // (2 * cp)) * 2 * cp)
    batch = make_batch(samples, config, layout=layout_of(samples, cp) if packed else rows)
    layout, ranks = batch.layout, Ranks(cp, monkeypatch)
    padding = layout.padding_mask().view(batch.input_ids.shape)
    call = dict(input_ids=batch.input_ids, **pictures(samples))
    call |= dict(packed_seq_params=params_of(layout)) if packed else dict(attention_mask=~padding)
    ignored = batch.labels.masked_fill(batch.loss_mask == 0, -100)
    whole = dict(labels=batch.labels, loss_mask=batch.loss_mask) if masked == "loss mask" else dict(labels=ignored)

    def cut(rank):
        index = token_index(layout, cp, rank).T
        return {name: values.flatten()[index] for name, values in whole.items()}

    found = ranks.inputs(provider, lambda rank: call | cut(rank))
    expected = ranks.inputs(provider, lambda rank: call | whole)
    for rank, (ours, right) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours.labels, cut(rank)["labels"].clamp(min=0))
        assert right.following is not None
        assert_equal(ours, right)


@pytest.mark.parametrize("cut", [True, False])
def test_a_loss_mask_without_labels_has_nothing_predicted(provider, monkeypatch, cut):
    """There are no next labels to train on; such a call asks for logits, or is refused by a model that trains."""
    mask = torch.ones(2, 4 if cut else 8)
    for inputs in Ranks(2, monkeypatch).inputs(provider, lambda rank: dict(input_ids=IDS, loss_mask=mask)):
        assert inputs.labels is None and inputs.following is None


def test_nothing_is_sent_where_nothing_is_trained(provider, monkeypatch):
    ranks = Ranks(2, monkeypatch)
    with pytest.MonkeyPatch.context() as untrained:
        untrained.setattr(provider, "mtp_loss_scaling_factor", 0.0)
        (first, _) = ranks.inputs(provider, lambda rank: dict(input_ids=IDS, labels=IDS[:, :4]))
    assert ranks.gathered == 0 and first.following is None and first.labels is not None


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (dict(labels=IDS[:, :4]), dict(labels=IDS), r"labels is \[2, 8\] integers on .* rank 1 and \[2, 4\]"),
        (dict(labels=IDS[:, :4]), {}, r"labels is None on context-parallel rank 1 and \[2, 4\] integers on rank 0"),
        (dict(labels=IDS), {}, r"labels is None on context-parallel rank 1"),
        (
            dict(labels=IDS[:, :4]),
            dict(labels=IDS[:, :4], loss_mask=torch.ones(2, 4)),
            r"loss_mask is \[2, 4\] floating point on .* rank 1 and None",
        ),
        (
            dict(labels=IDS[:, :4]),
            dict(labels=IDS[:, :4] - 9),
            r"labels has shape \[2, 8\] .* entries in \[-8, 12\], expected \[2, 8\] token ids below 512",
        ),
    ],
)
def test_ranks_that_differ_all_say_so(provider, monkeypatch, first, second, message):
    """None is left waiting for another's labels."""
    calls = [dict(input_ids=IDS, **first), dict(input_ids=IDS, **second)]
    for error in Ranks(2, monkeypatch).inputs(provider, calls.__getitem__):
        with pytest.raises(ValueError, match=message):
            raise error


def test_cut_labels_of_a_packed_row(provider, monkeypatch):
    """By hand: two segments of four tokens, whose chunks are one token each; rank 0 has the outer ones."""
    call = dict(input_ids=IDS[:1], packed_seq_params=packed_params([0, 4, 8]))
    labels = torch.tensor([[2, 3, 4, 99, 6, 7, 8, 99]])
    own = [[0, 3, 4, 7], [1, 2, 5, 6]]
    found = Ranks(2, monkeypatch).inputs(provider, lambda rank: call | dict(labels=labels[:, own[rank]]))
    assert found[0].following.labels.tolist() == [[3, 99, 7, 99]]
    assert found[0].following.loss_mask.tolist() == [[1, 0, 1, 0]]
    assert found[1].following.labels.tolist() == [[4, 99, 8, 99]]
    assert found[1].following.input_ids.tolist() == [[3, 4, 7, 8]]

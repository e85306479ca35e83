"""Padding does not change results of real tokens, and reaches every router as a mask."""

from dataclasses import dataclass

from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common import moe

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter

from tests.helpers.batches import Sample, make_batch, make_samples, per_sample
from tests.helpers.noise import relative
from tests.models.inputs.support import packed_params
from tests.parity.conftest import Pair, make_pair

# Sums over tokens are taken in other orders and over other zeros. Measured over the layouts below: see each line.
LOSSES = 5e-6  # measured 9.5e-7, of losses up to 8
BALANCE = 1e-6  # measured 2.7e-7 relative
GRADIENT = 1e-5  # measured 1.4e-6 relative to the largest entry of each parameter's gradient


@dataclass
class Seen:
    losses: list[torch.Tensor]
    balance: dict[str, torch.Tensor]
    counts: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def pair(moe_folder) -> Pair:
    # Balancing losses weigh what a loss is divided by: sums over tokens are taken here.
    return make_pair(moe_folder, moe_aux_loss_coeff=0.02, moe_z_loss_coeff=1e-3, calculate_per_token_loss=True)


def layouts(lengths: list[int]) -> dict[str, SequenceLayout]:
    """Return the same documents without padding and with increasing padding."""
    return {
        "packed tightly": SequenceLayout.packed_row(lengths),
        "packed in multiples": SequenceLayout.packed_row(lengths, multiple=16),
        "packed with a tail": SequenceLayout.packed_row(lengths, total=sum(lengths) + 40),
        "rows": SequenceLayout.padded_rows(lengths, max(lengths)),
        "longer rows": SequenceLayout.padded_rows(lengths, max(lengths) + 29),
    }


def run(pair: Pair, samples: list[Sample], layout: SequenceLayout) -> Seen:
    """Run forward and backward of one step, and record the inputs of routers."""
    pair.megatron.zero_grad()
    tracker = get_moe_metrics_tracker()
    tracker.clear()
    counts = []

    def count(*arguments, tokens_per_expert, **more):
        counts.append(tokens_per_expert)
        return switch_load_balancing_loss_func(*arguments, tokens_per_expert=tokens_per_expert, **more)

    batch = make_batch(samples, pair.config, layout=layout)
    inputs = batch.local()
    with pytest.MonkeyPatch.context() as patch:  # to see the counts that megatron-core balances by
        patch.setattr(moe, "switch_load_balancing_loss_func", count)
        losses = pair.megatron(inputs=inputs)
    (losses * inputs.loss_mask).sum().backward()
    return Seen(
        losses=[loss.detach() for loss in per_sample(losses, batch.layout)],
        balance={name: entry.values.clone() for name, entry in tracker.metrics.items()}, counts=counts,
        gradients={name: p.grad.clone() for name, p in pair.megatron.named_parameters() if p.grad is not None},
    )  # fmt: skip


def test_padding_changes_no_losses_balancing_losses_or_gradients(pair):
    samples = make_samples("mixed", pair.config, seed=11)
    seen = {name: run(pair, samples, layout) for name, layout in layouts([len(s.ids) for s in samples]).items()}
    expected = seen.pop("packed tightly")
    moe_layers = len(pair.provider.moe_layers)
    assert len(expected.counts) == moe_layers and set(expected.balance) == {"load_balancing_loss", "z_loss"}
    for name, found in seen.items():
        for got, want in zip(found.losses, expected.losses, strict=True):
            assert (got - want).abs().max() <= LOSSES, name
        for loss, values in expected.balance.items():
            assert values.count_nonzero() == moe_layers
            assert torch.allclose(found.balance[loss], values, rtol=BALANCE, atol=0), f"{name}: {loss}"
        assert all(torch.equal(a, b) for a, b in zip(found.counts, expected.counts, strict=True)), name
        errors = relative({one: found.gradients[one] for one in expected.gradients}, expected.gradients)
        assert max(errors.values()) <= GRADIENT, (name, errors)


def test_moe_balancing_losses_change_router_gradient(pair):
    """Otherwise the test above would compare nothing."""
    samples = make_samples("mixed", pair.config, seed=11)
    layout = SequenceLayout.packed_row([len(s.ids) for s in samples])
    weight = "language_model.decoder.layers.0.mlp.router.weight"
    with_balance = run(pair, samples, layout).gradients[weight]
    pair.provider.moe_aux_loss_coeff, pair.provider.moe_z_loss_coeff = 0.0, None
    try:
        without = run(pair, samples, layout).gradients[weight]
    finally:
        pair.provider.moe_aux_loss_coeff, pair.provider.moe_z_loss_coeff = 0.02, 1e-3
    assert (with_balance - without).abs().max() > 1e-2 * without.abs().max()


def masks_that_arrive(pair: Pair, *arguments, **named) -> list[torch.Tensor]:
    """Return the padding mask [s, b] of every layer with experts."""
    arrived = []
    routers = [module for module in pair.megatron.modules() if isinstance(module, TopKRouter)]
    hooks = [router.register_forward_pre_hook(lambda _, found: arrived.append(found[1])) for router in routers]
    pair.megatron(*arguments, **named)
    for hook in hooks:
        hook.remove()
    assert len(arrived) == len(pair.provider.moe_layers)
    return arrived


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_padding_mask_of_batch_reaches_every_moe_router(pair, packed):
    batch = make_batch(make_samples("mixed", pair.config, seed=1), pair.config, packed=packed)
    expected = batch.layout.padding_mask().view(batch.input_ids.shape).T
    assert expected.any()
    assert all(torch.equal(mask, expected) for mask in masks_that_arrive(pair, inputs=batch.local()))


IDS = torch.tensor([[11, 12, 13, 14, 9, 9], [11, 12, 13, 14, 15, 16]])


@pytest.mark.parametrize(("given", "padding"), [
    (dict(attention_mask=torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])), [[0, 0, 0, 0, 1, 1], [0] * 6]),
    # Rolled: real tokens come first.
    (dict(attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])), [[0, 0, 0, 0, 1, 1], [0] * 6]),
    # Both are given: the mask counts, not the ids.
    (dict(attention_mask=torch.ones(2, 6)), [[0] * 6] * 2),
    (dict(), [[0, 0, 0, 0, 1, 1], [0] * 6]),  # the last resort, a run of the padding token
    (dict(packed_seq_params=packed_params([0, 3, 9], [0, 4, 10])), [[0, 0, 0, 1, 0, 0, 0, 0, 0, 0]]),
], ids=["mask on the right", "mask on the left", "mask before ids", "ids", "packed rows"])  # fmt: skip
def test_padding_in_arguments_of_caller_reaches_every_moe_router(pair, monkeypatch, given, padding):
    monkeypatch.setattr(pair.provider, "pad_token_id", 9)
    expected = torch.tensor(padding).bool().T
    assert all(torch.equal(mask, expected) for mask in masks_that_arrive(pair, IDS, **given))

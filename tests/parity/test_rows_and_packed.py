"""Padded rows and packed rows train equally: a tiny MoE model with four experts, top 2."""

import copy
from typing import NamedTuple

import pytest
import torch
from megatron.bridge import AutoBridge
from transformers import AutoConfig

from tests.helpers.batches import make_batch, make_samples, per_sample
from tests.helpers.noise import check, limits, relative
from tests.parity.conftest import build

STEPS = 20


@pytest.fixture
def model(moe_folder):
    config = copy.deepcopy(AutoConfig.from_pretrained(moe_folder))
    config.text_config.num_experts, config.text_config.num_experts_per_tok = 4, 2
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    provider.moe_aux_loss_coeff, provider.moe_z_loss_coeff = 1e-3, 1e-3
    model = build(provider)
    model.hf_config = config
    return model.train()


class Step(NamedTuple):
    """Mean loss, the loss of each token, and the gradients of a step of an optimizer with learning rate zero."""

    loss: float
    losses: torch.Tensor
    gradients: dict[str, torch.Tensor]


def step(model, samples, *, packed: bool) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    batch = make_batch(samples, model.hf_config, packed=packed)
    inputs = batch.local()
    losses = model(inputs=inputs)
    loss = (losses * inputs.loss_mask).sum() / inputs.loss_mask.sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    return Step(loss.item(), torch.cat(per_sample(losses.detach(), batch.layout)), gradients)


def errors(found: Step, expected: Step) -> dict[str, float]:
    return {
        "loss": abs(found.loss / expected.loss - 1), "losses": float((found.losses - expected.losses).abs().max()),
        "gradients": max(relative(found.gradients, expected.gradients).values()),
    }  # fmt: skip


@pytest.mark.slow
def test_padded_and_packed_rows_give_equal_losses_and_gradients(model):
    """Sums have different numbers of rows. Both balancing losses are included."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = make_samples("video", model.hf_config, seed=0)
    most = limits(lambda: step(model, first, packed=False), errors, model)
    for seed in range(STEPS):
        samples = make_samples("video", model.hf_config, seed=seed)
        check(errors(step(model, samples, packed=True), step(model, samples, packed=False)), most)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())

"""Activation recomputation does not change gradients, including DeepStack features and mergers."""

import pytest

from tests.helpers.batches import make_batch, make_samples
from tests.parity.conftest import make_pair

# The layers compute the same; sums of a tapped layer's two gradients are taken in another order.
# Relative to the largest entry of each parameter's gradient; measured 4.6e-7.
TOLERANCE = 5e-6

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
BLOCK = dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=2)


def selective(*modules: str) -> dict:
    return dict(recompute_granularity="selective", recompute_modules=list(modules))


def of_vision(fields: dict) -> dict:
    return {f"vision_{name}": value for name, value in fields.items()}


CASES = {
    "full, both towers": FULL | of_vision(FULL), "full, text alone": FULL, "full, vision alone": of_vision(FULL),
    "some layers": BLOCK | of_vision(BLOCK), "two layers at once": FULL | dict(recompute_num_layers=2),
    "selective": selective("core_attn") | of_vision(selective("core_attn")), "selective mlp": selective("mlp"),
    "experts": selective("moe"),
}  # fmt: skip


def gradients(folder, **fields):
    pair = make_pair(folder, **fields)
    inputs = make_batch(make_samples("mixed", pair.config, seed=5), pair.config, packed=True).local()
    (pair.megatron(inputs=inputs) * inputs.loss_mask).sum().backward()
    return {name: p.grad for name, p in pair.megatron.named_parameters()}


@pytest.fixture(scope="module", params=["untied", "moe"])
def folder_and_plain(request):
    folder = request.getfixturevalue(f"{request.param}_folder")
    return folder, gradients(folder)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("case", CASES)
def test_recomputation_does_not_change_gradients(folder_and_plain, case):
    folder, plain = folder_and_plain
    if case == "experts" and not any("experts" in name for name in plain):
        with pytest.raises(ValueError, match=r"recompute_modules has \['moe'\], which this model does not have"):
            gradients(folder, **CASES[case])
        return
    recomputed = gradients(folder, **CASES[case])
    assert plain.keys() == recomputed.keys()
    for name, gradient in plain.items():
        error = ((gradient - recomputed[name]).abs().max() / gradient.abs().max()).item()
        assert error <= TOLERANCE, f"{name}: {error:.1e}"

"""Filters of logits against transformers' processors, and draws against the probabilities."""

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.inference.sampling import Sampling

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31), vocabulary=st.integers(1, 300), temperature=st.floats(0.05, 20),
    top_k=st.integers(0, 400), top_p=st.floats(0.01, 1), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_sampling_filter_matches_transformers_logits_warpers(seed, vocabulary, temperature, top_k, top_p, dtype):
    logits = (5 * torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed))).to(dtype)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits.float())
    found = Sampling(True, temperature, top_k, top_p).filter(logits)
    # Of tokens with equal logits at the limit either may be kept. And sums of probabilities are rounded: a token at the
    # limit may be kept by one of the two, and near a limit of 1 several whose probabilities are below the rounding.
    differs = found.isinf() != expected.isinf()
    probabilities = (logits.float() / temperature).softmax(-1)
    for row, shares, where in zip(logits, probabilities, differs, strict=True):
        assert len(row[where].unique()) <= 1 or shares[where].sum() < 1e-6
    torch.testing.assert_close(found[~differs], expected[~differs], rtol=1e-6, atol=0)


def test_sampling_filter_does_not_modify_given_logits():
    logits = torch.randn(2, 50)
    copy = logits.clone()
    Sampling(True, 0.5, 4, 0.9).filter(logits)
    assert torch.equal(logits, copy)


def test_sampling_draws_tokens_with_filtered_probabilities():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0])
    sampling = Sampling(True, 0.7, 4, 0.99)
    drawn = sampling.choose(logits.expand(40_000, -1), torch.Generator().manual_seed(0))
    found = torch.bincount(drawn, minlength=5) / len(drawn)
    assert (found - sampling.filter(logits[None]).softmax(-1)[0]).abs().max() < 0.01  # four standard deviations
    assert not found[4]


def test_sampling_with_same_seed_draws_same_tokens():
    logits = torch.randn(8, 100)
    first, again, other = (Sampling(True).choose(logits, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_sampling_choose_takes_largest_logit_by_default():
    logits = torch.randn(8, 100)
    assert torch.equal(Sampling().choose(logits, torch.Generator()), logits.argmax(-1))


@pytest.mark.parametrize(("arguments", "message"), [
    (dict(temperature=0.5, top_p=0.9), "temperature and top_p have an effect only with do_sample=True"),
    (dict(seed=0), "seed has an effect only with do_sample=True"),
    (dict(do_sample=True, temperature=0.0), "temperature is 0.0, expected more than 0; for greedy decoding"),
    (dict(do_sample=True, temperature=float("nan")), "temperature is nan, expected more than 0"),
    (dict(do_sample=True, top_k=-1), r"top_k is -1, expected 0 \(all tokens\) or more"),
    (dict(do_sample=True, top_p=0.0), "top_p is 0.0, expected more than 0 and at most 1"),
    (dict(do_sample=True, top_p=1.5), "top_p is 1.5, expected more than 0 and at most 1"),
])  # fmt: skip
def test_sampling_raises_if_setting_is_outside_its_range(arguments, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)

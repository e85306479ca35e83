"""In 8 bits, rows and layers that Transformer Engine's products do not take are refused before the first step."""

from qwen3vl_bridge import registry
from qwen3vl_bridge.inference.generation import _round_up
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider
from qwen3vl_bridge.models.refusals import (
    AFTER_FINALIZE,
    BEFORE_FINALIZE,
    _check_quantised_sizes,
    check_token_count,
)
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.models.settings import token_multiple

import pytest
import torch
from megatron.bridge import AutoBridge

from .test_parallel_settings import CP2, DENSE, EXPERTS, SP2, finalized

CS, MX = dict(fp8="hybrid", fp8_recipe="tensorwise"), dict(fp8="e4m3", fp8_recipe="mxfp8")
FP4 = dict(fp4="e2m1", fp4_recipe="nvfp4")


def in_bits(size, fields):
    """A provider with Transformer Engine's layers, which is not installed here."""
    provider = finalized(size, {name: value for name, value in fields.items() if not name.startswith("fp")})
    for name, value in {"transformer_impl": "transformer_engine", **fields}.items():
        setattr(provider, name, value)
    return provider


@pytest.mark.parametrize(("fields", "multiple"), [({}, 1), (CS, 16), (MX, 32), (FP4, 128)])
def test_tokens_of_a_rank_are_multiples(fields, multiple):
    assert token_multiple(in_bits(DENSE, fields)) == multiple


@pytest.mark.parametrize(("fields", "tokens", "multiple"), [
    (CS, 1048, 16), (dict(SP2, **CS), 1040, 32), (dict(SP2, **MX), 1056, 64), (dict(CP2, **CS), 1040, 32),
    (dict(SP2, **CP2, **MX), 1088, 128),
])  # fmt: skip
def test_the_length_of_rows(fields, tokens, multiple):
    provider = in_bits(EXPERTS, fields)
    provider.seq_length = tokens
    message = (
        f"seq_length is {tokens}, expected a multiple of {multiple}: .* take multiples of {token_multiple(provider)}"
    )
    with pytest.raises(ValueError, match=message):
        check(AFTER_FINALIZE, provider)
    provider.fp8 = None
    check(AFTER_FINALIZE, provider)


def test_rows_of_callers_are_refused_by_the_model(pair, monkeypatch):
    for name, value in CS.items():
        monkeypatch.setattr(pair.megatron.config, name, value)
    with pytest.raises(
        ValueError, match=r"a microbatch has 24 tokens on each context-parallel rank, .* multiple of 16"
    ):
        pair.megatron(torch.arange(24)[None])
    assert _round_up(24, pair.megatron) == 32  # in which `generate` lays rows out


def test_the_number_of_a_callers_rows_counts():
    provider = in_bits(DENSE, dict(SP2, **CP2, **CS))
    check_token_count(provider, 2 * 16)
    with pytest.raises(
        ValueError, match=r"has 48 tokens .* multiple of 32 with fp8 and fp8_recipe 'tensorwise': .* 64"
    ):
        check_token_count(provider, 48)


def qwen35(size, tensor, fields):
    config = registry.family("qwen3_5").presets.hf_config(size)
    provider: Qwen35VLModelProvider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    for name, value in dict(SP2, tensor_model_parallel_size=tensor, transformer_impl="transformer_engine").items():
        setattr(provider, name, value)
    provider.expert_tensor_parallel_size = 1
    for name, value in fields.items():
        setattr(provider, name, value)
    return provider


@pytest.mark.parametrize(("size", "tensor", "fields", "part"), [
    ("9B", 8, CS, "1544"), ("9B", 4, CS, None), ("9B", 4, MX, "3088"), ("9B", 2, MX, None), ("27B", 4, CS, "4120"),
    ("35B-A3B", 4, MX, "3088"), ("122B-A10B", 8, CS, None), ("122B-A10B", 8, MX, "2576"),
])  # fmt: skip
def test_the_input_projection_of_linear_attention(size, tensor, fields, part):
    provider = qwen35(size, tensor, fields)
    if part is not None:
        message = rf"self_attention\.in_proj has \d+ outputs, {part} on each of {tensor} .*in_proj_bf16=True: with fp8"
        with pytest.raises(ValueError, match=message):
            check(AFTER_FINALIZE, provider)
        provider.linear_attention_in_proj_bf16 = True
    check(AFTER_FINALIZE, provider)


def test_bits_of_one_projection_alone_would_be_ignored():
    provider = qwen35("9B", 2, dict(linear_attention_in_proj_bf16=True))
    with pytest.raises(ValueError, match="linear_attention_in_proj_bf16 is True with fp8 None and fp4 None, expected"):
        check(provider.rules, provider)
    check(BEFORE_FINALIZE, provider)


def test_other_layers_of_released_models_fit_at_any_size():
    """With experts whole, as recipes have them."""
    sizes = [(family, size) for family in ("qwen3_vl", "qwen3_5") for size in registry.family(family).presets.PRESETS]
    for family, size in sizes:
        config = registry.family(family).presets.hf_config(size)
        provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
        provider.expert_tensor_parallel_size = 1
        for name, value in MX.items():
            setattr(provider, name, value)
        if family == "qwen3_5":
            provider.linear_attention_in_proj_bf16 = True
        for tensor in (1, 2, 4, 8):
            provider.tensor_model_parallel_size = tensor
            _check_quantised_sizes(provider)

"""Rows and layers that Transformer Engine does not support in 8 and 4 bits raise an error before the first step."""

from qwen3vl_bridge import registry
from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.config.fields import token_multiple
from qwen3vl_bridge.config.model_validation import (
    AFTER_FINALIZE,
    BEFORE_FINALIZE,
    _check_quantized_sizes,
    check_token_count,
)
from qwen3vl_bridge.inference.decoder import round_up, step_multiple
from qwen3vl_bridge.models.qwen3_5.provider import Qwen35VLModelProvider

import pytest
import torch
from megatron.bridge import AutoBridge

from tests.models.settings.test_parallel_settings import CP2, DENSE, EXPERTS, SP2, finalized

CS, MX = dict(fp8="hybrid", fp8_recipe="tensorwise"), dict(fp8="e4m3", fp8_recipe="mxfp8")
FP4 = dict(fp4="e2m1", fp4_recipe="nvfp4")


def provider_with_te(size, fields):
    """Return a provider with layers of Transformer Engine, which is not installed here."""
    provider = finalized(size, {name: value for name, value in fields.items() if not name.startswith("fp")})
    for name, value in {"transformer_impl": "transformer_engine", **fields}.items():
        setattr(provider, name, value)
    return provider


@pytest.mark.parametrize(("fields", "multiple"), [({}, 1), (CS, 16), (MX, 32), (FP4, 128)])
def test_token_multiple_is_1_16_32_or_128_depending_on_precision(fields, multiple):
    assert token_multiple(provider_with_te(DENSE, fields)) == multiple


@pytest.mark.parametrize(("fields", "tokens", "multiple"), [
    (CS, 1048, 16), (dict(SP2, **CS), 1040, 32), (dict(SP2, **MX), 1056, 64), (dict(CP2, **CS), 1040, 32),
    (dict(SP2, **CP2, **MX), 1088, 128),
])  # fmt: skip
def test_checks_raise_if_seq_length_is_not_multiple_of_fp8_alignment(fields, tokens, multiple):
    provider = provider_with_te(EXPERTS, fields)
    provider.seq_length = tokens
    message = (
        f"seq_length is {tokens}, expected a multiple of {multiple}: .* need multiples of {token_multiple(provider)}"
    )
    with pytest.raises(ValueError, match=message):
        run_checks(AFTER_FINALIZE, provider)
    provider.fp8 = None
    run_checks(AFTER_FINALIZE, provider)


def test_fp8_forward_raises_if_token_count_is_not_aligned(pair, monkeypatch):
    for name, value in CS.items():
        monkeypatch.setattr(pair.megatron.config, name, value)
    with pytest.raises(
        ValueError, match=r"a microbatch has 24 tokens on each context-parallel rank, .* multiple of 16"
    ):
        pair.megatron(torch.arange(24)[None])
    assert round_up(24, step_multiple(pair.megatron)) == 32  # the row length that `generate` uses


def test_check_token_count_raises_if_count_is_not_multiple_of_alignment():
    provider = provider_with_te(DENSE, dict(SP2, **CP2, **CS))
    check_token_count(provider, 2 * 16)
    with pytest.raises(
        ValueError, match=r"has 48 tokens .* multiple of 32 for fp8 with fp8_recipe 'tensorwise': .* 64"
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
def test_checks_raise_if_fp8_linear_attention_in_proj_is_not_aligned(size, tensor, fields, part):
    provider = qwen35(size, tensor, fields)
    if part is not None:
        message = rf"self_attention\.in_proj has \d+ outputs, {part} on each of {tensor} .*in_proj_bf16=True: fp8 with"
        with pytest.raises(ValueError, match=message):
            run_checks(AFTER_FINALIZE, provider)
        provider.linear_attention_in_proj_bf16 = True
    run_checks(AFTER_FINALIZE, provider)


def test_checks_raise_if_linear_attention_in_proj_bf16_is_set_without_fp8():
    provider = qwen35("9B", 2, dict(linear_attention_in_proj_bf16=True))
    with pytest.raises(ValueError, match="linear_attention_in_proj_bf16 is True with fp8 None and fp4 None, expected"):
        run_checks(provider.checks, provider)
    run_checks(BEFORE_FINALIZE, provider)


def test_released_model_sizes_are_aligned_for_fp8_up_to_tp_8():
    """Experts are not sharded by tensor parallelism, as in the recipes."""
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
            _check_quantized_sizes(provider)

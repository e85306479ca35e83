"""Linear attention against transformers, and the delta rule against its definition."""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import logging
import sys
from types import ModuleType, SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.models.common import delta_rule
from qwen3vl_bridge.models.common.attention import packed_seq_params
from qwen3vl_bridge.models.common.delta_rule import causal_conv1d, chunk_gated_delta_rule, l2norm
from qwen3vl_bridge.models.common.linear_attention import LinearAttention, linear_attention_spec
from qwen3vl_bridge.upstream import gated_delta_kernels, replacements

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor, nn
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from tests.helpers.noise import check, limits, relative
from tests.models.qwen3_5.tiny import hf_text_config, make_config, megatron_config, one_rank, perturb

LENGTHS = [61, 64, 3, 130]


@pytest.fixture(scope="module")
def reference():
    return perturb(Qwen3_5GatedDeltaNet(hf_text_config(), 0))


def attention(dtype: torch.dtype = torch.float32) -> LinearAttention:
    config = megatron_config(params_dtype=dtype, bf16=dtype is torch.bfloat16, fp16=dtype is torch.float16)
    return build_module(linear_attention_spec(config), config=config, layer_number=1, pg_collection=one_rank())


def ours(reference: nn.Module) -> LinearAttention:
    module = attention()
    found = module.load_state_dict(renamed(reference.state_dict(), norm_shift=-1), strict=False)
    assert not found.unexpected_keys and all("_extra_state" in name for name in found.missing_keys)
    return module


def renamed(state: dict[str, Tensor], norm_shift: float = 0) -> dict[str, Tensor]:
    projections = [state[f"in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
    same = {name: state[name] for name in ("conv1d.weight", "A_log", "dt_bias", "out_proj.weight")}
    return same | {"in_proj.weight": torch.cat(projections), "out_norm.weight": state["norm.weight"] + norm_shift}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def run(call, x: Tensor, weight: Tensor) -> dict[str, Tensor]:
    x = x.clone().requires_grad_()
    out = call(x)
    (out * weight).sum().backward()
    return {"output": out.detach(), "input": x.grad}


def errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    every = relative(found, expected)
    return {name: every.pop(name) for name in ("output", "input")} | {"gradients": max(every.values())}


def compare(module: LinearAttention, reference: nn.Module, x: Tensor, call_reference, **kwargs) -> None:
    """Compare outputs and gradients for `x` [b, s, h]."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))

    def theirs() -> dict[str, Tensor]:
        reference.zero_grad()
        return run(call_reference, x, weight) | renamed(gradients(reference))

    module.zero_grad()
    ours = run(lambda x: module(x.transpose(0, 1).contiguous(), None, **kwargs)[0].transpose(0, 1), x, weight)
    check(errors(ours | gradients(module), theirs()), limits(theirs, errors, reference))


def hidden(*shape: int) -> Tensor:
    return torch.randn(*shape, megatron_config().hidden_size, generator=torch.Generator().manual_seed(1))


def test_linear_attention_of_batch_rows_matches_transformers(reference):
    compare(ours(reference), reference, hidden(2, 150), reference)


# Documents shorter than the convolution's four tokens, also at both ends of the row.
SHORT = [1, 2, 3, 1, 70, 1, 1, 2]


@pytest.mark.parametrize("lengths", [LENGTHS, SHORT, [1]], ids=["long", "short", "one token"])
def test_linear_attention_of_packed_row_matches_single_documents(reference, lengths):
    """Transformers does not reset the state within a row, so it gets one document at a time."""
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    compare(
        ours(reference), reference, hidden(1, sum(lengths)),
        lambda x: torch.cat([reference(segment) for segment in x.split(lengths, 1)], 1),
        packed_seq_params=packed_seq_params(cu_seqlens, tuple(lengths)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_attention_initial_a_log_is_log_of_uniform_samples(dtype):
    """exp(A_log) is uniform in [1, 16) and float32. Near zero, a decay would have no gradient."""
    module, drawn = attention(dtype), []
    for _ in range(50):
        module.reset_parameters()
        drawn.append(module.A_log.detach().clone())
    assert drawn[0].dtype is torch.float32
    decay = torch.cat(drawn).exp()
    assert 0.99 <= decay.min() < 1.5 and 15.5 < decay.max() < 16.1  # in bfloat16 the draw is rounded
    assert abs(decay.mean() - 8.5) < 4 * 15 / (12 * len(decay)) ** 0.5  # four standard errors


@pytest.mark.parametrize(
    ("dtype", "missing", "deterministic", "expected"),
    [
        (torch.float32, False, False, "ours"),  # flash-linear-attention's rounds it to TF32
        (torch.float32, True, True, "ours"),
        (torch.bfloat16, True, False, "ours"),
        (torch.bfloat16, False, False, "package's"),
        (torch.bfloat16, False, True, "megatron-core's"),
    ],
)
def test_choose_delta_rule_depends_on_dtype_package_and_deterministic_mode(
    monkeypatch, dtype, missing, deterministic, expected
):
    layer = SimpleNamespace(config=SimpleNamespace(params_dtype=dtype, deterministic_mode=deterministic))
    monkeypatch.setattr(delta_rule, "uses_torch_functions", lambda: missing)
    chosen = LinearAttention.choose_delta_rule(layer, F.linear)
    if expected == "ours":
        assert inspect.unwrap(chosen) is chunk_gated_delta_rule
    else:
        assert inspect.unwrap(chosen) is F.linear and (chosen is F.linear) == (expected == "megatron-core's")


def test_linear_attention_in_float32_uses_our_delta_rule():
    assert inspect.unwrap(attention(torch.float32).gated_delta_rule) is chunk_gated_delta_rule


def test_linear_attention_decay_of_bfloat16_model_is_float32():
    """As in transformers, exp(A_log) of a bfloat16 number is computed in float32."""
    module = attention(torch.bfloat16)
    alpha = torch.zeros(1, 1, len(module.A_log), dtype=torch.bfloat16)
    decay, _ = module._compute_g_and_beta(module.A_log, module.dt_bias, alpha, alpha)
    expected = -module.A_log.float().exp() * nn.functional.softplus(module.dt_bias.float())
    assert decay.dtype is torch.float32 and torch.equal(decay[0, 0], expected)


_KERNELS = "megatron.core.ssm.gated_delta_net"


@pytest.mark.parametrize(("gpu", "package"), [(True, False), (False, True), (False, False), (True, True)])
def test_choose_kernels_without_gpu_or_package_installs_torch_functions(gpu, package, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if package and name == "fla" else None)
    common, gdn = ModuleType("common"), ModuleType("gdn")
    common.l2norm, gdn.causal_conv1d = F.normalize, F.conv1d
    monkeypatch.setattr(gated_delta_kernels, "common", common)
    monkeypatch.setattr(gated_delta_kernels, "gdn", gdn)
    monkeypatch.setattr(replacements, "_done", {})
    delta_rule.choose_kernels.__wrapped__()
    both = gpu and package
    assert common.l2norm is (F.normalize if both else delta_rule.l2norm)
    assert inspect.unwrap(gdn.causal_conv1d) is (F.conv1d if both else causal_conv1d)
    assert len(replacements.replaced()) == (1 if both else 2)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=6))
def test_with_chunks_passes_chunk_indices_of_packed_row(lengths):
    """Chunks are (segment, index) of pieces of 64 tokens, and are computed once for all layers."""
    told = delta_rule.with_chunks(lambda **given: given)
    row = packed_seq_params(torch.tensor([0, *itertools.accumulate(lengths)]).int(), tuple(lengths))
    with delta_rule.packed_row(row):
        first, second = (told(cu_seqlens=row.cu_seqlens_q)["chunk_indices"] for _ in range(2))
    pieces = [[segment, piece] for segment, length in enumerate(lengths) for piece in range(-(-length // 64))]
    assert first.tolist() == pieces and first.dtype is torch.int32
    assert first is second


def test_with_chunks_passes_no_chunk_indices_if_offsets_are_not_of_packed_row():
    told = delta_rule.with_chunks(lambda **given: given)
    row = packed_seq_params(torch.tensor([0, 5]).int(), (5,))
    for offsets in (None, torch.tensor([0, 5]), row.cu_seqlens_q.clone()):
        with delta_rule.packed_row(row):
            assert told(cu_seqlens=offsets) == {"cu_seqlens": offsets, "chunk_indices": None}
    assert told(cu_seqlens=row.cu_seqlens_q)["chunk_indices"] is None  # not within a layer of ours


@pytest.mark.parametrize("gpu", [True, False])
def test_flash_linear_attention_missing_on_gpu_warns(gpu, monkeypatch, caplog):
    from megatron.bridge import AutoBridge

    config = make_config()
    config.architectures = ["Qwen3_5ForConditionalGeneration"]
    provider = AutoBridge.from_hf_config(config).to_megatron_provider(load_weights=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with caplog.at_level(logging.WARNING):
        provider.finalize()
    assert ("flash-linear-attention is not installed" in caplog.text) == gpu


@pytest.mark.parametrize(("package", "triton", "capability", "tilelang", "message"), [
    ("0.5.2", "3.7.1", (9, 0), True, r"flash-linear-attention is 0\.5\.2, expected 0\.6\.0 or newer"),
    ("0.6.0", "3.6.0", (9, 0), False, r"Triton is 3\.6\.0, .* Install Triton 3\.7\.1 or newer, or tilelang"),
    ("0.6.0", "3.6.0", (9, 0), True, None), ("0.6.0", "3.6.0", (10, 0), False, None),
    ("0.6.0", "3.3.1", (9, 0), False, None), ("0.6.1", "3.7.1", (9, 0), False, None),
])  # fmt: skip
def test_unsupported_flash_linear_attention_or_triton_version_raises(
    package, triton, capability, tilelang, message, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if tilelang or name == "fla" else None)
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace(__version__=package))
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        delta_rule.check_package()


def test_linear_attention_replaces_megatron_kernels_only_if_package_is_missing():
    attention(torch.float32)
    gdn = importlib.import_module(f"{_KERNELS}.gdn")
    common = importlib.import_module(f"{_KERNELS}.common")
    missing = delta_rule.uses_torch_functions()
    assert (inspect.unwrap(gdn.causal_conv1d) is delta_rule.causal_conv1d) == missing
    assert (common.l2norm is delta_rule.l2norm) == missing


HEADS, KEY, VALUE = 2, 8, 12
# Relative to the largest entry: the definition in float64 against chunks in float32.
TOLERANCE = 5e-6  # measured: below 1e-6, outputs and gradients


def definition(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute S <- S exp(g); S <- S + k (beta (v - k S)); o = q S / sqrt(d) in float64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, outputs = v.new_zeros(len(q), HEADS, KEY, VALUE), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) / KEY**0.5)
    return torch.stack(outputs, 1)


def inputs(rows: int, tokens: int, seed: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, HEADS, *shape, generator=random)

    q, k = (l2norm(normal(KEY)) for _ in range(2))
    return [x.requires_grad_() for x in (q, k, normal(VALUE), -0.3 * normal().abs(), normal().sigmoid())]


def worst(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))


def compare_rule(found: Tensor, expected: Tensor, tensors: list[Tensor]) -> None:
    weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    pairs = zip(
        torch.autograd.grad((found * weight).sum(), tensors), torch.autograd.grad((expected * weight).sum(), tensors),
        strict=True,
    )  # fmt: skip
    error = worst(found, expected)
    gradients = max(worst(ours, theirs) for ours, theirs in pairs)
    print(f"output {error:.1e}, gradients {gradients:.1e}")
    assert error < TOLERANCE and gradients < TOLERANCE


lengths_of_segments = st.lists(
    st.one_of(st.integers(1, 5), st.sampled_from([63, 64, 65, 128, 130])), min_size=1, max_size=6
)


@settings(max_examples=30)  # each is differentiated token by token
@given(lengths=lengths_of_segments, seed=st.integers(0, 2**16))
def test_delta_rule_on_packed_row_matches_definition_in_float64(lengths, seed):
    tensors = inputs(1, sum(lengths), seed)
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    found, state = chunk_gated_delta_rule(*tensors, cu_seqlens=cu_seqlens)
    segments = zip(*(x.split(lengths, 1) for x in tensors), strict=True)
    assert state is None
    compare_rule(found, torch.cat([definition(*segment) for segment in segments], 1), tensors)


@pytest.mark.parametrize("tokens", [1, 7, 64, 150])
def test_delta_rule_on_batch_rows_matches_definition_in_float64(tokens):
    tensors = inputs(3, tokens, seed=0)
    compare_rule(chunk_gated_delta_rule(*tensors)[0], definition(*tensors), tensors)


def test_delta_rule_with_l2norm_in_kernel_matches_normalized_inputs():
    q, k, *rest = (x.detach() for x in inputs(1, 9, seed=3))
    normed, _ = chunk_gated_delta_rule(3 * q, 5 * k, *rest, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(normed, chunk_gated_delta_rule(q, k, *rest)[0], rtol=1e-5, atol=1e-6)


def test_delta_rule_with_bfloat16_inputs_computes_in_float32():
    tensors = [x.detach().bfloat16() for x in inputs(1, 130, seed=4)]
    found, _ = chunk_gated_delta_rule(*tensors)
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, chunk_gated_delta_rule(*(x.float() for x in tensors))[0].bfloat16())


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), width=st.integers(1, 5))
def test_causal_conv1d_matches_torch_conv1d_on_single_documents(lengths, width):
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, sum(lengths), 6, generator=random, requires_grad=True)
    weight, bias = (torch.randn(*shape, generator=random, requires_grad=True) for shape in ((6, width), (6,)))

    def alone(segment: Tensor) -> Tensor:
        padded = F.pad(segment.mT, (width - 1, 0))
        return F.silu(F.conv1d(padded, weight[:, None], bias, groups=6)).mT

    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)])
    found, _ = causal_conv1d(x, weight, bias, "silu", cu_seqlens=cu_seqlens)
    compare_rule(found, torch.cat([alone(segment) for segment in x.split(lengths, 1)], 1), [x, weight, bias])
    rows, _ = causal_conv1d(x.expand(2, -1, -1), weight, bias, "silu")
    torch.testing.assert_close(rows, alone(x).expand(2, -1, -1), rtol=1e-5, atol=1e-6)


def test_delta_rule_and_convolution_do_not_synchronize_with_device():
    q, k, v, g, beta = (x.detach().to("meta") for x in inputs(1, 150, seed=0))
    cu_seqlens = torch.tensor([0, 20, 150], device="meta", dtype=torch.int32)
    assert chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)[0].shape == v.shape
    assert causal_conv1d(v.flatten(2), torch.ones(24, 4, device="meta"), cu_seqlens=cu_seqlens)[0].shape[1] == 150

"""Core attention without Transformer Engine: results against plain softmax, and the kernels it selects."""

import inspect
from itertools import pairwise
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.models.common import attention as core_attention
from qwen3vl_bridge.models.common.attention import SegmentAttention, layout_packed_seq_params

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import bias
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests.helpers.noise import allowed, check

HEADS, DIM = 4, 16
CAUSAL, FULL = AttnMaskType.causal, AttnMaskType.no_mask
LENGTHS = [[24], [8, 40, 16, 16, 8, 72], [16] * 5]  # multiples of 8: for four context-parallel ranks


def attention(groups: int, ranks: int = 1, rank: int = 0, dim: int = DIM, dropout: float = 0.0) -> SegmentAttention:
    config = TransformerConfig(
        num_layers=1, hidden_size=HEADS * dim, num_attention_heads=HEADS, num_query_groups=groups, kv_channels=dim,
        attention_dropout=dropout,
    )  # fmt: skip
    config.context_parallel_size = ranks
    process_groups = SimpleNamespace(tp=None, cp=SimpleNamespace(rank=lambda: rank, size=lambda: ranks))
    return SegmentAttention(config, 1, CAUSAL, "self", pg_collection=process_groups)


def tensors(tokens: int, groups: int, dim: int = DIM, seed: int = 0, **kind) -> list[Tensor]:
    """Return query, key and value [t, heads, d], and the gradient of the output."""
    random = torch.Generator().manual_seed(seed)
    made = [torch.randn(tokens, heads, dim, generator=random) for heads in (HEADS, groups, groups, HEADS)]
    return [x.to(**kind) for x in made]


def reference(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Tensor:
    """Compute plain softmax attention of the last tokens of one segment [t, heads, d]."""
    key, value = (x.repeat_interleave(len(query[0]) // len(x[0]), 1) for x in (key, value))
    products = torch.einsum("qhd,khd->hqk", query, key) * scale
    if causal:
        seen = torch.ones(products.shape[1:], dtype=torch.bool, device=query.device).tril(len(key) - len(query))
        products = products.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", products.softmax(-1), value)


class Varlen:
    calls = 0

    def __call__(self, query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        self.calls += 1
        segments = list(zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True))
        for offsets, longest, tokens in ((cu_seq_q, max_q, len(query)), (cu_seq_k, max_k, len(key))):
            assert offsets.dtype == torch.int32 and offsets.is_contiguous()
            assert offsets[0] == 0 and offsets[-1] == tokens and max(offsets.diff().tolist()) == longest
        assert window_size in ((-1, 0), (-1, -1)) and enable_gqa == (query.size(1) != key.size(1))
        assert all(x.stride(-1) == 1 and x.ndim == 3 for x in (query, key, value))
        causal = window_size == (-1, 0)
        return torch.cat([reference(query[q:r], key[k:m], value[k:m], causal, scale) for (q, r), (k, m) in segments])


class OlderVarlen(Varlen):
    """Varlen attention of torch 2.11, which detects fewer key heads itself."""

    def __call__(self, query, key, *others, scale, window_size):
        return super().__call__(
            query, key, *others, scale=scale, window_size=window_size, enable_gqa=query.size(1) != key.size(1)
        )


@pytest.fixture(params=[None, Varlen, OlderVarlen], ids=["segments", "one call", "one call of torch 2.11"])
def varlen(monkeypatch, request):
    """Return a substitute for torch's varlen attention, or None."""
    if request.param is None:
        return None
    stand_in = request.param()
    monkeypatch.setattr(core_attention, "varlen_attn", stand_in)
    monkeypatch.setattr(core_attention, "_VARLEN", frozenset(inspect.signature(stand_in).parameters))
    monkeypatch.setattr(core_attention, "supports_flash", lambda *tensors: True)
    return stand_in


def run(call, parts: list[Tensor]) -> list[Tensor]:
    """Return the output of `call(query, key, value)` and the three gradients."""
    *inputs, gradient = parts
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = call(*inputs)
    out.backward(gradient.view_as(out))
    return [out.detach().view_as(gradient), *(x.grad for x in inputs)]


def plain(lengths: list[int], causal: bool, scale: float):
    def call(query, key, value):
        split = (x.split(lengths) for x in (query, key, value))
        return torch.cat([reference(*segment, causal, scale) for segment in zip(*split, strict=True)])

    return call


def packed(module: SegmentAttention, lengths: list[int], kind: AttnMaskType = CAUSAL, device: str = "cpu"):
    params = layout_packed_seq_params(SequenceLayout.packed_row(lengths).to(device))
    return lambda *inputs: module(*inputs, None, attn_mask_type=kind, packed_seq_params=params)


def worst(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(found, expected, strict=True))


def compare(found: list[Tensor], call, parts: list[Tensor]) -> None:
    """Compare with the results of `call` in float64, within the noise of `call` in float32."""
    exact = run(call, [x.double() for x in parts])
    check({"error": worst(found, exact)}, allowed([{"error": worst(run(call, parts), exact)}]))


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kind", [CAUSAL, FULL])
def test_attention_of_packed_row_matches_softmax_reference(varlen, lengths, groups, kind):
    module, parts = attention(groups), tensors(sum(lengths), groups)
    compare(run(packed(module, lengths, kind), parts), plain(lengths, kind == CAUSAL, module.scale), parts)
    assert varlen is None or varlen.calls == 1


def shares(monkeypatch, lengths: list[int], groups: int, ranks: int, device: str = "cpu", dim: int = DIM):
    """Return attention of all context-parallel ranks, computed one after the other in this process."""
    layout = SequenceLayout.packed_row(lengths).to(device)

    def call(query, key, value):
        held = [token_index(layout, ranks, rank)[:, 0] for rank in range(ranks)]
        both = torch.stack([torch.cat((key[index], value[index]), -1) for index in held])
        out = torch.zeros(len(query), HEADS * dim, device=device, dtype=query.dtype)
        for rank, index in enumerate(held):

            def gather(local, group, rank=rank):
                assert torch.equal(local, both[rank]) and group.rank() == rank
                return both

            monkeypatch.setattr(core_attention, "gather_in_group", gather)
            module = attention(groups, ranks, rank, dim)
            found = packed(module, lengths, device=device)(query[index], key[index], value[index])
            out = out.index_copy(0, index, found)
        return out

    return call


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_attention_with_context_parallelism_matches_softmax_reference(varlen, monkeypatch, lengths, ranks):
    parts = tensors(sum(lengths), 2)
    compare(run(shares(monkeypatch, lengths, 2, ranks), parts), plain(lengths, True, DIM**-0.5), parts)
    assert varlen is None or varlen.calls == ranks


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("queries", [1, 24, 40])
def test_attend_last_tokens_on_cpu_matches_softmax_reference(groups, queries):
    query, key, value, gradient = tensors(40, groups)

    def end(*inputs):
        attended = core_attention.attend_last_tokens(*(x.transpose(0, 1)[None] for x in inputs), scale=0.3, dropout=0.0)
        return attended[0].transpose(0, 1)

    parts = [query[-queries:], key, value, gradient[-queries:]]
    compare(run(end, parts), lambda *inputs: reference(*inputs, True, 0.3), parts)


class Calls(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.scaled_dot_product_attention:
            self.found.append((args, kwargs))
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    @property
    def varlen(self) -> int:
        return self.names.count("torch_attn::_varlen_attn")

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.names.append(operation.name())
        for x in made if isinstance(made, tuple | list) else (made,):
            self.largest = max(self.largest, x.numel() if isinstance(x, Tensor) else 0)
        return made


SIX = (8, 40, 16, 16, 24, 72)


def on_fake_cuda(
    monkeypatch, module: SegmentAttention, groups: int, dtype: torch.dtype, dim: int = DIM, lengths=SIX
) -> tuple[Operations, list]:
    """Run a forward pass on a fake CUDA device that supports FlashAttention in 16 bits.

    A host-device synchronization raises, because fake tensors have no values.
    """
    sixteen = (torch.bfloat16, torch.float16)
    monkeypatch.setattr(core_attention, "can_use_flash_attention", lambda params: params.query.dtype in sixteen)
    with FakeTensorMode(), Operations() as operations, Calls() as calls:
        offsets = torch.empty(len(lengths) + 1, dtype=torch.int32, device="cuda")
        layout = SequenceLayout(offsets, offsets, 1, lengths, lengths)
        tokens = sum(lengths) // module.cp_size
        inputs = [torch.empty(tokens, heads, dim, dtype=dtype, device="cuda") for heads in (HEADS, groups, groups)]
        out = module(*inputs, None, attn_mask_type=CAUSAL, packed_seq_params=layout_packed_seq_params(layout))
        assert out.shape == (tokens, HEADS * dim)
    return operations, calls.found


@pytest.mark.skipif(core_attention.varlen_attn is None, reason="this torch has no varlen attention")
@pytest.mark.parametrize(("dtype", "dim", "dropout", "training", "one"), [
    (torch.bfloat16, 128, 0.0, True, True), (torch.float16, 72, 0.0, True, True),  # heads of the 8B's vision tower
    (torch.bfloat16, 256, 0.1, False, True),
    (torch.bfloat16, 128, 0.1, True, False),  # varlen attention knows no dropout
    (torch.bfloat16, 12, 0.0, True, False),  # nor heads of such a size, which the other pads
    (torch.float32, 128, 0.0, True, False),
])  # fmt: skip
def test_attention_on_cuda_uses_varlen_kernel_when_supported(monkeypatch, dtype, dim, dropout, training, one):
    module = attention(2, dim=dim, dropout=dropout).train(training)
    if dropout:
        call = lambda kernel, *x, **more: kernel(*x, scale=1, dropout=dropout, **more)  # noqa: E731
        monkeypatch.setattr(module, "_call_kernel", call)
    operations, others = on_fake_cuda(monkeypatch, module, 2, dtype, dim)
    assert (operations.varlen, len(others)) == ((1, 0) if one else (0, 5))  # two neighbours are of one length


@pytest.mark.skipif(core_attention.varlen_attn is None, reason="this torch has no varlen attention")
def test_attention_with_cp_on_cuda_does_not_synchronize(monkeypatch):
    gather_nothing(monkeypatch)
    operations, others = on_fake_cuda(monkeypatch, attention(2, 4, 1), 2, torch.bfloat16)
    assert operations.varlen == 1 and not others


def gather_nothing(monkeypatch):
    gather = lambda local, group: local.expand(group.size(), *local.shape)  # noqa: E731
    monkeypatch.setattr(core_attention, "gather_in_group", gather)


@pytest.mark.parametrize("groups", [2, 4])
def test_context_parallel_attention_in_float32_materializes_no_mask(monkeypatch, groups):
    """On CUDA the memory-efficient kernel supports float32, and aligns its causal mask to the end of the keys."""

    def materialize(*_):
        raise AssertionError("a mask of all queries and keys was made")

    def make(*args, make=CausalBias.__new__):
        with _disable_current_modes():  # fake tensors do not let torch make one of its subclasses
            return make(*args)

    gather_nothing(monkeypatch)
    monkeypatch.setattr(CausalBias, "__new__", make)
    monkeypatch.setattr(CausalBias, "_materialize", materialize)
    monkeypatch.setattr(bias, "can_use_flash_attention", lambda params: False)
    monkeypatch.setattr(bias, "can_use_efficient_attention", lambda params: True)
    tokens, ranks = 16384, 4
    operations, calls = on_fake_cuda(monkeypatch, attention(groups, ranks, 1), groups, torch.float32, lengths=(tokens,))
    # A rank has two chunks of a segment, each of which attends to all tokens up to its end.
    assert operations.names.count("aten::_efficient_attention_forward") == len(calls) == 2 and not operations.varlen
    assert operations.largest < tokens**2 / (2 * ranks) / 4


@pytest.mark.parametrize(("groups", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
def test_attention_expands_grouped_key_heads_without_flash_attention(monkeypatch, groups, dtype):
    """The memory-efficient kernel needs as many key heads as query heads."""
    monkeypatch.setattr(core_attention, "varlen_attn", None)
    _, calls = on_fake_cuda(monkeypatch, attention(groups), groups, dtype)
    expanded = dtype == torch.float32
    for (query, key, value), arguments in calls:
        assert key.size(1) == value.size(1) == (query.size(1) if expanded else groups)
        assert arguments["enable_gqa"] == (not expanded)


def test_attention_on_cpu_does_not_check_cuda_kernel_support(monkeypatch):
    def ask(params):
        raise AssertionError("torch was asked for a device that has no tensors here")

    monkeypatch.setattr(core_attention, "can_use_flash_attention", ask)
    with Calls() as calls:
        run(packed(attention(2), [8, 16]), tensors(24, 2, dtype=torch.bfloat16))
    assert [call[1]["enable_gqa"] for call in calls.found] == [True, True]


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("groups", [2, 4])
def test_attention_memory_is_linear_in_tokens(monkeypatch, groups, ranks):
    """Compare the largest tensor and the saved tensors of a forward and backward pass on the CPU."""
    largest, kept = {}, {}
    for tokens in (4096, 8192):
        call = packed(attention(groups), [tokens]) if ranks == 1 else shares(monkeypatch, [tokens], groups, ranks)
        saved = []

        def keep(x, saved=saved):
            saved.append(x)
            return x

        with Operations() as operations, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            run(call, tensors(tokens, groups))
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operations.names
        assert not {"aten::bmm", "aten::_scaled_dot_product_attention_math"} & set(operations.names)
        largest[tokens], kept[tokens] = operations.largest, sum(x.numel() for x in saved)
    print(largest, kept)
    for found in (largest, kept):
        assert found[8192] <= 2 * found[4096]
        assert found[8192] < 8192**2 / 4


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 128])
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("kind", [CAUSAL, FULL])
def test_attention_on_gpu_matches_softmax_reference(groups, kind, dim):
    lengths, module = [136, 8, 512, 512, 40], attention(groups, dim=dim)
    parts = tensors(sum(lengths), groups, dim, device="cuda", dtype=torch.bfloat16)
    expected = run(plain(lengths, kind == CAUSAL, module.scale), [x.float() for x in parts])
    with Operations() as operations:
        found = run(packed(module, lengths, kind, "cuda"), parts)
    assert operations.names.count("torch_attn::_varlen_attn") == (core_attention.varlen_attn is not None)
    for a, b in zip(found, expected, strict=True):
        assert worst([a], [b]) <= 2e-2 * float(b.abs().max())  # not measured: no GPU was at hand


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_attention_with_cp_on_gpu_matches_softmax_reference(monkeypatch, ranks, dtype, limit):
    lengths, dim = [136, 8, 512, 512, 40], 64
    parts = tensors(sum(lengths), 2, dim, device="cuda", dtype=dtype)
    expected = run(plain(lengths, True, dim**-0.5), [x.float() for x in parts])
    found = run(shares(monkeypatch, lengths, 2, ranks, "cuda", dim), parts)
    for a, b in zip(found, expected, strict=True):
        assert worst([a], [b]) <= limit * float(b.abs().max())  # not measured: no GPU was at hand


@pytest.mark.gpu
def test_attention_on_gpu_in_float32_memory_is_linear_in_tokens():
    peaks = []
    for tokens in (4096, 8192):
        parts = tensors(tokens, 2, 64, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(packed(attention(2, dim=64), [tokens], device="cuda"), parts)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 2.2 * peaks[0]

"""QSA against loops over queries: the selected blocks, attention to them, gradients, ranks and memory."""

import math
import random
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import SimpleNamespace

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.collectives import gather_stacked
from qwen3vl_bridge.core.layout import SequenceLayout, query_chunks, segment_offsets, token_index
from qwen3vl_bridge.models.common import attention as core_attention
from qwen3vl_bridge.models.common import layer_specs, rope
from qwen3vl_bridge.models.common.attention import (
    SegmentAttention,
    layout_packed_seq_params,
    packed_seq_params,
    physical_layout,
)
from qwen3vl_bridge.models.common.layer_specs import ZeroCenteredRMSNorm
from qwen3vl_bridge.models.common.rope import InterleavedMRoPE
from qwen3vl_bridge.models.qwen4_exp import indexer as indexer_module
from qwen3vl_bridge.models.qwen4_exp import sparse_attention
from qwen3vl_bridge.models.qwen4_exp.indexer import Indexer, TokenBlocks
from qwen3vl_bridge.models.qwen4_exp.sparse_attention import (
    SparseSelfAttention,
    selected_tokens_mask,
    sparse_core_attention,
)

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.core.support import layouts
from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import check, relative
from tests.helpers.ranks import largest, leave_groups

HIDDEN, HEADS, GROUPS, DIM, ROTATED = 32, 4, 2, 16, 8
INDEX_HEADS, INDEX_DIM, RATIO, BUDGET = 8, 12, 4, 16  # eight heads, so that few scores are 0


@dataclass
class Config(TransformerConfig):
    """megatron-core's configuration with the fields of QSA."""

    indexer_n_heads: int = INDEX_HEADS
    indexer_head_dim: int = INDEX_DIM
    indexer_budget: int = BUDGET
    indexer_compress_ratio: int = RATIO


def make_config(**changes) -> Config:
    fields = dict(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=DIM,
        attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm", layernorm_epsilon=1e-6, qk_layernorm=True,
        attention_output_gate=True, add_bias_linear=False, gradient_accumulation_fusion=False, init_method_std=0.3,
        params_dtype=torch.float32, pipeline_dtype=torch.float32,
    )  # fmt: skip
    return Config(**fields | changes)


def one_rank() -> SimpleNamespace:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    return SimpleNamespace(tp=alone, cp=alone)


@pytest.fixture(autouse=True)
def single_process(monkeypatch):
    """Gather without process groups, unless a test has them."""
    if not dist.is_initialized():
        monkeypatch.setattr(indexer_module, "gather_stacked", lambda local, group: local[None])


def random_layout(seed: int, multiple: int = 1) -> SequenceLayout:
    """Return padded rows for even seeds, else a packed row, with lengths below, at and above the budget."""
    choose = random.Random(seed)
    if seed % 2 == 0:
        rows, length = choose.randint(1, 3), choose.choice([BUDGET, BUDGET + 1, 40, 67])
        length = -(-length // multiple) * multiple
        return SequenceLayout.padded_rows([choose.randint(1, length) for _ in range(rows)], length)
    lengths = [1, 2, 3, RATIO, BUDGET - 1, BUDGET, BUDGET + 1, choose.randint(18, 90), choose.randint(40, 60)]
    choose.shuffle(lengths)
    return SequenceLayout.packed_row([*lengths[: choose.randint(2, 9)], choose.randint(18, 90)], multiple=multiple)


def segments(layout: SequenceLayout) -> list[tuple[int, int]]:
    return list(pairwise(accumulate(layout.padded_lengths, initial=0)))


def rotation_of(layout: SequenceLayout, dtype: torch.dtype = torch.float32, index: Tensor | None = None) -> Tensor:
    """Return the rotations [2, s, b, 1, r] of positions that differ between the three axes."""
    place = segment_offsets(layout.cu_seqlens_padded.diff(), layout.total)
    positions = torch.stack((place, place // 3, 2 * place))
    index = token_index(layout, 1, 0) if index is None else index
    return InterleavedMRoPE(ROTATED, 100.0, [2, 1, 1], dtype)(positions[:, index.T])


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first dimensions of x [..., d] by cosines and sines [r]."""
    first, second = x[..., :ROTATED].chunk(2, -1)
    return torch.cat((x[..., :ROTATED] * cos + torch.cat((-second, first), -1) * sin, x[..., ROTATED:]), -1)


def expected_selection(module: Indexer, hidden: Tensor, rotary: Tensor, layout: SequenceLayout) -> list[set[int]]:
    """Return the selected blocks of each token of the flat batch; hidden is [s, b, h] of one process."""
    flat = hidden.transpose(0, 1).flatten(0, 1)
    cos, sin = (x.transpose(0, 1).reshape(layout.total, -1) for x in rotary)
    projected = module.index_qk_proj(flat).unflatten(-1, (-1, INDEX_DIM))
    norms = [F.rms_norm(projected, (INDEX_DIM,), 1 + n.weight, 1e-6) for n in (module.q_layernorm, module.k_layernorm)]
    found, first_block = [], 0
    for start, stop in segments(layout):
        for t in range(start, stop):
            query, scores = turn(norms[0][t, :-1], cos[t], sin[t]), []
            for begin in range(start, t + 2 - RATIO, RATIO):
                pooled = projected[begin : begin + RATIO, -1].mean(0)
                key = F.rms_norm(pooled, (INDEX_DIM,), 1 + module.k_layernorm.weight, 1e-6)
                scores.append((query @ turn(key, cos[begin], sin[begin])).relu().sum() / math.sqrt(INDEX_DIM))
            best = sorted(range(len(scores)), key=lambda block, scores=scores: -scores[block])[: BUDGET // RATIO]
            found.append({first_block + block for block in best})
        first_block += -(-(stop - start) // RATIO)
    return found


def expected_mask(chosen: list[set[int]], layout: SequenceLayout) -> Tensor:
    """Return the tokens [T, T] that each token attends to."""
    mask, first_block = torch.zeros(layout.total, layout.total, dtype=torch.bool), 0
    for start, stop in segments(layout):
        for t in range(start, stop):
            for block in chosen[t]:
                begin = start + RATIO * (block - first_block)
                mask[t, begin : begin + RATIO] = True
            mask[t, t + 1 - (t + 1 - start) % RATIO : t + 1] = True  # the incomplete block
        first_block += -(-(stop - start) // RATIO)
    return mask


def masked_softmax(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention [T, heads, d]."""
    key, value = (x.repeat_interleave(HEADS // x.size(1), 1) for x in (key, value))
    products = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(DIM)
    return torch.einsum("hqk,khd->qhd", products.masked_fill(~mask, -torch.inf).softmax(-1), value)


def make_indexer(config: Config | None = None, groups: SimpleNamespace | None = None) -> Indexer:
    torch.manual_seed(0)
    module = Indexer(config or make_config(), groups or one_rank())
    for norm in (module.q_layernorm, module.k_layernorm):
        norm.weight.normal_(0, 0.3)
    return module


def hidden_of(layout: SequenceLayout, seed: int = 0) -> Tensor:
    flat = torch.randn(layout.total, HIDDEN, generator=torch.Generator().manual_seed(seed))
    index = token_index(layout, 1, 0)
    return flat[index.flatten()].view(*index.shape, HIDDEN)


def as_sets(selection: Tensor) -> list[set[int]]:
    """Return the blocks of each token, for a selection [s, b, k]; no block is selected twice."""
    rows = [[block for block in row if block >= 0] for row in selection.transpose(0, 1).flatten(0, 1).tolist()]
    assert all(len(row) == len(set(row)) for row in rows)
    return [set(row) for row in rows]


@pytest.fixture(params=[7, 512], ids=lambda size: f"chunks of {size}")
def chunk_size(monkeypatch, request):
    for module in (indexer_module, sparse_attention):
        monkeypatch.setattr(module, "QUERY_CHUNK", request.param)


@given(layouts())
@settings(max_examples=100, deadline=None)
def test_query_chunks_cover_keys_from_segment_start_to_last_query(case):
    layout, cp, sp = case
    ids = layout.segment_ids()
    for cp_rank in range(cp):
        for sp_rank in range(sp):
            tokens = token_index(layout, cp, cp_rank, sp, sp_rank).T.flatten()
            chunks = query_chunks(layout, 5, cp, cp_rank, sp, sp_rank)
            assert torch.equal(torch.cat([tokens[chunk.queries] for chunk in chunks]), tokens)
            for chunk in chunks:
                own = tokens[chunk.queries]
                assert 0 < len(own) <= 5 and chunk.keys.stop == own.max() + 1
                assert chunk.keys.start == layout.cu_seqlens_padded[ids[own[0]]]


@given(layouts())
@settings(max_examples=50, deadline=None)
def test_token_blocks_match_loop_over_segments(case):
    layout, *_ = case
    blocks, expected, starts = TokenBlocks(layout, RATIO), [], []
    for start, stop in segments(layout):
        for token in range(start, stop):
            if (token - start) % RATIO == 0:
                starts.append(token)
            expected.append(len(starts) - 1)
    assert blocks.of_tokens.tolist() == expected and blocks.offsets.tolist() == [*starts, layout.total]
    for start, stop in segments(layout):
        assert blocks.range(slice(start, stop)) == range(expected[start], expected[stop - 1] + 1)


def test_physical_layout_has_padded_lengths_of_segments():
    padded = physical_layout(None, 2, 6, "cpu")
    assert padded == SequenceLayout.padded_rows([6, 6], 6) and padded.cu_seqlens_padded.tolist() == [0, 6, 12]
    packed = SequenceLayout.packed_row([3, 5], multiple=4)
    assert physical_layout(layout_packed_seq_params(packed), 1, 12, "cpu") is packed
    offsets = torch.tensor([0, 4, 12], dtype=torch.int32)
    for params in (
        packed_seq_params(offsets, (4, 8)),
        PackedSeqParams(qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets),
    ):
        found = physical_layout(params, 1, 12, "cpu")
        assert found.padded_lengths == found.lengths == (4, 8) and found.packed
        assert found.cu_seqlens_padded.tolist() == [0, 4, 12]
        with pytest.raises(ValueError, match="packed segments hold 12 tokens, the row has 13"):
            physical_layout(params, 1, 13, "cpu")


@pytest.mark.parametrize("seed", range(8))
def test_indexer_selected_blocks_match_loop_over_queries(chunk_size, seed):
    layout, module = random_layout(seed), make_indexer()
    hidden, rotary = hidden_of(layout, seed).requires_grad_(), rotation_of(layout)
    selection = module(hidden, rotary, layout)
    assert selection.dtype == torch.int32 and not selection.requires_grad
    assert selection.shape == (*hidden.shape[:2], BUDGET // RATIO)
    assert as_sets(selection) == expected_selection(module, hidden, rotary, layout)


def test_indexer_selection_does_not_depend_on_other_segments_or_later_tokens():
    layout, module = SequenceLayout.packed_row([30, 3, 61]), make_indexer()
    hidden, rotary = hidden_of(layout), rotation_of(layout)
    selection = module(hidden, rotary, layout)
    changed = hidden.clone()
    changed[:33], changed[81:] = 5.0, -5.0
    found = module(changed, rotary, layout)
    assert as_sets(selection[33:81]) == as_sets(found[33:81])
    assert as_sets(selection) != as_sets(found)
    alone = SequenceLayout.packed_row([61])
    first_block = 8 + 1  # blocks of the first two segments
    blocks = [{block + first_block for block in row} for row in as_sets(module(hidden[33:], rotary[:, 33:], alone))]
    assert blocks == as_sets(selection[33:])


def test_indexer_in_bfloat16_selects_by_float32_scores_of_rounded_keys():
    """The mean of a block's keys is rounded before the norm, as in transformers."""
    module, layout = make_indexer(make_config(params_dtype=torch.bfloat16)), SequenceLayout.packed_row([50])
    hidden, rotary = hidden_of(layout).bfloat16(), rotation_of(layout, torch.bfloat16)
    projected = module.index_qk_proj(hidden[:, 0]).unflatten(-1, (-1, INDEX_DIM))
    pooled = projected[:48, -1].unflatten(0, (-1, RATIO)).float().mean(1).bfloat16()
    cos, sin = rotary[:, :, 0, 0]
    queries = turn(module.q_layernorm(projected[:, :-1]), cos[:, None], sin[:, None]).float()
    keys = turn(module.k_layernorm(pooled), cos[:48:RATIO], sin[:48:RATIO]).float()
    scores = torch.einsum("qhd,kd->hqk", queries, keys).relu().sum(0)
    found = module(hidden, rotary, layout)
    for t in (19, 30, 49):
        assert as_sets(found)[t] == set(scores[t, : (t + 1) // RATIO].topk(BUDGET // RATIO).indices.tolist())


def test_indexer_parameters_are_frozen_and_have_configured_shapes():
    module = make_indexer(make_config(params_dtype=torch.bfloat16))
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
    assert shapes == {
        "index_qk_proj.weight": ((INDEX_HEADS + 1) * INDEX_DIM, HIDDEN),
        "q_layernorm.weight": (INDEX_DIM,), "k_layernorm.weight": (INDEX_DIM,),
    }  # fmt: skip
    assert all(p.dtype == torch.bfloat16 and not p.requires_grad for p in module.parameters())
    assert 0.25 < module.index_qk_proj.weight.float().std() < 0.35


def core(**changes) -> torch.nn.Module:
    config = make_config(**changes)
    return sparse_core_attention(SegmentAttention)(
        config=config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self", cp_comm_type=None,
        softmax_scale=None, pg_collection=one_rank(),
    )  # fmt: skip


def random_inputs(layout: SequenceLayout, seed: int = 0) -> list[Tensor]:
    """Return query, key, value [T, heads, d] and the gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(layout.total, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS, HEADS)]


def run(call, parts: list[Tensor]) -> dict[str, Tensor]:
    """Return the output of `call(query, key, value)` [T, heads, d] and the gradients."""
    *inputs, gradient = parts
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    output = call(*inputs)
    output.backward(gradient)
    return dict(zip(("output", "query", "key", "value"), (output.detach(), *(x.grad for x in inputs)), strict=True))


def in_rows(module: torch.nn.Module, selection: Tensor, layout: SequenceLayout):
    """Return core attention of [T, heads, d] in the format of padded rows or of a packed row."""
    params = layout_packed_seq_params(layout)
    index = token_index(layout, 1, 0)

    def call(*inputs: Tensor) -> Tensor:
        inputs = inputs if layout.packed else [x[index] for x in inputs]
        output = module(*inputs, selection, attn_mask_type=AttnMaskType.causal, packed_seq_params=params)
        assert output.shape == (*inputs[0].shape[:-2], HEADS * DIM)
        return (output if layout.packed else output.transpose(0, 1).flatten(0, 1)).unflatten(-1, (HEADS, DIM))

    return call


@pytest.mark.parametrize("seed", range(8))
def test_sparse_core_attention_matches_masked_softmax(chunk_size, seed):
    layout, module = random_layout(seed), make_indexer()
    selection = module(hidden_of(layout, seed), rotation_of(layout), layout)
    mask = expected_mask(as_sets(selection), layout)
    parts = random_inputs(layout, seed)
    found = run(in_rows(core(), selection, layout), parts)
    expected = run(lambda *inputs: masked_softmax(*inputs, mask), [x.double() for x in parts])
    check(relative(found, expected), dict.fromkeys(found, 2e-6))  # measured 4.5e-7 of the largest entry


@pytest.mark.parametrize("seed", range(4))
def test_selected_tokens_mask_matches_loop_over_tokens(seed):
    layout, module = random_layout(seed), make_indexer()
    selection = module(hidden_of(layout, seed), rotation_of(layout), layout)
    rows = selection.transpose(0, 1).flatten(0, 1)
    mask = selected_tokens_mask(rows, torch.arange(layout.total), TokenBlocks(layout, RATIO), slice(0, layout.total))
    assert torch.equal(mask, expected_mask(as_sets(selection), layout))
    assert mask.sum(1).max() <= BUDGET + RATIO - 1 and mask.any(1).all()


@pytest.mark.parametrize("packed", [False, True])
def test_sparse_core_attention_up_to_budget_matches_causal_attention(packed):
    """Without a selection the base class computes attention."""
    layout = SequenceLayout.packed_row([16, 7, 12]) if packed else SequenceLayout.padded_rows([16, 9], 16)
    selection = make_indexer()(hidden_of(layout), rotation_of(layout), layout)
    parts = random_inputs(layout)
    found, expected = (run(in_rows(core(), chosen, layout), parts) for chosen in (selection, None))
    check(relative(found, expected), dict.fromkeys(found, 2e-6))  # measured 3.2e-7 of the largest entry


def test_sparse_core_attention_raises_if_dropout_is_active():
    layout, module = SequenceLayout.packed_row([40]), core(attention_dropout=0.1)
    selection = torch.zeros(40, 1, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        run(in_rows(module, selection, layout), random_inputs(layout))
    run(in_rows(module.eval(), selection, layout), random_inputs(layout))


class Operations(TorchDispatchMode):
    """Names of the operations and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        self.names.append(operation.name())
        for x in made if isinstance(made, tuple | list) else (made,):
            self.largest = max(self.largest, x.numel() if isinstance(x, Tensor) else 0)
        return made


def test_sparse_attention_memory_is_linear_in_tokens(monkeypatch):
    """Compare saved tensors and the largest tensor of a forward and backward pass."""
    for module in (indexer_module, sparse_attention):
        monkeypatch.setattr(module, "QUERY_CHUNK", 32)
    saved, largest_tensor = {}, {}
    for tokens in (512, 2048):
        layout, kept = SequenceLayout.packed_row([tokens]), {}
        *inputs, gradient = random_inputs(layout)

        def keep(x, kept=kept):
            kept[x.data_ptr()] = x.nbytes
            return x

        with Operations() as operations:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                selection = make_indexer()(hidden_of(layout), rotation_of(layout), layout)
                output = in_rows(core(), selection, layout)(*(x.requires_grad_() for x in inputs))
            output.backward(gradient)
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operations.names
        assert not {"aten::_scaled_dot_product_attention_math", "aten::_softmax"} & set(operations.names)
        saved[tokens], largest_tensor[tokens] = sum(kept.values()), operations.largest
    print(saved, largest_tensor)
    assert saved[2048] == 4 * saved[512]
    assert largest_tensor[2048] <= 4 * largest_tensor[512] < 2048**2 / 4


def test_sparse_attention_with_masks_on_cuda_does_not_synchronize(monkeypatch):
    """Fake tensors have no values, so that reading one raises. The kernel for masks needs equal numbers of heads.

    Masks are used on a GPU if the size of heads is no power of two.
    """
    lengths, calls = (17, 900, 20, 1400), []

    def record(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor, **_) -> Tensor:
        assert query.size(1) == key.size(1) == value.size(1) and attn_mask.stride(-1) == 1
        calls.append((query.size(2), key.size(2)))
        return query

    monkeypatch.setattr(core_attention, "_sdpa", record)
    monkeypatch.setattr(rope, "call_compiled", lambda function, *inputs: function(*inputs))
    monkeypatch.setattr(layer_specs, "call_compiled", lambda function, *inputs, others: function(*inputs, *others))
    with FakeTensorMode(), Operations() as operations, torch.device("cuda"):
        offsets = torch.empty(len(lengths) + 1, dtype=torch.int32)
        layout = SequenceLayout(offsets, offsets, 1, lengths, lengths)
        hidden, rotary = torch.empty(layout.total, 1, HIDDEN), torch.empty(2, layout.total, 1, 1, ROTATED)
        selection = make_indexer()(hidden, rotary, layout)
        inputs = [torch.empty(layout.total, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, GROUPS, GROUPS)]
        module = core()
        module.has_kernels = False
        output = in_rows(module, selection, layout)(*inputs)
        assert output.shape == (layout.total, HEADS, DIM) and output.is_cuda
    assert calls == [(512, 512), (512, 1007), (512, 599), (512, 1111), (289, 1400)]
    assert operations.largest <= 512 * INDEX_HEADS * 350


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_sparse_attention_on_gpu_matches_masked_softmax_without_synchronizing(dtype, limit):
    layout = SequenceLayout.packed_row([700, 3, 16, 1100])
    selection = make_indexer()(hidden_of(layout), rotation_of(layout), layout)
    mask = expected_mask(as_sets(selection), layout).cuda()
    on_gpu, parts = layout.to("cuda"), [x.to("cuda", dtype) for x in random_inputs(layout)]
    with torch.device("cuda"):
        module, indexer = core(), make_indexer()
        arguments = torch.ones(layout.total, 1, HIDDEN), torch.ones(2, layout.total, 1, 1, ROTATED), on_gpu
    call = in_rows(module, selection.cuda(), on_gpu)
    indexer(*arguments)  # compiles functions
    torch.cuda.set_sync_debug_mode("error")
    try:
        indexer(*arguments)
        found = run(call, parts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = run(lambda *inputs: masked_softmax(*inputs, mask), [x.double() for x in parts])
    check(relative(found, expected), dict.fromkeys(found, limit))  # not measured: no GPU was at hand


def rotated_as_angles(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [t, 1, heads, d] by angles [t, 1, 1, r], as Transformer Engine's kernel does."""
    return turn(x, angles.cos(), angles.sin())


def test_indexer_selects_same_blocks_with_fused_rotation_angles(monkeypatch):
    from megatron.core.models.common.embeddings import rope_utils

    monkeypatch.setattr(rope_utils, "fused_apply_rotary_pos_emb", rotated_as_angles, raising=False)
    for layout in (SequenceLayout.padded_rows([40, 37], 40), SequenceLayout.packed_row([30, 21])):
        module, hidden, rotary = make_indexer(), hidden_of(layout), rotation_of(layout)
        angles = torch.atan2(rotary[1], rotary[0]).flatten(0, 1)[:, None]
        assert angles.shape == (layout.total, 1, 1, ROTATED)
        assert as_sets(module(hidden, angles, layout)) == as_sets(module(hidden, rotary, layout))


def make_attention(config: Config, groups: ProcessGroupCollection) -> SparseSelfAttention:
    """Return attention with the same weights on all ranks, divided over tensor-parallel ranks."""
    layers = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=sparse_core_attention(SegmentAttention),
        linear_proj=RowParallelLinear, q_layernorm=ZeroCenteredRMSNorm, k_layernorm=ZeroCenteredRMSNorm,
    )  # fmt: skip
    module = SparseSelfAttention(
        config, layers, layer_number=1, attn_mask_type=AttnMaskType.causal, pg_collection=groups
    )
    generator, size, rank = torch.Generator().manual_seed(1), groups.tp.size(), groups.tp.rank()
    split = {"linear_qkv.weight": 0, "linear_proj.weight": 1}
    for name, parameter in module.named_parameters():
        shape = list(parameter.shape)
        if (dim := split.get(name)) is not None:
            shape[dim] *= size
        full = torch.randn(shape, generator=generator) * 0.3
        parameter.data.copy_(full if dim is None else full.chunk(size, dim)[rank])
    return module


def set_up(**sizes: int) -> ProcessGroupCollection:
    """Make process groups of the default group, or of this process alone."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])


def attend(module: SparseSelfAttention, layout: SequenceLayout, sizes: list[int], recompute: bool = False):
    """Return selection, output and gradients of the input and of the weights for this rank's tokens."""
    index, local = token_index(layout, *sizes[:2]), token_index(layout, *sizes)
    hidden = hidden_of(layout, 3).transpose(0, 1).flatten(0, 1)[local].requires_grad_()
    gradient = hidden_of(layout, 4).transpose(0, 1).flatten(0, 1)[local]
    rotary, params = rotation_of(layout, index=index), layout_packed_seq_params(layout)

    def call(x: Tensor) -> Tensor:
        return module(x, None, rotary_pos_emb=rotary, packed_seq_params=params)[0]

    module.zero_grad()
    output = tensor_parallel.checkpoint(call, False, hidden) if recompute else call(hidden)
    output.backward(gradient)
    weights = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
    selection = module.indexer(hidden, rotary, layout)
    return selection, dict(output=output.detach(), input=hidden.grad), weights


@pytest.fixture
def groups():
    made = set_up()
    yield made
    leave_groups()
    dist.destroy_process_group()


LAYOUTS = (SequenceLayout.packed_row([37, 3, 1, 90, 16], multiple=16), SequenceLayout.padded_rows([50, 64, 31], 64))


def test_sparse_self_attention_with_recomputation_matches_stored_activations(groups):
    stored = make_attention(make_config(), groups)
    core_recomputed = make_attention(
        make_config(recompute_granularity="selective", recompute_modules=["core_attn"]), groups
    )
    assert core_recomputed.checkpoint_core_attention
    for layout in LAYOUTS:
        _, *expected = attend(stored, layout, [1, 0])
        for module, recompute in ((stored, True), (core_recomputed, False)):
            _, *found = attend(module, layout, [1, 0], recompute)
            for a, b in zip(found, expected, strict=True):
                assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_sparse_self_attention_runs_indexer_only_above_budget(groups, monkeypatch):
    module, calls = make_attention(make_config(), groups), []
    module.indexer.register_forward_hook(lambda *_: calls.append(1))
    for length, expected in ((BUDGET, 0), (BUDGET + 1, 1)):
        calls.clear()
        layout = SequenceLayout.padded_rows([length, 3], length)
        module(hidden_of(layout), None, rotary_pos_emb=rotation_of(layout))
        assert len(calls) == expected
    with pytest.raises(ValueError, match="attention_mask must be None"):
        module(hidden_of(layout), torch.ones(1), rotary_pos_emb=rotation_of(layout))


def test_sparse_self_attention_matches_masked_softmax_of_its_projections(groups):
    """The reference selects blocks too."""
    module = make_attention(make_config(attention_output_gate=False), groups)
    for layout in LAYOUTS:
        hidden, rotary = hidden_of(layout), rotation_of(layout)
        mask = expected_mask(expected_selection(module.indexer, hidden, rotary, layout), layout)
        inputs = module.get_query_key_value_tensors(hidden, rotary)
        query, key, value = (x.transpose(0, 1).flatten(0, 1).double() for x in inputs)
        expected = masked_softmax(query, key, value, mask).flatten(1) @ module.linear_proj.weight.double().T
        found = module(
            hidden, None, rotary_pos_emb=rotary, packed_seq_params=layout_packed_seq_params(layout)
        )[0]  # fmt: skip
        found = found.transpose(0, 1).flatten(0, 1)
        errors = relative(dict(output=found.detach()), dict(output=expected.detach()))
        check(errors, dict(output=1e-6))  # measured 1.9e-7 of the largest entry


def compare_with_one_process(sizes: dict[str, int]) -> dict[str, float]:
    """Return differences of this rank to one process that computes the whole batch."""
    groups = set_up(**sizes)
    tp, cp = groups.tp, groups.cp
    one = SimpleNamespace(tp=dist.new_group([dist.get_rank()], use_local_synchronization=True))
    one.cp = one.tp
    sharded = make_attention(
        make_config(
            tensor_model_parallel_size=tp.size(), context_parallel_size=cp.size(), sequence_parallel=tp.size() > 1
        ),
        groups,
    )
    complete = make_attention(make_config(), one)
    errors = dict(selection=0.0, output=0.0, input=0.0, qkv=0.0)
    for layout in LAYOUTS:
        expected_blocks, expected, expected_weights = attend(complete, layout, [1, 0])
        places = [cp.size(), cp.rank(), tp.size(), tp.rank()]
        blocks, found, weights = attend(sharded, layout, places)
        index = token_index(layout, *places[:2])
        chosen = as_sets(expected_blocks)
        differing = sum(a != chosen[t] for a, t in zip(as_sets(blocks), index.T.flatten(), strict=True))
        errors["selection"] = max(errors["selection"], float(differing))
        local = token_index(layout, *places)
        expected = {name: x.transpose(0, 1).flatten(0, 1)[local] for name, x in expected.items()}
        found["qkv"] = gather_stacked(weights["linear_qkv.weight"], cp).sum(0)
        expected["qkv"] = expected_weights["linear_qkv.weight"].chunk(tp.size())[tp.rank()]
        errors = {name: max(error, relative(found, expected).get(name, error)) for name, error in errors.items()}
    leave_groups()
    return largest(errors)


def compare_all(cases: list[dict[str, int]]) -> list[dict[str, float]]:
    dist.init_process_group("gloo")
    return [compare_with_one_process(sizes) for sizes in cases]


CP2, CP4 = (dict(context_parallel_size=size) for size in (2, 4))
TP2 = dict(tensor_model_parallel_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, [CP2, TP2]), pytest.param(4, [CP4, TP2 | CP2], marks=pytest.mark.slow)]
)
def test_sparse_self_attention_on_ranks_matches_one_process(ranks, cases):
    """Context parallelism, and tensor parallelism with sequence parallelism."""
    for errors in results_of_ranks(compare_all, ranks, cases):
        # Measured 5.9e-7 of the largest entry.
        check(errors, dict(selection=0.0, output=3e-6, input=3e-6, qkv=3e-6))

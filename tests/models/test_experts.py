"""Grouped experts against megatron-core's SequentialMLP, and metrics of MoE layers."""

import itertools
from itertools import accumulate
from types import SimpleNamespace

from qwen3vl_bridge.models.common.moe import (
    EXPERT_LINEARS,
    GroupedExperts,
    GroupedProduct,
    reset_stale_moe_metrics,
    stack_weights,
)
from qwen3vl_bridge.models.qwen3_vl.provider import Qwen3VLMoEModelProvider

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker, get_moe_metrics_tracker

from tests.parity.conftest import make_pair
from tests.parity.on_ranks import Split
from tests.parity.topologies import Topology


@given(
    counts=st.lists(st.integers(0, 5), min_size=2, max_size=6).filter(any),
    frozen=st.sets(st.integers(0, 5)),
    order=st.sampled_from(["ascending", "descending", "mixed", "apart"]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_grouped_product_matches_product_per_expert(counts, frozen, order, seed):
    """Including experts without tokens, frozen weights, and weights at separate places in memory."""
    torch.manual_seed(seed)
    place = torch.randn(len(counts), 8, 12)
    places = {"descending": torch.arange(len(counts)).flip(0), "mixed": torch.randperm(len(counts))}
    weights = [place[i] for i in places.get(order, range(len(counts)))]
    weights = [weight.clone() for weight in weights] if order == "apart" else weights
    weights = [weight.requires_grad_(i not in frozen) for i, weight in enumerate(weights)]
    x, gradient = torch.randn(sum(counts), 12, requires_grad=True), torch.randn(sum(counts), 8)
    ends = torch.tensor([*accumulate(counts)], dtype=torch.int32)
    inputs = [x, *(weight for weight in weights if weight.requires_grad)]
    product = GroupedProduct.apply(x, ends, *weights)
    found = torch.autograd.grad(product, inputs, gradient)
    each = [part @ weight.T for part, weight in zip(x.split(counts), weights, strict=True)]
    expected = torch.autograd.grad(torch.cat(each), inputs, gradient, materialize_grads=True)
    torch.testing.assert_close(product, torch.cat(each))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("frozen", [False, True])
def test_grouped_product_saves_no_input_if_weights_are_frozen(frozen):
    kept = []
    x, weights = torch.randn(4, 12, requires_grad=True), [torch.randn(8, 12, requires_grad=not frozen) for _ in "ab"]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.shape) or tensor, lambda x: x):
        GroupedProduct.apply(x, torch.tensor([1, 4], dtype=torch.int32), *weights)
    assert (x.shape in kept) == (not frozen)


@pytest.fixture
def layer(moe_folder) -> GroupedExperts:
    (first, *_) = layers_with_experts(make_pair(moe_folder).megatron)
    return first


def layers_with_experts(model) -> list[GroupedExperts]:
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def results(layer, counts, dtype=torch.float32, forward=GroupedExperts.grouped_forward) -> list[torch.Tensor]:
    """Return outputs, and gradients of tokens, scores and weights."""
    torch.manual_seed(4)
    x = torch.randn(sum(counts), layer.config.hidden_size, dtype=dtype, requires_grad=True)
    scores = torch.rand(sum(counts), requires_grad=True)
    layer.zero_grad()
    out, bias = forward(layer, x, torch.tensor(counts), scores)
    assert bias is None
    out.backward(torch.randn_like(out))
    return [out, *(tensor.grad for tensor in (x, scores, *layer.parameters()))]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_experts_match_sequential_mlp(layer, fused, dtype, monkeypatch):
    layer.to(dtype).config.bias_activation_fusion = fused
    counts = [3, 0, 7, *[2] * (layer.num_local_experts - 3)]
    expected = results(layer, counts, dtype, SequentialMLP.forward)
    monkeypatch.setattr(SequentialMLP, "forward", lambda *_: pytest.fail("one after the other"))
    for one, other in zip(results(layer, counts, dtype), expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("part", ["", "linear_fc1", "linear_fc2"])
@pytest.mark.parametrize("when", ["register_forward_hook", "register_forward_pre_hook"])
def test_hook_on_expert_gets_only_tokens_of_that_expert(layer, part, when):
    sizes, counts = [], [5, 3, *[2] * (layer.num_local_experts - 2)]
    getattr(layer.local_experts[1].get_submodule(part), when)(lambda _, args, *__: sizes.append(len(args[0])))
    results(layer, counts)
    assert sizes == [3]


def test_grouped_experts_with_fused_weight_gradients_run_sequentially(layer, monkeypatch):
    for expert in layer.local_experts:
        expert.linear_fc2.gradient_accumulation_fusion = True
    monkeypatch.setattr(SequentialMLP, "forward", lambda *_: "one after the other")
    assert layer(torch.randn(1, 4), torch.tensor([1]), torch.rand(1)) == "one after the other"


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("change", "grouped"),
    [
        ({}, True), (dict(generation=8), False), (dict(generation=10), False), (dict(dtype=torch.float16), False),
        (dict(dtype=torch.float32), False), (dict(cuda=False), True), (dict(cuda=False, dtype=torch.float32), True),
        (dict(cuda=False, dtype=torch.float64), False), (dict(counts_on_gpu=True), False),
        (dict(weights=torch.float32), False),
        (dict(moe_apply_probs_on_input=True), False), (dict(num_local_experts=1), False), (dict(columns=36), False),
    ],
)  # fmt: skip
def test_experts_are_grouped_only_for_supported_device_dtype_and_sizes(layer, monkeypatch, change, grouped):
    """Grouped in bfloat16 on a Hopper GPU; the tokens only claim to be on a GPU."""
    dtype = change.get("dtype", torch.bfloat16)
    layer.to(change.get("weights", dtype))
    for expert in layer.local_experts if "columns" in change else ():
        expert.linear_fc2.weight.data = torch.zeros(layer.config.hidden_size, change["columns"], dtype=dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (change.get("generation", 9), 0))
    monkeypatch.setattr(layer.config, "moe_apply_probs_on_input", change.get("moe_apply_probs_on_input", False))
    layer.num_local_experts = change.get("num_local_experts", layer.num_local_experts)
    device = torch.device("cpu")
    x = SimpleNamespace(
        dtype=dtype, is_cuda=change.get("cuda", True), device=device, element_size=lambda: dtype.itemsize
    )
    assert layer._can_group(x, SimpleNamespace(is_cuda=change.get("counts_on_gpu", False))) == grouped


def test_experts_with_bias_or_autocast_are_not_grouped(layer):
    x, counts = torch.randn(8, layer.config.hidden_size), torch.ones(8)
    with torch.autocast("cpu", torch.bfloat16):
        assert not layer._can_group(x, counts)
    assert layer._can_group(x, counts)
    layer.local_experts[0].linear_fc1.bias = torch.nn.Parameter(torch.zeros(8))
    assert not layer._can_group(x, counts)


def test_grouped_experts_without_tokens_give_zero_gradients(layer, monkeypatch):
    monkeypatch.setattr(SequentialMLP, "forward", lambda *_: pytest.fail("one after the other"))
    out, *gradients = results(layer, [0] * layer.num_local_experts)
    assert len(out) == 0 and all(gradient is not None and not gradient.any() for gradient in gradients)


@pytest.mark.parametrize("frozen", [0, 1])
def test_grouped_experts_gradients_arrive_in_same_order_for_any_tokens(layer, frozen):
    """`overlap_grad_reduce` reduces gradients in this order, which must be equal on all ranks."""
    order: list[str] = []
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(f".{frozen}." not in name)
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    orders = []
    for counts in (
        [0] * layer.num_local_experts,
        [5] + [0] * (layer.num_local_experts - 1),
        [1] * layer.num_local_experts,
    ):
        order.clear()
        results(layer, counts)
        orders.append([*order])
    assert len(order) == len(EXPERT_LINEARS) * (layer.num_local_experts - 1) and orders[1:] == orders[:-1]


def assert_together(layer) -> None:
    """Check that weights are one view in the order of experts."""
    for kind in EXPERT_LINEARS:
        weights = [getattr(expert, kind).weight for expert in layer.local_experts]
        assert stack_weights(weights).data_ptr() == weights[0].data_ptr()
        torch.testing.assert_close(stack_weights(weights), torch.stack(weights), rtol=0, atol=0)


def test_grouped_experts_weights_are_contiguous_in_memory(layer):
    assert_together(layer)


def test_expert_list_iterates_in_order_of_index(layer):
    numbered = [layer.local_experts[i] for i in range(layer.num_local_experts)]
    assert [*layer.local_experts] == numbered and [*layer.local_experts[1:3]] == numbered[1:3]


def test_grouped_experts_class_inherits_forward_of_sequential_mlp(layer):
    """ModelOpt compares the `forward` of the class."""
    assert GroupedExperts.forward is SequentialMLP.forward and layer.forward == layer.grouped_forward


def test_expert_weights_stay_contiguous_in_distributed_optimizer_buffer(moe_folder):
    split = Split(str(moe_folder), Topology(1, distributed_optimizer=True))
    for layer in layers_with_experts(split.run.model[0]):
        assert_together(layer)


@pytest.mark.parametrize("grouped", [True, False])
def test_overlap_param_gather_dispatches_buckets_in_order_of_use(moe_folder, monkeypatch, grouped):
    """With `overlap_param_gather` and buckets of one weight. megatron-core warns about a gather out of order."""
    folds = dict(ddp__overlap_param_gather=True, ddp__overlap_grad_reduce=True, ddp__bucket_size=3000)
    split = Split(str(moe_folder), Topology(1, distributed_optimizer=True), **folds)
    waited = []
    group = param_and_grad_buffer._ParamAndGradBucketGroup
    monkeypatch.setattr(group, "finish_param_sync", lambda bucket, **_: waited.append(bucket))
    (first, *_) = layers_with_experts(split.run.model[0])
    if not grouped:
        monkeypatch.setattr(GroupedExperts, "_can_group", lambda *_: False)
    counts = torch.ones(first.num_local_experts, dtype=torch.long)
    first(torch.randn(len(counts), first.config.hidden_size), counts, torch.rand(len(counts)))
    distinct = list(dict.fromkeys(waited))
    assert len(distinct) > 6
    for bucket, following in itertools.pairwise(distinct):
        assert bucket.next_param_gather_bucket_group is following


def test_reset_stale_moe_metrics_resizes_tracker_if_number_of_layers_changes():
    """An actor and a critic share one tracker, which is emptied when they alternate."""
    tracker = get_moe_metrics_tracker
    shallow, deep = (Qwen3VLMoEModelProvider(num_layers=layers) for layers in (2, 4))
    for config in (shallow, deep, shallow):
        reset_stale_moe_metrics(config)
        tracker().record("z_loss", torch.ones(()), config.num_layers, config.num_layers)
        before = tracker()
        reset_stale_moe_metrics(config)
        assert tracker() is before and len(before.metrics["z_loss"].values) == config.num_layers
    destroy_moe_metrics_tracker()

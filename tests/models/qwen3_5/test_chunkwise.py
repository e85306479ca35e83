"""Linear attention with chunk-wise context parallelism against one rank with all tokens."""

import copy
import random
from collections.abc import Iterator

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.core.layout import SequenceLayout, token_index
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.models.common.linear_attention import LinearAttention, linear_attention_spec

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import build_module
from torch import Tensor

from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.tiny import megatron_config, perturb

# Relative to the largest entry of the same tensor. Measured: at most 2.8e-6.
TOLERANCE = 1e-5
# Gradients of one number per head are sums over all tokens, of which most cancel. Measured: at most 1.7e-5.
OF_HEADS, TOLERANCE_OF_HEADS = ("A_log", "dt_bias"), 1e-4
HEADS = dict(linear_num_key_heads=1, linear_num_value_heads=3)  # which no number of ranks divides
CASES = 12


def random_layouts(ranks: int, seed: int) -> Iterator[SequenceLayout]:
    """Yield packed rows with documents from one token, and padded rows; every chunk may be shorter than 3 tokens."""
    draw = random.Random(seed)
    for case in range(CASES):
        longest = draw.choice([2 * ranks, 10 * ranks, 200 * ranks])
        lengths = [draw.randint(1, longest) for _ in range(draw.randint(1, 4))]
        if case % 3:
            yield SequenceLayout.packed_row(lengths, multiple=2 * ranks, total=None)
        else:
            yield SequenceLayout.padded_rows(lengths, -(-max(lengths) // (2 * ranks)) * 2 * ranks)


def build_on_ranks(mode: str, heads: dict[str, int] = HEADS) -> tuple[LinearAttention, LinearAttention]:
    """Return two equal layers: one whose context-parallel group has all ranks, and one without context parallelism."""
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    alone = copy.copy(groups)
    alone.cp = alone.tp
    layers, config = [], megatron_config(**heads)
    config.linear_cp_mode = mode
    for collection in (groups, alone):
        module = build_module(linear_attention_spec(config), config=config, layer_number=1, pg_collection=collection)
        layers.append(perturb(module))
    return layers[0], layers[1]


def run(module: LinearAttention, hidden: Tensor, weight: Tensor, layout: SequenceLayout) -> dict[str, Tensor]:
    """Return output and gradients of (output * weight).sum() for hidden states [s, b, h]."""
    module.zero_grad()
    hidden = hidden.clone().requires_grad_()
    output, _ = module(hidden, None, packed_seq_params=layout_packed_seq_params(layout))
    (output * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    return dict(output=output.detach(), input=hidden.grad) | gradients


def errors_on_ranks(seed: int) -> list[dict[str, float]]:
    """Return the errors of each random layout, relative to the largest entry of each tensor."""
    (module, reference), found = build_on_ranks("chunkwise"), []
    random = torch.Generator().manual_seed(seed)
    for layout in random_layouts(dist.get_world_size(), seed):
        shape = (layout.total, module.config.hidden_size)
        hidden, weight = (torch.randn(*shape, generator=random) for _ in range(2))
        index = token_index(layout, dist.get_world_size(), dist.get_rank())
        rows = [x.unflatten(0, (layout.num_rows, -1)).transpose(0, 1) for x in (hidden, weight)]
        expected = run(reference, *rows, layout)
        ours = run(module, hidden[index], weight[index], layout)
        for name in ("output", "input"):
            expected[name] = expected[name].transpose(0, 1).flatten(0, 1)[index]
        for name in expected.keys() - {"output", "input"}:
            dist.all_reduce(ours[name])
        found.append({name: relative(ours[name], expected[name]) for name in expected})
    return found


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_linear_attention_chunkwise_cp_matches_one_rank(ranks):
    found = results_of_ranks(errors_on_ranks, ranks, ranks)
    worst = {name: max(errors[name] for errors in found) for name in found[0]}
    print(worst)
    assert len(found) == CASES
    assert all(error < (TOLERANCE_OF_HEADS if name in OF_HEADS else TOLERANCE) for name, error in worst.items())

"""Bytes that context-parallel ranks send for linear attention: the formula against what a layer sends on gloo."""

from typing import Any

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.config.divisibility import CHUNKWISE, HEADWISE
from qwen3vl_bridge.core.layout import SequenceLayout
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params
from qwen3vl_bridge.planning.linear_traffic import bytes_sent
from qwen3vl_bridge.planning.parallel_layout import ParallelLayout

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.test_chunkwise import build_on_ranks
from tests.models.qwen3_5.tiny import LINEAR

LENGTHS = [16, 40, 8]  # three documents, whose parts are multiples of the chunks of two ranks
KEY, VALUE = (LINEAR[f"linear_num_{x}_heads"] * LINEAR[f"linear_{x}_head_dim"] for x in ("key", "value"))
DIMS = dict(
    l_value_heads=LINEAR["linear_num_value_heads"], l_qkv=2 * KEY + VALUE, l_value=VALUE,
    l_key_dim=LINEAR["linear_key_head_dim"], l_value_dim=LINEAR["linear_value_head_dim"],
    l_conv=LINEAR["linear_conv_kernel_dim"],
)  # fmt: skip


class CountSent(TorchDispatchMode):
    """Count the bytes that this rank sends to others in all-to-alls."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.c10d.alltoall_base_.default:
            given, sizes = args[1], args[4]
            parts = list(given.split(sizes) if sizes else given.chunk(dist.get_world_size()))
            del parts[dist.get_rank()]
            self.sent += sum(x.nbytes for x in parts)
        return function(*args, **kwargs or {})


def sent_in_forward_and_backward(mode: str) -> list[int]:
    """Return the bytes that this rank sends to others in the forward and in the backward pass of a layer."""
    module, _ = build_on_ranks(mode, LINEAR)
    hidden = torch.randn(sum(LENGTHS) // 2, 1, module.config.hidden_size, requires_grad=True)
    with CountSent() as counter:
        output, _ = module(hidden, None, packed_seq_params=layout_packed_seq_params(SequenceLayout.packed_row(LENGTHS)))
        forward = counter.sent
        output.sum().backward()
    return [forward, counter.sent - forward]


@pytest.mark.parametrize("mode", [HEADWISE, CHUNKWISE])
def test_bytes_sent_estimate_equals_counted_bytes_of_collectives(mode):
    forward, backward = results_of_ranks(sent_in_forward_and_backward, 2, mode)
    dims: Any = DIMS
    planned = bytes_sent(
        dims, ParallelLayout(2, cp=2), mode, tokens=sum(LENGTHS) / 2, segments=len(LENGTHS), element_bytes=4
    )
    assert forward == backward == planned


def test_chunkwise_cp_sends_fewer_bytes_than_headwise_for_long_document():
    """A document of 256K tokens of the 9B on 16 ranks."""
    dims: Any = dict(l_value_heads=32, l_qkv=8192, l_value=4096, l_key_dim=128, l_value_dim=128, l_conv=4)
    layout, tokens = ParallelLayout(16, cp=16), 262_144 / 16
    heads, states = (bytes_sent(dims, layout, mode, tokens=tokens, segments=1) for mode in (HEADWISE, CHUNKWISE))
    assert round(heads / 1e6) == 505 and round(states / 1e6, 1) == 12.0

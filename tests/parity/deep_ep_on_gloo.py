"""A substitute for the package deep_ep, which needs GPUs, written with torch.distributed after its documentation.

DeepEP sends a token once to each rank that has some of its experts, and sums the results; Megatron applies the weights.
HybridEP sends and sorts a token once for each expert. Source: DeepEP's README, and `Buffer` and `HybridEPBuffer`.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def install() -> None:
    """Make Megatron's dispatchers of the type "flex" use the substitute."""
    package, utils = ModuleType("deep_ep"), ModuleType("deep_ep.utils")
    package.Buffer, package.HybridEPBuffer = Buffer, HybridEPBuffer
    utils.EventHandle = utils.EventOverlap = lambda *_: None
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    importlib.reload(fused_a2a)
    for name in ("fused_dispatch", "fused_combine", "set_deepep_num_sms", "hybrid_ep_dispatch", "hybrid_ep_combine"):
        setattr(token_dispatcher, name, getattr(fused_a2a, name))


class _Exchange:
    """Exchange of rows between ranks, and back."""

    def __init__(self, rows: list[Tensor], total: int, group: Any) -> None:
        """Store `rows`: for each rank, the rows of this rank's `total` rows that it gets, possibly several times."""
        self.index, self.total, self.group = torch.cat(rows), total, group
        self.sent = [len(each) for each in rows]
        counts = torch.tensor(self.sent)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        self.received = received.tolist()

    def there(self, x: Tensor) -> Tensor:
        return self.send(x[self.index])

    def send(self, x: Tensor) -> Tensor:
        """Send rows in the order of `index`."""
        out = x.new_empty(sum(self.received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), self.received, self.sent, group=self.group)
        return out

    def back(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(self.index), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), self.sent, self.received, group=self.group)
        return out

    def summed(self, x: Tensor) -> Tensor:
        back = self.back(x)
        return x.new_zeros(self.total, *x.shape[1:]).index_add_(0, self.index, back)


_WAITED = SimpleNamespace(current_stream_wait=lambda: None)
_SIZES = SimpleNamespace(get_nvl_buffer_size_hint=lambda *_: 0, get_rdma_buffer_size_hint=lambda *_: 0)


class Buffer:
    """DeepEP."""

    get_dispatch_config = get_combine_config = staticmethod(lambda ranks: _SIZES)
    set_num_sms = staticmethod(lambda number: None)

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **_: Any) -> tuple:
        return None, None, num_experts, None, None

    def dispatch(
        self, x: Tensor, handle: Any = None, topk_idx: Any = None, topk_weights: Any = None,
        num_tokens_per_expert: int = 0, **_: Any,
    ) -> tuple:  # fmt: skip
        if handle is not None:
            return handle.there(x), None, None, None, None, _WAITED
        ranks, rank = self.group.size(), self.group.rank()
        local = num_tokens_per_expert // ranks
        owner = topk_idx.div(local, rounding_mode="floor")  # -1 // n is -1: nobody's
        handle = _Exchange([(owner == r).any(1).nonzero()[:, 0] for r in range(ranks)], len(x), self.group)
        experts = handle.there(topk_idx)
        mine = experts.div(local, rounding_mode="floor") == rank
        experts = torch.where(mine, experts - rank * local, -1)
        weights = handle.there(topk_weights) * mine
        counts = [int((experts == expert).sum()) for expert in range(local)]
        return handle.there(x), experts, weights, counts, handle, _WAITED

    def combine(self, x: Tensor, handle: _Exchange, topk_weights: Any = None, **_: Any) -> tuple:
        return handle.summed(x), None if topk_weights is None else handle.summed(topk_weights), _WAITED


class HybridEPBuffer:
    """HybridEP, without padding of experts."""

    def __init__(self, group: Any, **_: Any) -> None:
        self.group = group

    def dispatch_with_permute(
        self, hidden: Tensor, routing_map: Any = None, probs: Any = None, num_of_experts_per_rank: int = 0,
        handle: Any = None, **_: Any,
    ) -> tuple:  # fmt: skip
        if handle is not None:
            exchange, order, *_ = handle
            return exchange.there(hidden)[order], None, None, None, None
        assert len(set(_of_all(len(hidden), self.group))) == 1, "HybridEP takes as many tokens of each rank"
        ranks, local = self.group.size(), num_of_experts_per_rank
        pairs = [routing_map[:, r * local : (r + 1) * local].nonzero() for r in range(ranks)]
        exchange = _Exchange([pair[:, 0] for pair in pairs], len(hidden), self.group)
        experts = exchange.send(torch.cat([pair[:, 1] for pair in pairs]))
        order = experts.argsort(stable=True)
        number = torch.cat([pair[:, 1] + r * local for r, pair in enumerate(pairs)])
        weights = exchange.send(probs[exchange.index, number])
        counts = torch.bincount(experts, minlength=local)
        handle = exchange, order, number, routing_map.shape[1]
        return exchange.there(hidden)[order], weights[order], None, counts, handle

    def combine_with_unpermute(self, hidden: Tensor, handle: Any, probs: Any = None, **_: Any) -> tuple:
        exchange, order, number, experts = handle
        summed = exchange.summed(torch.empty_like(hidden).index_copy_(0, order, hidden))
        if probs is None:
            return summed, None
        back = exchange.back(torch.empty_like(probs).index_copy_(0, order, probs))
        whole = probs.new_zeros(exchange.total, experts)
        whole[exchange.index, number] = back
        return summed, whole


def _of_all(number: int, group: Any) -> list[int]:
    every = [torch.zeros(1, dtype=torch.long) for _ in range(group.size())]
    dist.all_gather(every, torch.tensor([number]), group=group)
    return [int(each) for each in every]

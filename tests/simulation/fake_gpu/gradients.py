"""Count elementwise operations of a backward pass that write tensors with a parameter's shape, in megatron-core's DDP.

Compares our model with Megatron-Bridge's, with the same tiny configuration, row and megatron-core's local layers.
"""

from collections import Counter
from typing import Any

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.testing.tiny_checkpoint import make_config
from qwen3vl_bridge.testing.tiny_processor import make_processor
from qwen3vl_bridge.upstream.simulated_gpu import balance_routing

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.gpu import make_samples
from benchmarks.kernel_ledger import WAYS, Ledger, computable
from tests.helpers.batches import make_batch
from tests.helpers.ranks import forget_models
from tests.simulation.fake_gpu.conftest import leave

KINDS = {"dense": {}, "tied": {"tied": True}, "moe": {"moe": True}}
# GEMMs, and operations that write nothing.
OTHERS = ("mm", "addmm", "detach", "_unsafe_view", "empty", "empty_like", "empty_strided", "new_empty")


class Written(TorchDispatchMode):
    """Count operations that write a tensor with a parameter's shape, by name, dtype and shape."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.times = shapes, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        _, name, _ = str(func).split(".")
        for x in tree_leaves(out):
            written = isinstance(x, torch.Tensor) and x.is_cuda and not func.is_view and name not in OTHERS
            if written and tuple(x.shape) in self.shapes:
                self.times[f"{name} {x.dtype} {list(x.shape)}"] += 1
        return out


def second_microbatch(way: str, kind: str, chunk: int = 0) -> dict[str, Any]:
    """Return what the backward pass of the second microbatch writes, and the number of parameters by shape."""
    config = make_config(make_processor(512).tokenizer, **KINDS[kind])
    config.architectures = [f"Qwen3VL{'Moe' * (kind == 'moe')}ForConditionalGeneration"]
    config.text_config.mlp_only_layers = []  # not supported by Megatron-Bridge's provider
    samples = make_samples(config, tiny=True)
    batch = make_batch(samples, config, packed=True)
    with computable(), WAYS[way](config, batch, samples) as (model, one_pass):
        if way == "ours":
            model.config.loss_chunk_tokens = chunk
        shapes = Counter(tuple(parameter.shape) for parameter in model.parameters())
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        wrapped, written = DistributedDataParallel(model.config, settings, model), Written(set(shapes))
        ledger = Ledger(batch.input_ids == config.image_token_id)
        for number in range(2):
            with wrapped.no_sync(), ledger, ledger.of_others():
                loss = one_pass()
                with written:
                    loss.backward()
            if number == 0:
                written.times.clear()
    forget_models()
    return dict(written=written.times, parameters={str(list(shape)): n for shape, n in shapes.items()})


if __name__ == "__main__":
    balance_routing()
    found = {f"{way} {kind}": second_microbatch(way, kind) for kind in KINDS for way in ("ours", "Megatron-Bridge")}
    leave(found | {"chunked": second_microbatch("ours", "dense", chunk=32)})

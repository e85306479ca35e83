"""Count kernels, bytes and FLOPs of one implementation on the fake GPU, as JSON; started by `kernel_accounting`."""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import isroutine
from pathlib import Path
from typing import Any
from unittest import mock

import qwen3vl_bridge  # noqa: F401  before Megatron
from qwen3vl_bridge.config.fields import has_transformer_engine
from qwen3vl_bridge.core.batch import TokenBatch
from qwen3vl_bridge.models.common.attention import layout_packed_seq_params, packed_seq_params
from qwen3vl_bridge.models.common.delta_rule import packed_row, with_chunks
from qwen3vl_bridge.simulation import fake_gpu
from qwen3vl_bridge.simulation.no_cudnn import without_cudnn
from qwen3vl_bridge.training.process_groups import initialize
from qwen3vl_bridge.training.step import to_device
from qwen3vl_bridge.upstream.library_logs import quiet
from qwen3vl_bridge.upstream.simulated_gpu import balance_routing, flops_of_grouped_gemm, flops_of_grouped_mm

import torch
import torch.nn.functional as F
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, gdn
from qwen3vl_recipes.base import environment
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForImageTextToText
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe
from transformers.models.qwen3_vl import modeling_qwen3_vl
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe
from triton.runtime.jit import JITFunction

from benchmarks import measurement
from benchmarks.gpu import configuration, make_samples
from benchmarks.kernel_accounting import SIZES, Asked
from tests.helpers import stock_qwen3_5, stock_qwen3_vl
from tests.helpers.batches import Sample, make_batch
from tests.helpers.ranks import forget_models
from tests.helpers.stock_steps import torch_attention

LAUNCHES = ("kernel", "triton", "gemm", "memset")
ATTENTION = ("flash", "fmha")
# GATHERS read as many bytes of their first tensor as they write. WRITES only write to their first tensor.
GATHERS = ("aten.index", "aten.index_select", "aten.embedding", "aten.gather", "aten.masked_select")
WRITES = ("aten.copy_", "aten.fill_", "aten.zero_")

Pass = Callable[[], Tensor]  # the loss


class Ledger(TorchDispatchMode):
    """Dispatch mode that marks begin and end of each operation in the fake GPU's log, and counts its bytes."""

    def __init__(self, placeholders: Tensor) -> None:
        """Use `placeholders` [rows, tokens] as the value of each mask of this shape: the fake GPU computes none."""
        super().__init__()
        self.names: list[str] = []
        self.nbytes: list[int] = []
        # Index of an operation -> FLOPs of matrix products that the log does not show, for experts in one kernel.
        # Operations of the delta rule have 0 FLOPs here, as attention has.
        self.products: dict[int, int] = {}
        self.shape, self.chosen = placeholders.shape, [x.cuda() for x in placeholders.nonzero(as_tuple=True)]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that torch.compile ignores this mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, str(func).rpartition(".")[0]
        if "index" in name and len(args) > 1 and isinstance(args[1], (list, tuple)):
            args = (args[0], self._without_masks(args[1]), *args[2:])
        if name == "aten.masked_scatter_backward":  # would search for the True elements of the mask
            gather = torch.ops.aten.index.Tensor
            return self._noted("aten.index", gather, (args[0], list(self.chosen)), {}).reshape(args[2])
        return self._noted(name, func, args, kwargs)

    def _without_masks(self, indices: Any) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype == torch.bool
            assert not is_mask or index.shape == self.shape, index.shape
            found += self.chosen if is_mask else [index]
        return found

    def _noted(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "aten._grouped_mm":
            self.products[len(self.names)] = flops_of_grouped_mm(*args[:2])
        with self.operation(name) as note:
            out = func(*args, **kwargs)
        read, written = (
            [x for x in tree_leaves(y) if isinstance(x, Tensor) and x.is_cuda] for y in ((args, kwargs), out)
        )
        nbytes = sum(map(_nbytes, written))
        if name in GATHERS:
            nbytes += nbytes + sum(map(_nbytes, read[1:]))
        elif name.startswith("aten.index_put") or name == "aten._index_put_impl_":
            nbytes = 2 * _nbytes(args[2]) + sum(_nbytes(x) for x in args[1] if x is not None)
        else:
            nbytes += sum(map(_nbytes, read[1:] if name in WRITES else read))
        note(nbytes)
        return out

    @contextmanager
    def operation(self, name: str) -> Iterator[Callable[[int], None]]:
        """Attribute launches inside the `with` block to an operation; yield a function to set its bytes."""
        number = len(self.names)
        self.names.append(name)
        self.nbytes.append(0)
        fake_gpu.mark(f"begin {number}")
        yield functools.partial(self.nbytes.__setitem__, number)
        fake_gpu.mark("end")

    @contextmanager
    def of_others(self) -> Iterator[None]:
        """Also count compiled kernels, Triton kernels of packages and Transformer Engine, inside the `with` block."""
        launch, launch_of_package = CachingAutotuner.run, JITFunction.run

        def launched(tuner: CachingAutotuner, *args: Any, **kwargs: Any) -> Any:
            with self.operation(tuner.fn.__name__) as note:
                result = launch(tuner, *args, **kwargs)
            named = zip(tuner.fn.arg_names, args, strict=False)
            note(sum(_nbytes(x) * (1 + name.startswith("in_out")) for name, x in named if isinstance(x, Tensor)))
            return result

        def of_package(kernel: JITFunction, *args: Any, warmup: bool, **kwargs: Any) -> Any:
            if kernel.__module__.startswith("fla.ops."):
                self.products[len(self.names)] = 0
            with self.operation(kernel.__name__) as note:
                result = launch_of_package(kernel, *args, warmup=warmup, **kwargs)
            note(sum(map(_nbytes, _tensors((args, kwargs)))))
            return result

        def in_order(tuner: CachingAutotuner, *_: Any, **__: Any) -> dict[Any, float]:
            return {launcher: float(number) for number, launcher in enumerate(tuner.launchers)}

        def noted(name: str, function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                if name == "te_general_grouped_gemm":
                    self.products[len(self.names)] = flops_of_grouped_gemm(*args)
                with self.operation(f"Transformer Engine's {name}") as note:
                    result = function(*args, **kwargs)
                note(sum(map(_nbytes, _tensors((args, kwargs, result)))))
                return result

            return run

        with ExitStack() as stack:
            # Timing the configurations of a kernel would copy tensors to the host and back.
            stack.enter_context(mock.patch.multiple(CachingAutotuner, run=launched, benchmark_all_configs=in_order))
            stack.enter_context(mock.patch.object(JITFunction, "run", of_package))
            if has_transformer_engine():
                import transformer_engine_torch as engine

                functions = {f: noted(name, f) for name, f in vars(engine).items() if isroutine(f)}
                for module in [m for name, m in sys.modules.items() if name.startswith("transformer_engine")]:
                    for name, f in list(vars(module).items()):
                        if isroutine(f) and f in functions:  # some modules import functions by name
                            stack.enter_context(mock.patch.object(module, name, functions[f]))
            yield


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_cuda]


def _nbytes(x: Tensor) -> int:
    """Return the bytes of a tensor in memory: expanded dimensions count once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * x.element_size()


def count(one_pass: Pass, model: nn.Module, placeholders: Tensor) -> tuple[Asked, dict[str, list[float]]]:
    """Run two passes that compile, then return the work of a third pass, and (launches, bytes) by operation name."""
    ledger, log = Ledger(placeholders), Path(os.environ["FAKE_GPU_LOG"])
    with ledger, ledger.of_others():
        for name in ("warm", "warm", "pass"):
            fake_gpu.mark(name)
            one_pass().backward()
            model.zero_grad(set_to_none=True)
        fake_gpu.mark("end of pass")
    asked: dict[int | str, Counter[str]] = defaultdict(Counter)  # by operation, or by kernel name
    flops, within = 0, list[int]()
    for event in fake_gpu.between(fake_gpu.read_log(log), "pass", "end of pass"):
        if event.kind == "mark" and event.name == "end":
            within.pop()
        elif event.kind == "mark":
            within.append(int(event.name.split()[1]))
        elif event.kind in LAUNCHES or (event.kind == "copy" and event.name == "device to device"):
            kind = "attention" if any(word in event.name for word in ATTENTION) else "other"
            asked[within[-1] if within else event.name]["product" if event.kind == "gemm" else kind] += 1
            flops += event.amount * (event.kind == "gemm")
    flops += sum(ledger.products.get(operation, 0) for operation, kinds in asked.items() if not kinds["product"])
    total, named = Asked(flops=flops), defaultdict(lambda: [0.0, 0.0])
    for operation, kinds in asked.items():
        is_product = kinds["attention"] or operation in ledger.products
        is_elementwise = isinstance(operation, int) and kinds["other"] and not is_product
        nbytes = ledger.nbytes[operation] if is_elementwise else 0
        total = total.plus(Asked(kinds.total(), kinds["other"] if is_elementwise else 0, nbytes))
        entry = named[
            ledger.names[operation] if isinstance(operation, int) else f"outside operations: {operation[:60]}"
        ]
        entry[0], entry[1] = entry[0] + kinds.total(), entry[1] + nbytes
    return total, dict(named)


@contextmanager
def ours(config: Any, batch: TokenBatch, samples: list[Sample]) -> Iterator[tuple[nn.Module, Pass]]:
    """Yield our model and its pass, with the copy of the batch to the GPU and the recipes' environment variables."""
    os.environ |= environment(experts="moe" in config.model_type)
    model = measurement.build_model(config, batch.input_ids.numel(), "cuda")
    local = batch.local()

    def loss() -> Tensor:
        inputs = to_device(local, model)
        return _mean(model(inputs=inputs), inputs.loss_mask)

    yield model, loss


def _mean(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses.view(-1) * mask.view(-1)).sum() / mask.sum()


@contextmanager
def of_bridge(config: Any, batch: TokenBatch, samples: list[Sample]) -> Iterator[tuple[nn.Module, Pass]]:
    """Yield Megatron-Bridge's model and its pass, with positions and offsets computed by our code."""
    stock = stock_qwen3_5 if config.model_type.startswith("qwen3_5") else stock_qwen3_vl
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        provider = stock.stock_provider(Path(folder))
    provider.seq_length, provider.bf16, provider.params_dtype = batch.input_ids.numel(), True, torch.bfloat16
    provider.gradient_accumulation_fusion = False  # it needs APEX
    provider.mtp_num_layers, provider.dist_train = None, DistTrainConfig()  # Qwen3.5's provider sets no dist_train
    with ExitStack() as stack:
        if not has_transformer_engine():
            stack.enter_context(torch_attention())
            stack.enter_context(stock.local_layers(provider))
        provider.finalize()
        groups = initialize(provider, seed=0)
        (model,) = provider.provide_distributed_model(
            wrap_with_ddp=False, mixed_precision_wrapper=None, pg_collection=groups
        )
    assert type(model).__module__.startswith("megatron.bridge."), type(model)
    inputs, pixels = to_device(batch.local(), model), _pictures(samples)
    frames = packed_seq_params(inputs.vision.cu_seqlens, inputs.vision.lengths)
    model.vision_model.build_packed_seq_params = lambda grid_thw: frames
    packed = layout_packed_seq_params(inputs.layout)

    def loss() -> Tensor:
        with packed_row(packed):
            losses = model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                labels=inputs.labels,
                loss_mask=inputs.loss_mask,
                packed_seq_params=packed,
                **pixels,
            )
        return _mean(losses, inputs.loss_mask)

    # For models with experts, Megatron-Bridge's provider freezes all but DeepStack's mergers by default.
    yield model.bfloat16().cuda().train().requires_grad_(True), loss


@contextmanager
def of_transformers(config: Any, batch: TokenBatch, samples: list[Sample]) -> Iterator[tuple[nn.Module, Pass]]:
    """Yield transformers' model and its pass, with a block mask and bounds of segments for a packed row."""
    with torch.device("cuda"):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    inputs, pixels = to_device(batch.local(), model), _pictures(samples)
    lengths, bounds = batch.layout.padded_lengths, {}
    if (packed := layout_packed_seq_params(inputs.layout)) is not None:
        bounds["cu_seq_lens_q"] = packed.cu_seqlens_q
        mask = torch.block_diag(*[torch.ones(n, n, dtype=torch.bool) for n in lengths]).tril()[None, None].cuda()
    else:
        mask = (~batch.layout.padding_mask()).long().view(batch.input_ids.shape).cuda()
    labels = batch.labels.masked_fill(batch.loss_mask == 0, -100).cuda()

    def loss() -> Tensor:
        with packed_row(packed):
            return model(
                input_ids=inputs.input_ids,
                position_ids=inputs.position_ids,
                attention_mask=mask,
                labels=labels,
                use_cache=False,
                **bounds,
                **pixels,
            ).loss

    yield model.train(), loss


def _pictures(samples: list[Sample]) -> dict[str, Tensor]:
    """Return pixels on the GPU, and image sizes on the host, where the other models read them."""
    each = [sample.pixels for sample in samples if sample.pixels]
    pixels = torch.cat([pixels["pixel_values"] for pixels in each]).bfloat16().cuda()
    return {"pixel_values": pixels, "image_grid_thw": torch.cat([pixels["image_grid_thw"] for pixels in each])}


WAYS = {"ours": ours, "Megatron-Bridge": of_bridge, "transformers": of_transformers}


@contextmanager
def computable() -> Iterator[None]:
    """Replace what a fake GPU cannot do inside the `with` block: cuDNN, computed indices and reads of values."""

    def as_product(conv: nn.Conv3d, x: Tensor) -> Tensor:
        return F.linear(x.flatten(1), conv.weight.flatten(1), conv.bias)[:, :, None, None, None]

    def on_host(function: Any) -> Any:
        @functools.cache
        def kept(sizes: tuple[tuple[int, ...], ...], *args: Any, **kwargs: Any) -> Any:
            made = function(torch.tensor(sizes), *args, **kwargs)
            return tuple(x.cuda() for x in made) if isinstance(made, tuple) else made.cuda()

        return lambda grids, *args, kwargs=None, **more: kept(tuple(map(tuple, grids.tolist())), *args, **more)

    names = ("get_vision_bilinear_indices_and_weights", "get_vision_position_ids")
    replaced = {name: on_host(getattr(modeling_qwen3_vl, name)) for name in names}
    replaced["torch_compilable_check"] = lambda *_: None  # checks the number of image placeholders
    torch.backends.cuda.enable_cudnn_sdp(False)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(nn.Conv3d, "forward", as_product))
        # Skip checks whether segment offsets fit the row, and whether a mask excludes any token.
        stack.enter_context(
            mock.patch.object(GatedDeltaNet, "_resolve_cu_seqlens", lambda _, bounds, *__, **___: bounds)
        )
        for text_model in (modeling_qwen3_5.Qwen3_5TextModel, modeling_qwen3_5_moe.Qwen3_5MoeTextModel):
            stack.enter_context(mock.patch.object(text_model, "_update_linear_attn_mask", lambda _, mask, __: mask))
        for module in (modeling_qwen3_5, modeling_qwen3_5_moe, gdn):
            kernel = with_chunks(module.chunk_gated_delta_rule)
            stack.enter_context(mock.patch.object(module, "chunk_gated_delta_rule", kernel))
        for module in (modeling_qwen3_vl, modeling_qwen3_vl_moe, modeling_qwen3_5, modeling_qwen3_5_moe):
            stack.enter_context(mock.patch.multiple(module, **replaced))
        stack.enter_context(without_cudnn())
        yield


def main(way: str, size: str) -> None:
    """Count the passes of an implementation (`way`) of a model size, and print them as JSON."""
    quiet()
    balance_routing()
    found: dict[str, Any] = {}
    tokens, layers = 0, "Transformer Engine" if has_transformer_engine() else "local"
    for rows in ("packed", "padded"):
        for depth, (text, vision) in SIZES[size].depths().items():
            config = configuration(size, text, vision, tiny=False)
            samples = make_samples(config, tiny=False)
            tokens = sum(len(sample.ids) for sample in samples)
            batch = make_batch(samples, config, packed=rows == "packed")
            with computable(), WAYS[way](config, batch, samples) as (model, one_pass):
                found[f"{rows} {depth}"] = count(one_pass, model, batch.input_ids == config.image_token_id)
            del model, one_pass
            forget_models()
            torch.cuda.empty_cache()
    print("RESULT", json.dumps(dict(tokens=tokens, layers=layers, found=found)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Insert adapters of our classes or of Megatron-Bridge's LoRA, VLMLoRA, DoRA and CanonicalLoRA into a model chunk.

Megatron-Bridge walks over modules to insert adapters, and calls the method `map` of a module that has one
(`megatron.bridge.peft.walk_utils.map`). `VisionLanguageModel.map` is `map_modules`, so all callers use this module. The
`transform` of a class decides which layers get adapters; ours uses `adapter_rows.AdapterSettings.adapts`.

Several of Megatron-Bridge's modules are corrected here for tensor parallelism, recomputation and DoRA.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.peft.adapter_rows import layer_name, suggest_names
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.upstream.adapters import initializer, is_enabled, row_norms, written_targets
from qwen3vl_bridge.weights.rows import (
    OUTPUT_LAYER,
    Component,
    component_of,
    expand,
    is_expert_layer,
    is_mtp,
    shared_name,
)

import torch
import torch.nn.functional as F
from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
from megatron.bridge.peft.base import PEFT
from megatron.bridge.peft.canonical_lora import CanonicalLoRA, LoRALinearSplitFC1UpGate, LoRALinearSplitQKV
from megatron.bridge.peft.dora import DoRA
from megatron.bridge.peft.dora_layers import DoRALinear
from megatron.bridge.peft.lora import LoRA, VLMLoRA
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.bridge.peft.utils import ParallelLinearAdapter, is_grouped_expert_linear, wildcard_match
from megatron.bridge.peft.walk_utils import walk
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import Tensor, nn

Transform = Callable[..., nn.Module]

# The number of an expert in the name of its module.
EXPERT = re.compile(r"(?<=\.local_experts\.)\d+")
_TEXT_LAYER = re.compile(r"(?<=^language_model\.decoder\.layers\.)\d+")


def map_modules(chunk: MegatronModule, func: Callable[..., Any], *, leaf_only: bool) -> nn.Module:
    """Apply `func` to the modules of a model chunk, as Megatron-Bridge's `walk` does, and return the chunk.

    `func` gets module names without the prefixes of wrappers. If it is the `transform` method of a `PEFT` object, check
    the adapters that it inserts, and correct them for this model.

    Raises:
        ValueError: adapters would be trained, merged or saved wrongly.
    """
    peft = getattr(func, "__self__", None)
    if not isinstance(peft, PEFT) or func.__name__ != "transform":
        return walk(chunk, func, leaf_only=leaf_only, _skip_map=True)
    if isinstance(peft, DoRA):
        check_dora(peft, chunk.config)
    _check_targets_match(chunk, peft)
    if isinstance(peft, VLMLoRA):
        # VLMLoRA freezes only the first chunk of a rank, and freezes the mergers together with the vision model.
        chunk.freeze(**{flag: getattr(peft, flag) for flag in (f"freeze_{component.value}" for component in Component)})
        if not peft.freeze_vision_projection and not chunk.config.freeze_vision_projection:
            for parameter in () if chunk.vision_projection is None else chunk.vision_projection.parameters():
                parameter.requires_grad = True
    adapted = walk(chunk, model_transform(chunk, peft), leaf_only=leaf_only, _skip_map=True)
    _check_adapters(chunk, peft)
    require_grad_on_recompute_inputs(chunk)
    return adapted


def model_transform(chunk: MegatronModule, peft: PEFT) -> Transform:
    """Return a function that inserts adapters like `peft.transform`, with corrections for this model.

    It is called with module names of the full model, so that patterns match on every pipeline stage. The adapters get
    initial values that do not depend on the parallel layout.
    """
    ranks = chunk.pg_collection
    # Megatron-Bridge adds 100 to `rng.seed` for each pipeline stage.
    seed = torch.initial_seed() - 100 * ranks.pp.rank()
    experts = (chunk.config.num_moe_experts or 0) // ranks.ep.size()

    def transform(m: nn.Module, name: str | None = None, prefix: str | None = None) -> nn.Module:
        if is_mtp(prefix or ""):
            return m
        full_name = _full_name(prefix or "", chunk)
        adapted = peft.transform(m, name, full_name)
        if adapted is m or not isinstance(adapted, AdapterWrapper):
            return adapted
        if isinstance(peft, LoRA | DoRA | CanonicalLoRA):
            first = experts * ranks.ep.rank()
            layer = EXPERT.sub(lambda number: f"{int(number[0]) + first}", f"{full_name}.{name}")
            initialize_adapters(adapted, peft, layer, seed)
        if type(adapted) is DoRALinear:
            return MagnitudeLinear(adapted.to_wrap, adapted.adapter)
        if output_is_partial_sum(adapted):
            return PartialSumLoRALinear(adapted.to_wrap, adapted.adapter)
        return adapted

    return transform


def _full_name(name: str, chunk: MegatronModule) -> str:
    """Return a module's name in the full model. A chunk numbers its text layers from 0."""
    layers = chunk.language_model.decoder.layers
    return _TEXT_LAYER.sub(lambda number: str(layers[int(number[0])].layer_number - 1), name)


def initialize_adapters(wrapped: AdapterWrapper, peft: LoRA | DoRA | CanonicalLoRA, name: str, seed: int) -> None:
    """Draw the initial values of a layer's adapters again, so that they do not depend on the parallel layout.

    Each rank draws the full matrix on the CPU and keeps its shard. In Megatron-Bridge each rank draws its own shard,
    with the standard deviation of the shard's fan-in. The numbers depend on `seed` and on `name`, the layer's name in
    the full model; the states of random generators are neither used nor changed.
    """
    methods = {"linear_in": peft.lora_A_init_method, "linear_out": peft.lora_B_init_method}
    for local, adapter in wrapped.adapter.named_modules():
        if not isinstance(adapter, ParallelLinearAdapter):
            continue
        for side, method in methods.items():
            linear = getattr(adapter, side)
            full = torch.empty(linear.output_size, linear.input_size)
            digest = hashlib.blake2b(f"{seed} {name} {local} {side}".encode(), digest_size=8).digest()
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int.from_bytes(digest))
                initializer(adapter, method)(full)
            with torch.no_grad():
                for dim, size in enumerate(linear.weight.shape):
                    if size != full.shape[dim]:
                        full = full.narrow(dim, linear.tp_group.rank() * size, size)
                linear.weight.copy_(full)


class PartialSumLoRALinear(LoRALinear):
    """A row-parallel layer under LoRA where layer and adapter return partial sums, which the caller reduces.

    megatron-core's shared experts reduce the output of `linear_fc2` later if `moe_shared_expert_overlap` is set.
    Megatron-Bridge's adapter returns the full product on each rank, which would then be counted once per rank.
    """

    def __init__(self, to_wrap: nn.Module, adapter: ParallelLinearAdapter) -> None:
        """Wrap `to_wrap` with an adapter whose output is no longer gathered over tensor-parallel ranks."""
        super().__init__(to_wrap, adapter)
        adapter.linear_out.gather_output = False

    def adapter_forward(self, adapter: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return this rank's columns of the adapter's output, with zeros in place of the other ranks' columns."""
        own = super().adapter_forward(adapter, x, *args, **kwargs)
        before = adapter.tp_group.rank() * own.size(-1)
        return F.pad(own, (before, adapter.linear_out.output_size - before - own.size(-1)))


def output_is_partial_sum(wrapped: nn.Module) -> bool:
    """Return True if a layer under LoRA returns a partial sum, while its adapter returns the full sum."""
    if type(wrapped) is not LoRALinear or not isinstance(adapter := wrapped.adapter, ParallelLinearAdapter):
        return False
    # megatron-core sets these attributes on the linear layers of overlapped shared experts, the first on Transformer
    # Engine's layers, the second on its own. The caller also reduces the gradient of the input of `linear_fc1`; its
    # adapter does not reduce it under sequence parallelism, which models with experts require.
    base = wrapped.to_wrap
    is_partial = getattr(base, "parallel_mode", "") is None or getattr(base, "explicit_expert_comm", False)
    return is_partial and adapter.input_is_parallel and not adapter.is_expert and adapter.tp_group.size() > 1


class MagnitudeLinear(DoRALinear):
    """A linear layer under DoRA: rows of W + BA are scaled to learned norms, without the bias.

    Megatron-Bridge's own class also scales the bias if the layer adds it, and expects inputs with three dimensions.
    """

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the output [..., out] for an input [..., in], and the bias if the caller has to add it, else None."""
        output, bias_to_add, normed = self.base_linear_forward(x)
        if not is_enabled(self):
            return output, bias_to_add
        bias = getattr(self.to_wrap, "bias", None)
        added = bias if bias_to_add is None and bias is not None and bias.numel() else None
        product = output if added is None else output - added
        length = self.adapter.get_weight_magnitude() / row_norms(self)
        scaled = length * (product + self.adapter(normed.contiguous()).view_as(product))
        return scaled if added is None else scaled + added, bias_to_add


def require_grad_on_recompute_inputs(chunk: MegatronModule) -> None:
    """Make the input of a transformer block require a gradient if the block is recomputed and has trained parameters.

    The parameters of a recomputed function get no gradient if none of its inputs requires one. Megatron-Bridge sets
    `requires_grad` only if the text model is recomputed and no base weight is trained.
    """
    for block in chunk.modules():
        if isinstance(block, TransformerBlock) and block.config.recompute_granularity is not None:
            block.register_forward_pre_hook(_require_input_gradient, with_kwargs=True)


def _require_input_gradient(
    block: TransformerBlock, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    hidden, *rest = args or (kwargs["hidden_states"],)
    if not torch.is_grad_enabled() or hidden is None or hidden.requires_grad:
        return None
    if not any(parameter.requires_grad for parameter in block.layers.parameters()):
        return None
    hidden = hidden.detach().requires_grad_()
    return ((hidden, *rest), kwargs) if args else (args, kwargs | {"hidden_states": hidden})


def check_dora(peft: DoRA, config: TransformerConfig) -> None:
    """Raise ValueError for DoRA with dropout, tensor parallelism or pipeline parallelism."""
    if peft.dropout:
        # Megatron-Bridge would pass the difference due to dropout through a fused norm, and apply dropout twice.
        raise ValueError(f"dropout is {peft.dropout}, expected 0: DoRA does not support dropout here")
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        # The norm of a rank's columns is not the norm of the full row, and magnitudes are exported from one rank.
        if (size := getattr(config, name)) > 1:
            raise ValueError(f"{name} is {size}, expected 1 for DoRA")


def check_expert_tensor_parallelism(config: TransformerConfig) -> None:
    """Raise ValueError if experts with adapters are tensor-parallel: partial sums of adapters would not be reduced."""
    if (size := config.expert_tensor_parallel_size or 1) > 1:
        raise ValueError(f"expert_tensor_parallel_size is {size}, expected 1 where experts have adapters")


def _check_targets_match(chunk: MegatronModule, peft: PEFT) -> None:
    """Raise ValueError if a target module matches no layer of the full model. Megatron-Bridge only logs a warning."""
    rows = expand(family(chunk.config.family).rows(), chunk.config.dimensions())
    layers = {layer for row in rows for layer in (layer_name(row), shared_name(layer_name(row)))}
    layers |= {_full_name(name, chunk) for name, _ in chunk.named_modules()}

    def matches(pattern: str) -> bool:
        return any(layer.rpartition(".")[2] == pattern or wildcard_match(pattern, layer) for layer in layers)

    # As the user has written them: CanonicalLoRA matches "linear_q" by the pattern "linear_qkv".
    if idle := [target for target, pattern in written_targets(peft).items() if not matches(pattern)]:
        raise ValueError(
            f"{type(peft).__name__} has target_modules {idle}, which match no layer of the model{suggest_names(idle)}"
        )


def _check_adapters(chunk: MegatronModule, peft: PEFT) -> None:
    """Raise ValueError for adapters that cannot be trained, merged or saved correctly."""
    kind, config = type(peft).__name__, chunk.config
    adapted = {name: module for name, module in chunk.named_modules() if isinstance(module, AdapterWrapper)}
    if OUTPUT_LAYER in adapted and chunk.share_embeddings_and_output_weights:
        raise ValueError(
            f"{kind} adapts {OUTPUT_LAYER}, whose weight is tied to the embedding here, so that nothing can be merged "
            "into it; add it to exclude_modules, or remove it from target_modules"
        )
    for local, module in adapted.items():
        name, component = _full_name(local, chunk), component_of(local)
        if (
            isinstance(module, LoRALinearSplitQKV)
            and component is Component.LANGUAGE_MODEL
            and config.attention_output_gate
        ):
            raise ValueError(
                f"{kind} adapts queries, keys and values of {name} separately, but its weight also holds the rows of "
                "gates: use another class, such as qwen3vl_bridge.Qwen3VLLoRA, or remove linear_q, linear_k and "
                "linear_v from target_modules"
            )
        if isinstance(module, LoRALinearSplitQKV | LoRALinearSplitFC1UpGate):
            missing = [key.removeprefix("adapter_") for key, adapter in module.adapter.items() if adapter is None]
            targets = (f"{name.rpartition('.')[2]}_{key}".replace("linear_qkv_", "linear_") for key in missing)
            if missing:
                raise ValueError(
                    f"{kind} adapts only a part of {name}, but its forward pass needs adapters on all parts: add "
                    f"{', '.join(targets)} to target_modules, or remove the other parts"
                )
        if is_expert_layer(name):
            if isinstance(peft, DoRA):
                raise ValueError(
                    f"{kind} adapts {name}, and Hugging Face's peft does not support DoRA on experts; use "
                    "target_modules that match no layer of experts, or qwen3vl_bridge.Qwen3VLDoRA, which skips them"
                )
            check_expert_tensor_parallelism(config)
            if getattr(peft, "experts_shared_outer_loras", False) and not is_grouped_expert_linear(name):
                raise ValueError(
                    f"experts_shared_outer_loras is True, and {name} belongs to a single expert (moe_grouped_gemm is "
                    f"{config.moe_grouped_gemm}); expected False, because each expert has its own adapter"
                )
        if any(parameter.requires_grad for parameter in module.to_wrap.parameters()):
            flag = f"freeze_{component.value}"
            raise ValueError(
                f"{flag} is False, and {name} has an adapter: its base weight would be trained but not saved in "
                f"Megatron-Bridge's checkpoints; set {flag}=True, select target_modules of other components (such as "
                "'*language_model*.linear_qkv'), or use qwen3vl_bridge.Qwen3VLLoRA, which saves both"
            )

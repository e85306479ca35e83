"""How a model is trained, as far as memory is concerned: rows, precision, sharding, recomputation, adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from qwen3vl_bridge.weights.rows import Part

TEXT_MODULES = frozenset({"core_attn", "mlp", "moe", "moe_act", "layernorm"})
VISION_MODULES = frozenset({"core_attn", "layernorm"})  # as `models/refusals.py` has them
LINEAR_LAYERS = ("linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2")


class Sharding(Enum):
    """What is sharded over data-parallel ranks (the ZeRO stage): each value includes those before it."""

    NONE = "no_shard"
    OPTIMIZER = "optim"  # the distributed optimizer
    GRADIENTS = "optim_grads"  # Megatron-FSDP
    ALL = "optim_grads_params"  # Megatron-FSDP, ZeRO-3

    @property
    def is_fsdp(self) -> bool:
        """Whether Megatron-FSDP implements it."""
        return self in (Sharding.GRADIENTS, Sharding.ALL)

    def shards(self, what: Sharding) -> bool:
        """Whether it shards what the other one shards first: the optimizer, gradients or parameters."""
        kinds = list(Sharding)
        return kinds.index(self) >= kinds.index(what)


@dataclass(frozen=True)
class Precision:
    """Bytes of one number of each kind."""

    weight: int  # parameters in the model, and activations
    gradient: int  # as stored and reduced
    main: int  # the optimizer's main copy of a parameter; 0 if it has none
    moments: int = 8  # Adam's two moments together


BF16 = Precision(weight=2, gradient=4, main=4)  # Megatron-Bridge's "bf16_mixed", which sets grad_reduce_in_fp32
FP32 = Precision(weight=4, gradient=4, main=0)
PRECISIONS = {"bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class EightBits:
    """Products of the text model's layers in 8 bits, by Transformer Engine. Its other tensors keep their precision.

    A weight has a copy in 8 bits for each of its two products: as its only form (`weights`), or beside the one in
    `Precision`. Blocks of 32 numbers (mxfp8) share a scale of one byte.
    """

    multiple: int = 16  # of tokens on a rank
    weights: bool = True  # they are stored and gathered in 8 bits
    first: int = 0  # layers in 16 bits, at the beginning
    last: int = 0  # and at the end
    exempt: tuple[str, ...] = ()  # linear layers in 16 bits
    scale: float = 0.0  # bytes of scales for each number

    def weight(self, in_16_bits: int) -> float:
        """Bytes of a number of a weight."""
        return 2 * (1 + self.scale) + in_16_bits * (not self.weights)

    @property
    def input(self) -> float:
        """Bytes of a number of a product's input, which is saved in one form."""
        return 1 + self.scale

    def layers(self, chunk: range, num_layers: int) -> range:
        """Those of a chunk that compute in 8 bits."""
        return range(max(chunk.start, self.first), min(chunk.stop, num_layers - self.last))


# By the names of Megatron-Bridge's recipes, as its mixed precisions have them.
EIGHT_BITS = {"fp8_cs": EightBits(first=1, last=1), "fp8_mx": EightBits(multiple=32, scale=1 / 32)}


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation of one tower, with megatron-core's settings of the same names."""

    granularity: str | None = None  # "selective" or "full"
    modules: frozenset[str] = frozenset()  # with "selective"
    method: str | None = None  # with "full": "uniform" or "block"
    num_layers: int | None = None  # with "full"

    def check(self, prefix: str, allowed: Collection[str]) -> None:
        """Refuse (ValueError) unknown modules, and fields that contradict each other."""
        if unknown := self.modules - set(allowed):
            raise ValueError(f"{prefix}recompute_modules has {sorted(unknown)}, expected some of {sorted(allowed)}")
        if (self.granularity == "selective") != bool(self.modules):
            raise ValueError(
                f"{prefix}recompute_modules is {sorted(self.modules)} with {prefix}recompute_granularity "
                f"{self.granularity!r}, expected modules with 'selective' and none without"
            )
        complete = self.method in ("uniform", "block") and (self.num_layers or 0) >= 1
        absent = self.method is None and self.num_layers is None
        if not (complete if self.granularity == "full" else absent):
            raise ValueError(
                f"{prefix}recompute_method is {self.method!r} and {prefix}recompute_num_layers {self.num_layers} with "
                f"{prefix}recompute_granularity {self.granularity!r}, expected 'uniform' or 'block' and 1 or more "
                "with 'full', and None without"
            )


FULL = Recompute("full", method="uniform", num_layers=1)


@dataclass(frozen=True)
class LoraSettings:
    """Adapters of the language model's layers without experts; all else is frozen."""

    rank: int  # `dim`
    targets: tuple[str, ...] = LINEAR_LAYERS
    regathers: bool = True  # `sequence_parallel_input_regather`
    dora: bool = False  # with a magnitude for each output


@dataclass(frozen=True)
class TrainingSettings:
    """Data, precision, sharding and recomputation of a run; a ValueError if they contradict each other."""

    seq_length: int = 4096  # tokens of a row
    micro_batch_size: int = 1  # rows of a microbatch
    global_batch_size: int | None = None  # rows of a step; None for as many as keep the pipeline stages busy
    max_patches: int | None = None  # of a row; None for those of a row that contains only image tokens
    precision: Precision = BF16
    eight_bits: EightBits | None = None
    sharding: Sharding = Sharding.OPTIMIZER
    recompute: Recompute = field(default_factory=Recompute)  # of the language model
    vision_recompute: Recompute = field(default_factory=Recompute)
    frozen: frozenset[Part] = frozenset()
    lora: LoraSettings | None = None
    transformer_engine: bool = True  # False for megatron-core's local layers with our attention
    on_gpu: bool = False  # what layers without Transformer Engine run on; tests measure them on a CPU
    delta_rule_kernels: bool = False  # flash-linear-attention's, which are assumed with Transformer Engine
    fused_activation: bool = True  # `bias_activation_fusion`; without it the language model's MLPs store more
    # The fused cross entropy, as the provider's `cross_entropy_fusion_impl`: Transformer Engine's ("te") overwrites the
    # logits with their gradient; None without. Of float32 logits there is no "native" one.
    loss_fusion: str | None = "native"
    loss_chunk_tokens: int = 2048  # as the provider's: tokens whose logits are in memory at a time; 0 for a microbatch
    packed: bool = True  # rows are packed, not padded
    expert_load: float = 1.0  # tokens of the rank with the most expert load, divided by the mean of all ranks
    balancing_loss: bool = True  # of routers
    overlaps_experts: bool = False  # `overlap_moe_expert_parallel_comm`
    trains_mtp: bool = False  # multi-token prediction; otherwise its weights are only kept
    made_on_host: bool = False  # `init_model_with_meta_device`, for Megatron-FSDP
    saved_by_parameters: bool = True  # `dist_ckpt_optim_fully_reshardable`, of a distributed optimizer's state

    def __post_init__(self) -> None:
        self.recompute.check("", TEXT_MODULES)
        self.vision_recompute.check("vision_", VISION_MODULES)
        if (self.max_patches or 0) < 0:
            raise ValueError(f"max_patches is {self.max_patches}, expected 0 or more")
        if self.expert_load < 1:
            raise ValueError(f"expert_load is {self.expert_load}, expected 1 (all ranks alike) or more")
        if self.eight_bits and (self.sharding.is_fsdp or not self.transformer_engine):
            raise ValueError(
                "products in 8 bits are counted with Transformer Engine and without Megatron-FSDP, expected "
                "transformer_impl 'transformer_engine' and another sharding"
            )
        if self.loss_fusion == "te" and not self.transformer_engine:
            raise ValueError("loss_fusion is 'te', expected another without Transformer Engine, which provides it")
        if self.trains_mtp and self.recompute.granularity == "full" and self.recompute != FULL:
            raise ValueError(
                f"recompute_method is {self.recompute.method!r} and recompute_num_layers {self.recompute.num_layers}, "
                "expected 'uniform' and 1: megatron-core recomputes multi-token prediction only like this"
            )
        needs_te = {"layernorm", "moe_act"} & (self.recompute.modules | self.vision_recompute.modules)
        if needs_te and not self.transformer_engine:
            raise ValueError(f"recompute_modules has {sorted(needs_te)}, which need Transformer Engine; remove them")

    @property
    def frozen_weights(self) -> frozenset[Part]:
        """Parts whose own weights are not trained."""
        return frozenset(Part) if self.lora else self.frozen

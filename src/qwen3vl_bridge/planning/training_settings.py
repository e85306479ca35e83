"""Settings of a training run that change its memory: rows, precision, sharding, recomputation, adapters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from qwen3vl_bridge.weights.rows import Component

# Values of recompute_modules that `config/model_validation.py` allows.
TEXT_RECOMPUTE_MODULES = frozenset({"core_attn", "mlp", "moe", "moe_act", "layernorm"})
VISION_RECOMPUTE_MODULES = frozenset({"core_attn", "layernorm"})
LINEAR_LAYERS = ("linear_qkv", "linear_proj", "in_proj", "out_proj", "linear_fc1", "linear_fc2")
NGRAM_TABLE = "ngram_table"  # a kind of parameters, which can be frozen by itself


class Sharding(Enum):
    """Model states that are sharded over data-parallel ranks, as in the stages of ZeRO.

    Each value also shards the model states of the values before it.
    """

    NONE = "no_shard"
    OPTIMIZER = "optim"  # the distributed optimizer
    GRADIENTS = "optim_grads"  # Megatron-FSDP
    ALL = "optim_grads_params"  # Megatron-FSDP, ZeRO-3

    @property
    def is_fsdp(self) -> bool:
        """True if this sharding needs Megatron-FSDP."""
        return self in (Sharding.GRADIENTS, Sharding.ALL)

    def includes(self, stage: Sharding) -> bool:
        """Return True if this sharding shards at least the model states that `stage` shards."""
        stages = list(Sharding)
        return stages.index(self) >= stages.index(stage)


@dataclass(frozen=True)
class Precision:
    """Bytes per element of each kind of tensor."""

    weight: int  # parameters of the model, and activations
    gradient: int  # as stored and reduced
    main: int  # the optimizer's main copy of a parameter; 0 if it has none
    moments: int = 8  # both moments of Adam


BF16 = Precision(weight=2, gradient=4, main=4)  # Megatron-Bridge's "bf16_mixed", which sets grad_reduce_in_fp32
FP32 = Precision(weight=4, gradient=4, main=0)
PRECISIONS = {"bf16": BF16, "fp32": FP32}


@dataclass(frozen=True)
class Fp8Settings:
    """FP8 GEMMs (matrix products) of the language model's layers, by Transformer Engine.

    Other tensors keep their precision. The forward and the backward GEMM each have their own FP8 copy of a weight.
    """

    multiple: int = 16  # the number of tokens on a rank must be a multiple of this
    fp8_param: bool = True  # weights exist only in FP8; otherwise in `Precision.weight` too
    first_bf16_layers: int = 0  # `num_layers_at_start_in_bf16`
    last_bf16_layers: int = 0  # `num_layers_at_end_in_bf16`
    bf16_linears: tuple[str, ...] = ()  # linear layers that stay in bf16
    scale: float = 0.0  # bytes of scales per element; mxfp8 has one byte per block of 32

    def weight_bytes(self, bf16_bytes: int) -> float:
        """Return the bytes per weight element: two FP8 copies with scales, and a bf16 weight unless `fp8_param`."""
        return 2 * (1 + self.scale) + bf16_bytes * (not self.fp8_param)

    @property
    def input_bytes(self) -> float:
        """Bytes per element, with scales, of the FP8 input that a linear layer saves for its backward pass."""
        return 1 + self.scale

    def select_layers(self, layers: range, num_layers: int) -> range:
        """Return the layers among `layers` that compute in FP8, in a model of `num_layers` text layers."""
        return range(max(layers.start, self.first_bf16_layers), min(layers.stop, num_layers - self.last_bf16_layers))


# FP8 settings by the suffix of Megatron-Bridge's recipe names. They equal its mixed-precision settings of that name.
FP8_PRECISIONS = {
    "fp8_cs": Fp8Settings(first_bf16_layers=1, last_bf16_layers=1),
    "fp8_mx": Fp8Settings(multiple=32, scale=1 / 32),
}


@dataclass(frozen=True)
class Recompute:
    """Activation recomputation of the language model or the vision tower, with megatron-core's settings."""

    granularity: str | None = None  # "selective" or "full"
    modules: frozenset[str] = frozenset()  # with "selective"
    method: str | None = None  # with "full": "uniform" or "block"
    num_layers: int | None = None  # with "full"

    def check(self, prefix: str, allowed: Collection[str]) -> None:
        """Raise ValueError if `modules` has a module not in `allowed`, or if the settings contradict each other.

        `prefix` is the prefix of the settings' names in error messages: "" or "vision_".
        """
        if unknown := self.modules - set(allowed):
            raise ValueError(f"{prefix}recompute_modules has {sorted(unknown)}, expected some of {sorted(allowed)}")
        if (self.granularity == "selective") != bool(self.modules):
            raise ValueError(
                f"{prefix}recompute_modules is {sorted(self.modules)} with {prefix}recompute_granularity "
                f"{self.granularity!r}, expected modules with 'selective', and no modules with other values"
            )
        complete = self.method in ("uniform", "block") and (self.num_layers or 0) >= 1
        absent = self.method is None and self.num_layers is None
        if not (complete if self.granularity == "full" else absent):
            raise ValueError(
                f"{prefix}recompute_method is {self.method!r} and {prefix}recompute_num_layers {self.num_layers} with "
                f"{prefix}recompute_granularity {self.granularity!r}, expected: with granularity 'full' "
                "the method 'uniform' or 'block' and 1 or more layers, otherwise both None"
            )


FULL = Recompute("full", method="uniform", num_layers=1)


@dataclass(frozen=True)
class LoraSettings:
    """LoRA or DoRA adapters on the language model's linear layers except experts. All other weights are frozen."""

    rank: int  # `dim`
    targets: tuple[str, ...] = LINEAR_LAYERS
    regather_inputs: bool = True  # `sequence_parallel_input_regather`
    dora: bool = False  # each output also has a trained magnitude


@dataclass(frozen=True)
class TrainingSettings:
    """Data, precision, sharding and recomputation of a run.

    Raises:
        ValueError: Settings contradict each other.
    """

    seq_length: int = 4096  # tokens of a row
    micro_batch_size: int = 1  # rows of a microbatch
    global_batch_size: int | None = None  # rows of a step; None for as many as keep the pipeline stages busy
    max_patches: int | None = None  # of a row; None for a row of image tokens only
    precision: Precision = BF16
    fp8: Fp8Settings | None = None
    sharding: Sharding = Sharding.OPTIMIZER
    recompute: Recompute = field(default_factory=Recompute)  # of the language model
    vision_recompute: Recompute = field(default_factory=Recompute)
    frozen: frozenset[Component] = frozenset()
    lora: LoraSettings | None = None
    transformer_engine: bool = True  # False for megatron-core's local layers with our attention
    on_gpu: bool = False  # device of layers without Transformer Engine; tests measure them on a CPU
    delta_rule_kernels: bool = False  # flash-linear-attention is installed; implied by Transformer Engine
    fused_activation: bool = True  # `bias_activation_fusion`
    # `cross_entropy_fusion_impl`, or None without fusion. "te" overwrites the logits with their gradient. "native"
    # applies to logits in 16 bits only.
    loss_fusion: str | None = "native"
    loss_chunk_tokens: int = 2048  # tokens whose logits are in memory at a time; 0 for a whole microbatch
    packed: bool = True  # rows are packed, not padded
    expert_load: float = 1.0  # tokens of the busiest expert-parallel rank, divided by the mean
    balancing_loss: bool = True  # of routers
    overlaps_experts: bool = False  # `overlap_moe_expert_parallel_comm`
    trains_mtp: bool = False  # multi-token prediction (MTP); if it is not trained, its weights are only stored
    freezes_ngram_table: bool = False  # `freeze_ngram_table`
    fp8_ngram_table: bool = False  # `ngram_table_dtype` is float8_e4m3fn
    init_on_cpu: bool = False  # `init_model_with_meta_device`, for Megatron-FSDP
    fully_reshardable: bool = True  # `dist_ckpt_optim_fully_reshardable`

    def __post_init__(self) -> None:
        self.recompute.check("", TEXT_RECOMPUTE_MODULES)
        self.vision_recompute.check("vision_", VISION_RECOMPUTE_MODULES)
        if (self.max_patches or 0) < 0:
            raise ValueError(f"max_patches is {self.max_patches}, expected 0 or more")
        if self.expert_load < 1:
            raise ValueError(f"expert_load is {self.expert_load}, expected 1 (all ranks get equal loads) or more")
        if self.fp8 and (self.sharding.is_fsdp or not self.transformer_engine):
            raise ValueError(
                "the planner supports FP8 only with Transformer Engine and without Megatron-FSDP: set transformer_impl "
                "to 'transformer_engine', and use another sharding"
            )
        frozen = self.freezes_ngram_table or Component.LANGUAGE_MODEL in self.frozen_weights
        if self.fp8_ngram_table and not frozen:
            raise ValueError("the n-gram table in FP8 is trained, which is not supported; freeze ngram_table")
        if self.loss_fusion == "te" and not self.transformer_engine:
            raise ValueError("loss_fusion is 'te', which needs Transformer Engine; use 'native' or None without it")
        if self.trains_mtp and self.recompute.granularity == "full" and self.recompute != FULL:
            raise ValueError(
                f"recompute_method is {self.recompute.method!r} and recompute_num_layers {self.recompute.num_layers}, "
                "expected 'uniform' and 1: megatron-core supports no other values with multi-token prediction"
            )
        needs_te = {"layernorm", "moe_act"} & (self.recompute.modules | self.vision_recompute.modules)
        if needs_te and not self.transformer_engine:
            raise ValueError(f"recompute_modules has {sorted(needs_te)}, which need Transformer Engine; remove them")

    @property
    def frozen_weights(self) -> frozenset[Component]:
        """Components with frozen weights: all of them under LoRA, because only the adapters are trained."""
        return frozenset(Component) if self.lora else self.frozen

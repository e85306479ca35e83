"""Functions that return the configuration of a kind of training, or that change a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from qwen3vl_bridge.training import allocator

from qwen3vl_recipes.registry import Recipe

if TYPE_CHECKING:
    from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

K = 1024
# Most image patches per row of 8K tokens with separate vision ranks: 1.15 times the mean in the packing benchmark.
DIST_TRAIN_PATCHES = 27_107


def sft(
    size: str, *, family: str = "qwen3_vl", seq_length: int = 8 * K, global_batch_size: int = 32
) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 8K tokens.

    Return the configuration. Conversations are packed into rows, and all components of the model are trained.

    Args:
        size: size of the model, a key of the family's presets.
        family: name of the family in the registry.
        seq_length: number of tokens in a row.
        global_batch_size: number of rows in a step.
    """
    import qwen3vl_bridge
    from qwen3vl_bridge import registry
    from qwen3vl_bridge.training.config import Qwen3VLCheckpointConfig, Qwen3VLConfigContainer

    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config

    presets = registry.family(family).presets
    hf_model = presets.hub_ids(size)[0]
    model = AutoBridge.from_hf_config(presets.hf_config(size)).to_megatron_provider(load_weights=False)
    model.hf_model_id, model.seq_length = hf_model, seq_length
    # Divide losses by the number of tokens in the global batch, so that the loss does not depend on packing.
    model.calculate_per_token_loss = True
    if size in ("2B", "0.8B"):
        # A loss in chunks computes the output layer twice, which is 6 to 11 % of the FLOPs of these small models. They
        # have enough memory for larger chunks.
        model.loss_chunk_tokens = 8 * K
    cfg = Qwen3VLConfigContainer(
        model=model,
        dataset=qwen3vl_bridge.Qwen3VLConversationProvider(
            hf_processor_path=hf_model,
            seq_length=seq_length,
            on_long="drop",
            on_bad="drop",  # a damaged image among millions should not stop a run; it is counted
            num_workers=4,
            seed=1234,
        ),
        # A microbatch is one packed row.
        train=config.TrainingConfig(
            micro_batch_size=1,
            global_batch_size=global_batch_size,
            train_iters=1000,
            exit_signal_handler=True,  # save and exit on SIGTERM
            exit_signal_handler_for_dataloader=True,  # launchers send SIGTERM to data loader workers, too
            manual_gc=True,
            manual_gc_interval=100,
        ),
        validation=config.ValidationConfig(eval_interval=100, eval_iters=8),
        optimizer=config.OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            min_lr=1e-6,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-8,
            clip_grad=1.0,
            use_distributed_optimizer=True,
        ),
        scheduler=config.SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=50, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=config.DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            overlap_grad_reduce=True,  # batches without images give the tower gradients too, so that no rank waits
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            average_in_collective=False,  # losses are sums over tokens
        ),
        checkpoint=Qwen3VLCheckpointConfig(
            save_interval=200,
            most_recent_k=2,
            ckpt_format="torch_dist",
            dist_ckpt_optim_fully_reshardable=True,  # can be loaded with other parallel sizes
        ),
        tokenizer=config.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hf_model),
        # Megatron-Bridge would filter out all warnings, including warnings about dropped samples and skipped steps.
        logger=config.LoggerConfig(log_interval=10, filter_warnings=False),
        rng=config.RNGConfig(seed=1234),
        # `guard` checks losses and gradients before weights change, and names samples.
        rerun_state_machine=config.RerunStateMachineConfig(check_for_nan_in_loss=False),
        mixed_precision="bf16_mixed",
        env_vars=environment(experts=bool(model.moe_layers)),
    )
    return recompute_layers(cfg)


def environment(*, experts: bool) -> dict[str, Any]:
    """Return the environment variables of a recipe. Megatron-Bridge sets those that the user has not set.

    Expandable segments reduce fragmentation on nearly full GPUs, and need NCCL_GRAPH_REGISTER=0. Megatron-Bridge's
    recipes set both. `experts` is True for a model with experts.
    """
    # With this variable, Transformer Engine computes the experts of a layer in one kernel on Hopper.
    grouped = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"} if experts else {}
    if allocator.NEWER_VARIABLE in os.environ:
        return grouped
    return grouped | {allocator.VARIABLE: allocator.SETTING, "NCCL_GRAPH_REGISTER": "0"}


def sft_fsdp(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning with Megatron-FSDP, rows of 8K tokens.

    Return the configuration. `settings` are arguments of `sft`.
    """
    return fsdp(sft(size, **settings))


def sft_32k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 32K tokens.

    Return the configuration. `settings` are arguments of `sft`.
    """
    return sft(size, **{"seq_length": 32 * K, "global_batch_size": 16} | settings)


def sft_128k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 128K tokens.

    Return the configuration. `settings` are arguments of `sft`.
    """
    return sft(size, **{"seq_length": 128 * K, "global_batch_size": 8} | settings)


def sft_256k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 256K tokens.

    Return the configuration. `settings` are arguments of `sft`.
    """
    return sft(size, **{"seq_length": 256 * K, "global_batch_size": 4} | settings)


def sft_1m(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 1M tokens, with YaRN.

    Return the configuration. `settings` are arguments of `sft`.
    """
    cfg = sft(size, **{"seq_length": 1024 * K, "global_batch_size": 4} | settings)
    # The rotary embedding was trained on 256K positions.
    cfg.model.position_embedding_type, cfg.model.yarn_rotary_scaling_factor = "yarn", 4.0
    cfg.model.yarn_original_max_position_embeddings = 256 * K
    cfg.dataset.max_patches = 1024 * K  # a quarter of the row are vision tokens
    return cfg


def peft(size: str, *, dora: bool = False, **settings: Any) -> Qwen3VLConfigContainer:
    """LoRA, rows of 8K tokens.

    Return the configuration. Adapters are added to the language model's linear layers except routed experts.
    Checkpoints contain only adapters.

    Args:
        size: size of the model.
        dora: use DoRA instead of LoRA.
        **settings: arguments of `sft`.
    """
    from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA

    cfg = sft(size, **settings)
    cfg.peft = (Qwen3VLDoRA if dora else Qwen3VLLoRA)(dim=32, alpha=32)
    if getattr(cfg.model, "linear_attention_freq", None):  # Megatron-Bridge's default omits linear attention
        cfg.peft.target_modules = [*cfg.peft.target_modules, "in_proj", "out_proj"]
    keep_vision_activations(cfg)  # the tower has no adapters, so that it stores no activations
    cfg.optimizer.lr, cfg.optimizer.min_lr, cfg.optimizer.weight_decay = 1e-4, 1e-5, 0.0
    cfg.scheduler.start_weight_decay = cfg.scheduler.end_weight_decay = 0.0
    return cfg


def peft_dora(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """DoRA, rows of 8K tokens.

    Return the configuration. DoRA supports neither tensor nor pipeline parallelism. `settings` are arguments of `sft`.
    """
    return peft(size, dora=True, **settings)


def dpo(size: str, *, kind: str = "dpo", **settings: Any) -> Qwen3VLConfigContainer:
    """DPO with LoRA, rows of 8K tokens.

    Return the configuration. The data are pairs of a chosen and a rejected answer. The reference is the model without
    its adapters. `settings` are arguments of `sft`.
    """
    cfg = peft(size, **settings)
    cfg.objective.kind = kind
    cfg.optimizer.lr, cfg.optimizer.min_lr = 5e-6, 5e-7
    if cfg.model.moe_layers:
        cfg.model.moe_router_load_balancing_type = "none"  # routers are frozen
    return cfg


def kto(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """KTO with LoRA, rows of 8K tokens.

    Return the configuration. The data are labeled answers. The reference is the model without its adapters. `settings`
    are arguments of `sft`.
    """
    return dpo(size, kind="kto", **settings)


def embedding(size: str, *, kind: str = "embedding", **settings: Any) -> Qwen3VLConfigContainer:
    """Embedding model with LoRA (InfoNCE), rows of 8K tokens.

    Return the configuration. Image and video limits are those of Qwen3-VL-Embedding. `settings` are arguments of `sft`.
    """
    from qwen3vl_bridge.data.encoding import VisionLimits

    cfg = peft(size, **settings)
    cfg.objective.kind = kind
    cfg.dataset.vision = VisionLimits(
        image_min_pixels=4 * 1024, image_max_pixels=1800 * 1024, video_fps=1.0, video_max_frames=64
    )
    return cfg


def reranker(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Reranker with LoRA, rows of 8K tokens.

    Return the configuration. Image and video limits are those of Qwen3-VL-Reranker. `settings` are arguments of `sft`.
    """
    return embedding(size, kind="reranker", **settings)


def pretrain(size: str, *, global_batch_size: int = 512, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining, rows of 8K tokens.

    Return the configuration. Rows are assigned to ranks by cost. `settings` are arguments of `sft`.
    """
    cfg = sft(size, global_batch_size=global_batch_size, **settings)
    cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 100_000, 1000
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-4, 1e-5
    cfg.validation.eval_interval, cfg.checkpoint.save_interval = 1000, 500
    cfg.dataset.balance_over = global_batch_size  # all ranks process rows of similar cost at the same time
    return cfg


def pretrain_fp8_cs(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining in fp8, rows of 8K tokens.

    Return the configuration. Each tensor has its own scale (current scaling). The first and the last layer stay in
    bfloat16. `settings` are arguments of `pretrain`.
    """
    return use_fp8(pretrain(size, **settings), "bf16_with_fp8_current_scaling_mixed")


def pretrain_fp8_mx(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining in mxfp8, rows of 8K tokens.

    Return the configuration. `settings` are arguments of `pretrain`.
    """
    return use_fp8(pretrain(size, **settings), "bf16_with_mxfp8_mixed")


def on(
    gpus: int,
    kind: Callable[..., Qwen3VLConfigContainer],
    size: str,
    *,
    family: str = "qwen3_vl",
    gpu: str = "H100",
    rows: int | None = None,
    recompute: int | Literal["all"] | None = None,
    overlap: bool = False,
    init_on_cpu: bool = False,
    reshardable: bool = True,
    **sizes: int,
) -> Recipe:
    """Return a recipe for a number of GPUs.

    Args:
        gpus: number of GPUs.
        kind: kind of training, one of the functions above such as `sft`.
        size: size of the model.
        family: family of the model.
        gpu: kind of GPU.
        rows: `global_batch_size`; None for the kind's default.
        recompute: number of layers for `recompute_layers`; None to keep what the kind sets.
        overlap: overlap the expert all-to-all with compute; not possible with full recomputation.
        init_on_cpu: load the initial weights of the full model on the CPU before Megatron-FSDP shards it.
        reshardable: value of `dist_ckpt_optim_fully_reshardable`; False if it would need too much host memory.
        **sizes: arguments of `set_parallel_sizes`.
    """

    def build() -> Qwen3VLConfigContainer:
        cfg = kind(size, family=family) if rows is None else kind(size, family=family, global_batch_size=rows)
        cfg = set_parallel_sizes(cfg, **sizes)
        cfg.model.overlap_moe_expert_parallel_comm = overlap
        cfg.model.init_model_with_meta_device = init_on_cpu
        cfg.checkpoint.dist_ckpt_optim_fully_reshardable = reshardable
        return cfg if recompute is None else recompute_layers(cfg, recompute)

    words = [f"{name.upper()} {number}" for name, number in sizes.items()]
    if recompute is not None:
        words.append(f"{'activations' if recompute == 'all' else f'{recompute} layers of a stage'} recomputed")
    if overlap:
        words.append("expert all-to-all overlapped with compute")
    title = (kind.__doc__ or "").partition(".\n")[0].removesuffix(".")
    machine = f"one {gpu}" if gpus == 1 else f"{gpus} {gpu}"
    return Recipe(build, gpus, gpu, f"{title}, {machine}{': ' if words else ''}{', '.join(words)}.")


# The functions below change a configuration in place and return it.


def fsdp(cfg: Qwen3VLConfigContainer) -> Qwen3VLConfigContainer:
    """Shard weights, gradients and optimizer states with Megatron-FSDP, and save in its checkpoint format.

    Return `cfg`, which is changed in place.
    """
    import torch

    cfg.ddp.use_megatron_fsdp = True
    cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    cfg.ddp.overlap_param_gather = cfg.ddp.overlap_grad_reduce = True
    cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32  # Megatron-FSDP ignores grad_reduce_in_fp32
    cfg.model.gradient_accumulation_fusion = False  # Megatron-FSDP has no gradient buffers
    cfg.checkpoint.ckpt_format, cfg.checkpoint.strict_fsdp_dtensor_load = "fsdp_dtensor", True
    return cfg


def use_fp8(cfg: Qwen3VLConfigContainer, precision: str) -> Qwen3VLConfigContainer:
    """Use FP8 for the linear layers of the text model, and return `cfg`.

    The vision tower, embeddings, the router and the output layer stay in bfloat16.

    Args:
        cfg: changed in place.
        precision: name of a mixed precision of Megatron-Bridge with FP8, such as "bf16_with_mxfp8_mixed".
    """
    cfg.mixed_precision = precision
    # Set even if Transformer Engine is not installed. The run then reports that it is missing.
    cfg.model.transformer_impl = "transformer_engine"
    if cfg.model.num_moe_experts:
        cfg.model.moe_grouped_gemm = True
    return cfg


def recompute_layers(cfg: Qwen3VLConfigContainer, layers: int | Literal["all"] = 0) -> Qwen3VLConfigContainer:
    """Recompute the vision tower's layers in the backward pass, and `layers` layers of the language model.

    In rows full of images, the vision tower's activations take as much memory as the language model's, and recomputing
    the tower takes little time. Recomputing all layers of both takes a third more FLOPs.

    Args:
        cfg: changed in place.
        layers: number of language-model layers in each pipeline stage, or "all".
    """
    model = cfg.model
    model.vision_recompute_granularity, model.vision_recompute_method = "full", "uniform"
    model.vision_recompute_num_layers = 1
    if layers == "all":
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    elif layers:
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "block", layers
    return cfg


def keep_vision_activations(cfg: Qwen3VLConfigContainer) -> Qwen3VLConfigContainer:
    """Turn off recomputation of the vision tower in `cfg`, and return `cfg`."""
    model = cfg.model
    model.vision_recompute_granularity = model.vision_recompute_method = model.vision_recompute_num_layers = None
    return cfg


def set_parallel_sizes(
    cfg: Qwen3VLConfigContainer, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1
) -> Qwen3VLConfigContainer:
    """Set the parallel sizes. The remaining ranks are data-parallel. Experts are not sharded by tensor parallelism.

    If the number of layers is not a multiple of `pp`, the embedding and the output layer each count as a layer when
    layers are divided over pipeline stages.
    """
    model = cfg.model
    uneven = model.num_layers % pp > 0
    model.account_for_embedding_in_pipeline_split = model.account_for_loss_in_pipeline_split = uneven
    model.tensor_model_parallel_size, model.sequence_parallel = tp, tp > 1
    model.pipeline_model_parallel_size, model.context_parallel_size = pp, cp
    model.expert_model_parallel_size = ep
    if model.num_moe_experts:
        model.expert_tensor_parallel_size = 1
    return cfg


def dist_train(
    cfg: Qwen3VLConfigContainer, *, vision: int, language: int, vision_tp: int = 1
) -> Qwen3VLConfigContainer:
    """Put the vision tower on the first ranks and the language model on the others.

    `set_parallel_sizes` applies to the language model.

    Args:
        cfg: changed in place.
        vision: number of vision ranks.
        language: number of language ranks.
        vision_tp: tensor-parallel size of the vision tower.
    """
    ranks = cfg.model.dist_train
    ranks.use_dist_train, ranks.vision_tensor_model_parallel_size = True, vision_tp
    ranks.vision_world_size, ranks.language_world_size = vision, language
    cfg.model.variable_seq_lengths = True  # the size of tensors that modules send depends on the images in a row
    cfg.dist.use_decentralized_pg = True  # each module has its own process groups,
    cfg.dist.use_gloo_process_groups = False  # and Megatron-Bridge creates no gloo groups for them
    if cfg.dataset.max_patches is None:
        cfg.dataset.max_patches = DIST_TRAIN_PATCHES * cfg.dataset.seq_length // (8 * K)
    return cfg

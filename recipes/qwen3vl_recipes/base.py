"""What recipes of all sizes share: the kinds of training, and how a model is split over GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from qwen3vl_recipes.registry import Recipe

if TYPE_CHECKING:
    from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

K = 1024
# Patches of a row of 8K tokens with separate vision ranks: 1.15 times the mean of the mix in docs/packing.md.
DIST_TRAIN_PATCHES = 27_107


def sft(
    size: str, *, family: str = "qwen3_vl", seq_length: int = 8 * K, global_batch_size: int = 32
) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 8K tokens.

    Conversations are packed into rows; the whole model is trained.

    Args:
        size: of the model, a key of its family's presets.
        family: a name that `registry.family` knows.
        seq_length: tokens of a row, 8K unless given.
        global_batch_size: rows of a step.
    """
    import qwen3vl_bridge
    from qwen3vl_bridge import registry
    from qwen3vl_bridge.training.config import Qwen3VLConfigContainer

    import torch
    from megatron.bridge import AutoBridge
    from megatron.bridge.training import config

    presets = registry.family(family).presets
    hf_model = presets.hub_ids(size)[0]
    model = AutoBridge.from_hf_config(presets.hf_config(size)).to_megatron_provider(load_weights=False)
    model.hf_model_id, model.seq_length = hf_model, seq_length
    # Losses are divided once, by the tokens of the global batch, independent of packing.
    model.calculate_per_token_loss = True
    if size in ("2B", "0.8B"):
        # In chunks the output layer's product is computed twice, which would be 6 to 11 % of a step's FLOPs; and these
        # have memory left.
        model.loss_chunk_tokens = 8 * K
    cfg = Qwen3VLConfigContainer(
        model=model,
        dataset=qwen3vl_bridge.Qwen3VLConversationProvider(
            hf_processor_path=hf_model,
            seq_length=seq_length,
            on_long="drop",
            on_bad="drop",  # a damaged image among millions need not stop a run; it is counted
            pixel_dtype=torch.bfloat16,  # dtype of the tower; half the bytes to copy to the device
            num_workers=4,
            seed=1234,
        ),
        # A microbatch is one packed row.
        train=config.TrainingConfig(
            micro_batch_size=1,
            global_batch_size=global_batch_size,
            train_iters=1000,
            exit_signal_handler=True,  # SIGTERM saves and exits;
            exit_signal_handler_for_dataloader=True,  # launchers send it to the workers, too
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
            overlap_grad_reduce=True,  # batches without images have gradients for the tower too, so no rank waits
            overlap_param_gather=True,
            grad_reduce_in_fp32=True,
            average_in_collective=False,  # losses are sums over tokens
        ),
        checkpoint=config.CheckpointConfig(
            save_interval=200,
            most_recent_k=2,
            ckpt_format="torch_dist",
            dist_ckpt_optim_fully_reshardable=True,  # so that it loads at any parallel sizes
        ),
        tokenizer=config.TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=hf_model),
        # Megatron-Bridge would filter all warnings out, also those of dropped samples and skipped steps.
        logger=config.LoggerConfig(log_interval=10, filter_warnings=False),
        rng=config.RNGConfig(seed=1234),
        # `guard` checks losses and gradients before weights change, and names samples.
        rerun_state_machine=config.RerunStateMachineConfig(check_for_nan_in_loss=False),
        mixed_precision="bf16_mixed",
        env_vars=environment(experts=bool(model.moe_layers)),
    )
    return recompute_layers(cfg)


def environment(*, experts: bool) -> dict[str, Any]:
    """Variables that Megatron-Bridge's set-up sets unless the user has.

    Expandable segments reduce fragmentation on nearly full GPUs; Megatron-Bridge's recipes set the same two, the second
    because of the first. With experts, Transformer Engine computes those of a layer in one kernel on a Hopper.
    """
    grouped = {"NVTE_USE_CUTLASS_GROUPED_GEMM": "1"} if experts else {}
    if "PYTORCH_ALLOC_CONF" in os.environ:  # the newer name, which the one here would put out of force
        return grouped
    return grouped | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NCCL_GRAPH_REGISTER": "0"}


def sft_fsdp(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning with Megatron-FSDP, rows of 8K tokens."""
    return fsdp(sft(size, **settings))


def sft_32k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 32K tokens."""
    return sft(size, **{"seq_length": 32 * K, "global_batch_size": 16} | settings)


def sft_128k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 128K tokens."""
    return sft(size, **{"seq_length": 128 * K, "global_batch_size": 8} | settings)


def sft_256k(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Full fine-tuning, rows of 256K tokens."""
    return sft(size, **{"seq_length": 256 * K, "global_batch_size": 4} | settings)


def peft(size: str, *, dora: bool = False, **settings: Any) -> Qwen3VLConfigContainer:
    """LoRA, rows of 8K tokens.

    It adapts the language model's linear layers except routed experts; checkpoints contain only the adapters.
    `settings` are other arguments of `sft`.
    """
    from qwen3vl_bridge import Qwen3VLDoRA, Qwen3VLLoRA

    cfg = sft(size, **settings)
    cfg.peft = (Qwen3VLDoRA if dora else Qwen3VLLoRA)(dim=32, alpha=32)
    if getattr(cfg.model, "linear_attention_freq", None):  # Megatron-Bridge's default omits its layers
        cfg.peft.target_modules = [*cfg.peft.target_modules, "in_proj", "out_proj"]
    keep_tower(cfg)  # without adapters no activations need to be stored
    cfg.optimizer.lr, cfg.optimizer.min_lr, cfg.optimizer.weight_decay = 1e-4, 1e-5, 0.0
    cfg.scheduler.start_weight_decay = cfg.scheduler.end_weight_decay = 0.0
    return cfg


def peft_dora(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """DoRA, rows of 8K tokens.

    It needs a model without tensor and pipeline parallelism.
    """
    return peft(size, dora=True, **settings)


def pretrain(size: str, *, global_batch_size: int = 512, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining, rows of 8K tokens.

    Rows are assigned to ranks by cost. `settings` are other arguments of `sft`.
    """
    cfg = sft(size, global_batch_size=global_batch_size, **settings)
    cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 100_000, 1000
    cfg.optimizer.lr, cfg.optimizer.min_lr = 1e-4, 1e-5
    cfg.validation.eval_interval, cfg.checkpoint.save_interval = 1000, 500
    cfg.dataset.balance_over = global_batch_size  # every rank processes rows of similar cost at the same time
    return cfg


def pretrain_fp8_cs(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining in fp8, rows of 8K tokens.

    Each tensor has a scale (current scaling); the first and the last layer stay in bfloat16.
    """
    return in_8_bits(pretrain(size, **settings), "bf16_with_fp8_current_scaling_mixed")


def pretrain_fp8_mx(size: str, **settings: Any) -> Qwen3VLConfigContainer:
    """Pretraining in mxfp8, rows of 8K tokens."""
    return in_8_bits(pretrain(size, **settings), "bf16_with_mxfp8_mixed")


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
    made_on_host: bool = False,
    **sizes: int,
) -> Recipe:
    """A recipe for this number of GPUs.

    Args:
        gpus: their number.
        kind: one of the functions above.
        size: of the model.
        family: of the model.
        gpu: kind of GPU.
        rows: `global_batch_size`, if it differs from the kind's.
        recompute: as `layers` of `recompute_layers`; None to leave recomputation as the kind sets it.
        overlap: run experts' all-to-all under computation, which full recomputation excludes.
        made_on_host: build the model there, where it is whole before Megatron-FSDP shards it; it needs first weights.
        **sizes: parallel sizes, as for `split`.
    """

    def build() -> Qwen3VLConfigContainer:
        cfg = kind(size, family=family) if rows is None else kind(size, family=family, global_batch_size=rows)
        cfg = split(cfg, **sizes)
        cfg.model.overlap_moe_expert_parallel_comm = overlap
        cfg.model.init_model_with_meta_device = made_on_host
        return cfg if recompute is None else recompute_layers(cfg, recompute)

    words = [f"{name.upper()} {number}" for name, number in sizes.items()]
    if recompute is not None:
        words.append(f"{'activations' if recompute == 'all' else f'{recompute} layers of a stage'} recomputed")
    if overlap:
        words.append("experts' all-to-all under computation")
    title = (kind.__doc__ or "").partition(".\n")[0].removesuffix(".")
    machine = f"one {gpu}" if gpus == 1 else f"{gpus} {gpu}"
    return Recipe(build, gpus, gpu, f"{title}, {machine}{': ' if words else ''}{', '.join(words)}.")


# All below change a configuration in place and return it.


def fsdp(cfg: Qwen3VLConfigContainer) -> Qwen3VLConfigContainer:
    """Shard weights, gradients and optimizer with Megatron-FSDP, and use its checkpoint format."""
    import torch

    cfg.ddp.use_megatron_fsdp = True
    cfg.ddp.data_parallel_sharding_strategy = "optim_grads_params"
    cfg.ddp.overlap_param_gather = cfg.ddp.overlap_grad_reduce = True
    cfg.ddp.megatron_fsdp_main_grads_dtype = torch.float32  # it does not follow grad_reduce_in_fp32
    cfg.model.gradient_accumulation_fusion = False  # gradients have no buffer to accumulate into
    cfg.checkpoint.ckpt_format, cfg.checkpoint.strict_fsdp_dtensor_load = "fsdp_dtensor", True
    return cfg


def in_8_bits(cfg: Qwen3VLConfigContainer, precision: str) -> Qwen3VLConfigContainer:
    """Compute and store the linear layers of the text model in 8 bits, by this mixed precision of Megatron-Bridge; the
    vision tower, embeddings, the router and the output layer stay in bfloat16.
    """
    cfg.mixed_precision = precision
    # It needs Transformer Engine: if it is not installed, the run reports what is missing.
    cfg.model.transformer_impl = "transformer_engine"
    if cfg.model.num_moe_experts:
        cfg.model.moe_grouped_gemm = True
    return cfg


def recompute_layers(cfg: Qwen3VLConfigContainer, layers: int | Literal["all"] = 0) -> Qwen3VLConfigContainer:
    """Recompute the vision tower's layers in the backward pass, and this many language-model layers of each pipeline
    stage.

    For rows full of images the tower's activations take as much memory as the language model's; the cost in time is
    small. To recompute all layers takes a third more FLOPs.
    """
    model = cfg.model
    model.vision_recompute_granularity, model.vision_recompute_method = "full", "uniform"
    model.vision_recompute_num_layers = 1
    if layers == "all":
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "uniform", 1
    elif layers:
        model.recompute_granularity, model.recompute_method, model.recompute_num_layers = "full", "block", layers
    return cfg


def keep_tower(cfg: Qwen3VLConfigContainer) -> Qwen3VLConfigContainer:
    """Turn off recomputation of the vision tower."""
    model = cfg.model
    model.vision_recompute_granularity = model.vision_recompute_method = model.vision_recompute_num_layers = None
    return cfg


def split(cfg: Qwen3VLConfigContainer, *, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1) -> Qwen3VLConfigContainer:
    """Set the parallel sizes; the remaining ranks are data-parallel. Tensor-parallel ranks do not split experts.

    Where pipeline stages do not divide the layers, the embedding and the output layer take the place of one each.
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
    """Put the vision tower on ranks of its own, the first ones; `split` then applies to the remaining ranks.

    Args:
        cfg: changed in place.
        vision: number of vision ranks.
        language: number of language ranks.
        vision_tp: tensor-parallel size of the vision tower.
    """
    ranks = cfg.model.dist_train
    ranks.use_dist_train, ranks.vision_tensor_model_parallel_size = True, vision_tp
    ranks.vision_world_size, ranks.language_world_size = vision, language
    cfg.model.variable_seq_lengths = True  # sizes between the modules depend on a row's images
    cfg.dist.use_decentralized_pg = True  # each module has separate groups,
    cfg.dist.use_gloo_process_groups = False  # and Megatron-Bridge creates none of gloo for them
    if cfg.dataset.max_patches is None:
        cfg.dataset.max_patches = DIST_TRAIN_PATCHES * cfg.dataset.seq_length // (8 * K)
    return cfg

"""Fine-tune a small Qwen3-VL to read handwritten digits: the main job's recipe, for one machine without CUDA.

What lives here: every setting of that run. What may not: making its data and checkpoint (`examples/digits`).
"""

from pathlib import Path

import qwen3vl_bridge

from megatron.bridge import AutoBridge
from megatron.bridge.training.config import (
    CheckpointConfig,
    DistributedDataParallelConfig,
    LoggerConfig,
    OptimizerConfig,
    RNGConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)

SEQ_LENGTH = 512


def qwen3_vl_digits_sft_config(
    *, hf_path: str | Path, data_path: str | Path, megatron_path: str | Path, save: str | Path
) -> qwen3vl_bridge.Qwen3VLConfigContainer:
    """Full fine-tuning on short conversations about one picture each, several packed into every row.

    Args:
        hf_path: the Hugging Face checkpoint: its config and processor.
        data_path: folder with `train.jsonl` and `test.jsonl`.
        megatron_path: the imported checkpoint to start from.
        save: folder of the run's own checkpoints; a run that is there already is continued.
    """
    model = AutoBridge.from_hf_pretrained(str(hf_path)).to_megatron_provider(load_weights=False)
    model.seq_length = SEQ_LENGTH
    return qwen3vl_bridge.Qwen3VLConfigContainer(
        model=model,
        dataset=qwen3vl_bridge.Qwen3VLConversationProvider(
            train_path=str(Path(data_path) / "train.jsonl"),
            valid_path=str(Path(data_path) / "test.jsonl"),
            hf_processor_path=str(hf_path),
            seq_length=SEQ_LENGTH,
            seed=1234,
            num_workers=1,
        ),
        # A microbatch is one packed row.
        train=TrainingConfig(micro_batch_size=1, global_batch_size=2, train_iters=400),
        validation=ValidationConfig(eval_interval=100, eval_iters=10),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=3e-3,
            min_lr=0.0,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=1.0,
            bf16=model.bf16,
            params_dtype=model.params_dtype,
            use_distributed_optimizer=True,
        ),
        scheduler=SchedulerConfig(
            lr_decay_style="cosine", lr_warmup_iters=40, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            use_distributed_optimizer=True,
            data_parallel_sharding_strategy="optim_grads_params",
            grad_reduce_in_fp32=True,
            average_in_collective=False,
        ),
        checkpoint=CheckpointConfig(
            pretrained_checkpoint=str(megatron_path),
            load=str(save),
            save=str(save),
            save_interval=200,
            ckpt_format="fsdp_dtensor",
            strict_fsdp_dtensor_load=True,
        ),
        tokenizer=TokenizerConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(hf_path)),
        logger=LoggerConfig(log_interval=10),
        rng=RNGConfig(seed=1234),
    )

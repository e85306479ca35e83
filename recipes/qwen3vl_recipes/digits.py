"""Fine-tune a small model to read handwritten digits: the recipes of the demo, for one machine without CUDA."""

from qwen3vl_recipes.base import dpo, fsdp, keep_vision_activations, reranker, sft
from qwen3vl_recipes.registry import recipe


@recipe(gpus=0)
def qwen3_vl_digits_sft_config():
    """Full fine-tuning on short conversations about one image each; --hf-model may be any dense model."""
    return _digits("2B", "qwen3_vl")


@recipe(gpus=0)
def qwen35_vl_digits_sft_config():
    """The same as qwen3_vl_digits_sft_config, for a Qwen3.5-VL."""
    return _digits("0.8B", "qwen3_5")


@recipe(gpus=0)
def qwen38_flash_next_digits_sft_config():
    """The same as qwen3_vl_digits_sft_config, for a Qwen3.8-Flash-Next."""
    return _digits("Flash-Next", "qwen4_exp")


@recipe(gpus=0)
def qwen3_vl_digits_dpo_config():
    """DPO with LoRA on pairs of a right and a wrong digit, from a model that qwen3_vl_digits_sft_config has trained."""
    cfg = dpo("2B", seq_length=512, global_batch_size=2)
    cfg.peft.adapt_vision_model = cfg.peft.adapt_vision_projection = True
    cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 100, 10
    cfg.objective.rpo_alpha = 1.0  # the right digit stays likely
    cfg.optimizer.lr, cfg.optimizer.min_lr = 3e-4, 0.0
    cfg.validation.eval_interval, cfg.validation.eval_iters = 50, 5
    cfg.dataset.num_workers = 1
    return cfg


@recipe(gpus=0)
def qwen3_vl_digits_reranker_config():
    """Reranker that says whether a digit is the one in an image, from a model of qwen3_vl_digits_sft_config."""
    cfg = reranker("2B", seq_length=2048, global_batch_size=2)
    cfg.peft = None  # a tiny model has few weights
    cfg.dataset.vision = type(cfg.dataset.vision)()
    cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 900, 30
    cfg.optimizer.lr, cfg.optimizer.min_lr = 2e-3, 0.0
    cfg.validation.eval_interval, cfg.validation.eval_iters = 100, 10
    cfg.dataset.num_workers = 1
    return cfg


def _digits(size, family):
    # The activations of a tiny model need little memory.
    cfg = keep_vision_activations(fsdp(sft(size, family=family, seq_length=512, global_batch_size=2)))
    cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 400, 40
    cfg.optimizer.lr, cfg.optimizer.min_lr = 3e-3, 0.0
    cfg.validation.eval_interval, cfg.validation.eval_iters = 100, 10
    cfg.dataset.num_workers = 1
    return cfg

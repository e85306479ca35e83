"""A recipe's twin: the same settings for a tiny model on a few ranks, split in the same ways."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from qwen3vl_recipes.base import dist_train
from qwen3vl_recipes.paths import set_paths
from qwen3vl_recipes.registry import recipes

WAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
ROWS = 4


@dataclass(frozen=True)
class Pattern:
    """The ways in which a recipe splits a model: 1, or 2 for any more.

    Attributes:
        tensor, pipeline, context, expert, data: parallel sizes; of the language model, where vision has its own ranks.
        vision: these ranks; 0 where there are none.
        vision_tensor: tensor parallelism of these.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    vision: int = 0
    vision_tensor: int = 1

    @property
    def language(self) -> int:
        """Ranks that have the language model."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks(self) -> int:
        """How many the twin needs."""
        return self.vision + self.language


# On four ranks no twin has vision on its own ones and all the rest of its recipe's ways; together they have each.
_OF_MODULES = {
    "qwen3_vl_30b_a3b_sft_dist_train_config": Pattern(tensor=2, expert=2, vision=2),
    "qwen3_vl_235b_a22b_sft_dist_train_config": Pattern(pipeline=2, vision=2, vision_tensor=2),
}


def family(name: str) -> str:
    """The tiny checkpoint that is like the recipe's size."""
    of_qwen3_5 = name.startswith("qwen35_vl_")
    size = name.removeprefix("qwen35_vl_" if of_qwen3_5 else "qwen3_vl_")
    with_experts = size.startswith("proxy") or re.match(r"\d+b_a\d+b_", size)
    kind = "moe" if with_experts else "tied" if size.startswith(("800m_", "2b_", "4b_")) else "untied"
    return f"qwen3_5 {kind}" if of_qwen3_5 else kind


@cache
def pattern(name: str) -> Pattern:
    """Of a recipe. It has data parallelism where that leaves it at four ranks."""
    if name in _OF_MODULES:
        return _OF_MODULES[name]
    recipe = recipes()[name]
    model = recipe.function().model
    sizes = [getattr(model, way) for way in WAYS]
    data = recipe.gpus
    for size in sizes:
        data //= size
    tensor, pipeline, context = (min(size, 2) for size in sizes)
    together = tensor * pipeline * context
    expert = min(model.expert_model_parallel_size, 2)
    return Pattern(tensor, pipeline, context, expert, data=2 if data > 1 and together <= 2 else 1)


def twin(
    name: str, folder: str, data: str, *, whole: bool = False, exact: bool = False, save: str | None = None
) -> Any:
    """The configuration of a recipe's twin."""
    cfg = set_paths(recipes()[name].function(), hf_path=folder, data_path=data, pretrained_checkpoint=folder)
    split = pattern(name)
    sizes = [1] * len(WAYS) if whole else [split.tensor, split.pipeline, split.context]
    for way, size in zip(WAYS, sizes, strict=True):
        setattr(cfg.model, way, size)
    cfg.model.expert_model_parallel_size = 1 if whole else split.expert
    cfg.model.sequence_parallel = cfg.model.sequence_parallel and sizes[0] > 1
    if cfg.model.recompute_granularity == "selective":  # in modules of Transformer Engine; no figure depends on it
        cfg.model.recompute_granularity = cfg.model.recompute_modules = None
        cfg.model.transformer_impl, cfg.model.moe_grouped_gemm = "local", False
    if whole:
        cfg.model.account_for_embedding_in_pipeline_split = cfg.model.account_for_loss_in_pipeline_split = False
    # Two layers on the first stage are fewer than there are DeepStack taps; released models have enough there.
    cfg.model.variable_seq_lengths = cfg.model.pipeline_model_parallel_size > 1
    if split.vision:
        dist_train(cfg, vision=split.vision, language=split.language, vision_tp=split.vision_tensor)
    if exact:
        cfg.mixed_precision = None
    cfg.model.seq_length = cfg.dataset.seq_length = 256
    cfg.dataset.num_workers, cfg.dataset.pad_to_multiple_of = 0, 8  # the same rows, however they are split
    cfg.train.global_batch_size, cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = ROWS, 1, 0
    if cfg.dataset.balance_over:
        cfg.dataset.balance_over = ROWS
    cfg.validation.eval_interval = None
    cfg.checkpoint.save, cfg.checkpoint.load, cfg.logger.tensorboard_dir = save, None, None
    return cfg

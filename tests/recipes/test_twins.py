"""Every recipe trains: one step of its twin equals the step of the same tiny model in one process.

The twin has the recipe's settings, a tiny model, and at most two ranks for each kind of parallelism of the recipe.
"""

import re
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.dcp import read_metadata
from qwen3vl_bridge.checkpoint.formats.megatron import find_iteration

import pytest
import torch
import torch.distributed as dist
from megatron.bridge.training.callbacks import Callback, CallbackContext
from qwen3vl_recipes.base import dist_train
from qwen3vl_recipes.paths import set_paths
from qwen3vl_recipes.registry import recipes

from tests.helpers.forked import results_of_ranks
from tests.helpers.noise import SEEDS, allowed, check, rounded_folder
from tests.models.qwen3_5.tiny import make_checkpoint
from tests.models.qwen4_exp.tiny import make_checkpoint as make_qwen4_exp
from tests.training.running import train

WAYS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
ROWS = 4


@dataclass(frozen=True)
class Pattern:
    """Return the parallel sizes of a recipe, limited to 2."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1
    vision: int = 0  # ranks of its own; the other sizes are the language model's then
    vision_tensor: int = 1

    @property
    def language(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def ranks(self) -> int:
        return self.vision + self.language


# On four ranks no twin has vision on its own ones and all the rest of its recipe's ways; together they have each.
_OF_MODULES = {
    "qwen3_vl_30b_a3b_sft_dist_train_config": Pattern(tensor=2, expert=2, vision=2),
    "qwen3_vl_235b_a22b_sft_dist_train_config": Pattern(pipeline=2, vision=2, vision_tensor=2),
}


def family(name: str) -> str:
    if name.startswith("qwen38_flash_next_"):
        return "qwen4_exp"
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
    model = recipe().model
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
    """Return the configuration of a recipe's twin."""
    cfg = set_paths(recipes()[name](), hf_path=folder, data_path=data, pretrained_checkpoint=folder)
    split = pattern(name)
    sizes = [1] * len(WAYS) if whole else [split.tensor, split.pipeline, split.context]
    for way, size in zip(WAYS, sizes, strict=True):
        setattr(cfg.model, way, size)
    cfg.model.expert_model_parallel_size = 1 if whole else split.expert
    cfg.model.sequence_parallel = cfg.model.sequence_parallel and sizes[0] > 1
    if cfg.model.recompute_granularity == "selective":  # in modules of Transformer Engine; no figure depends on it
        cfg.model.recompute_granularity = cfg.model.recompute_modules = None
        cfg.model.transformer_impl, cfg.model.moe_grouped_gemm = "local", False
    if cfg.mixed_precision != "bf16_mixed":  # 8 bits need Transformer Engine: the twin has the rest of the recipe
        cfg.mixed_precision, cfg.model.transformer_impl, cfg.model.moe_grouped_gemm = "bf16_mixed", "local", False
    if whole:
        cfg.model.account_for_embedding_in_pipeline_split = cfg.model.account_for_loss_in_pipeline_split = False
    # Two layers on the first stage are fewer than there are DeepStack taps; released models have enough there.
    cfg.model.variable_seq_lengths = cfg.model.pipeline_model_parallel_size > 1
    if split.vision:
        dist_train(cfg, vision=split.vision, language=split.language, vision_tp=split.vision_tensor)
    if exact or whole:  # megatron-core has experts' all-to-all under computation only in 16 bits, and on several ranks
        cfg.model.overlap_moe_expert_parallel_comm = False
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


# Adapters' parts that a first step need not move: one has no gradient yet, the other moves less than bfloat16 shows.
SLOW = ("adapter.linear_in.weight", "adapter.weight_magnitude")


class Changes(Callback):
    """Count the parameters on this rank that a run should change and that it changes."""

    trained = changed = 0  # parameters that move in a first step, and those with other values at the end
    strayed = 0  # that are not trained, and have other values

    def on_train_start(self, context: CallbackContext) -> None:
        named = (named for chunk in context.model for named in chunk.named_parameters())
        self._before = [(name, parameter, parameter.detach().clone()) for name, parameter in named]

    def on_train_end(self, context: CallbackContext) -> None:
        for name, parameter, first in self._before:
            moved = not torch.equal(parameter, first)
            if not parameter.requires_grad:
                self.strayed += moved
            elif not name.endswith(SLOW):
                self.trained += 1
                self.changed += moved


def steps_of_twins(names: list[str], folders: dict[str, str], data: str, runs: Path) -> dict[str, dict[str, float]]:
    found = {}
    # Groups of one kind after the other: each kind is made anew.
    for name in sorted(names, key=lambda name: (str(pattern(name)), name)):
        changes = Changes()
        save = runs / name
        (entry,) = train(twin(name, folders[family(name)], data, save=str(save)), callbacks=[changes])
        counts = {key: torch.tensor(getattr(changes, key)) for key in ("trained", "changed", "strayed")}
        for count in counts.values():
            dist.all_reduce(count)
        counts = {key: int(count) for key, count in counts.items()}
        (exact,) = train(twin(name, folders[family(name)], data, exact=True))
        found[name] = dict(rounded=entry["loss"], loss=exact["loss"], grad_norm=exact["grad_norm"], **counts)
        found[name]["saved"] = sum(one.numel for one, _ in read_metadata(find_iteration(save)).tensors.values())
        if dist.get_rank() == 0:
            print(name, found[name], flush=True)
    return found


# Recipes of other objectives have other data: tests/training/preference and tests/training/retrieval train them.
OBJECTIVES = re.compile("_(dpo|kto|embedding|reranker)_config")
NAMES = [name for name, recipe in recipes().items() if recipe.gpus and not OBJECTIVES.search(name)]
RANKS = (1, 2, 4, 8)  # of their patterns, which take two seconds to make
FIGURES = ("loss", "grad_norm")
ROUNDED = 2**-6  # of a loss in bfloat16, relative: four of its roundings


def errors(found, expected) -> dict[str, float]:
    return {name: abs(found[name] / expected[name] - 1) for name in FIGURES}


@pytest.fixture(scope="module")
def places(untied_folder, tied_folder, moe_folder, digits, tmp_path_factory):
    folders = {"untied": untied_folder, "tied": tied_folder, "moe": moe_folder}
    for kind, options in (("untied", {}), ("tied", {"tied": True}), ("moe", {"moe": True})):
        folders[f"qwen3_5 {kind}"] = make_checkpoint(tmp_path_factory.mktemp("qwen3_5"), **options)
    folders["qwen4_exp"] = make_qwen4_exp(tmp_path_factory.mktemp("qwen4_exp"))
    return {kind: str(folder) for kind, folder in folders.items()}, str(digits)


@pytest.fixture(scope="module")
def whole(places, tmp_path_factory):
    """Return the step of each family in one process and float32, and the error limits."""
    (folders, data), root = places, tmp_path_factory.mktemp("neighbours")
    found = {}
    for name in (
        *("qwen3_vl_2b_sft_config", "qwen3_vl_8b_sft_config", "qwen3_vl_30b_a3b_sft_config"),
        *("qwen35_vl_2b_sft_config", "qwen35_vl_9b_sft_config", "qwen35_vl_35b_a3b_sft_config"),
        "qwen38_flash_next_sft_config",
    ):
        kind, noises = family(name), []
        (expected,) = train(twin(name, folders[kind], data, whole=True, exact=True))
        for seed in SEEDS:
            near = rounded_folder(Path(folders[kind]), root / f"{kind} {seed}", seed)
            (other,) = train(twin(name, str(near), data, whole=True, exact=True))
            noises.append(errors(other, expected))
        found[kind] = expected, allowed(noises)
    return found


@pytest.fixture
def names_today(request) -> list[str]:
    """Return the recipes to train: all, or of a part of the slow tests (`--slow 1/3`) a part that changes daily."""
    which = request.config.getoption("--slow") or "all"
    if which == "all":
        return NAMES
    parts = int(which.partition("/")[2])
    return NAMES[date.today().toordinal() // parts % parts :: parts]  # this file's turn comes every `parts` days


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_recipe_step_with_tiny_model_on_ranks_matches_one_process(ranks, names_today, places, whole, tmp_path):
    folders, data = places
    # Recipes of which the twins have the same settings, all of them, are one run.
    alike: dict[str, list[str]] = {}
    for name in names_today:
        if pattern(name).ranks == ranks:
            alike.setdefault(str(twin(name, folders[family(name)], data).to_dict()), []).append(name)
    if not alike:
        pytest.skip("no recipe of this part of the slow tests has this number of ranks")
    names = [same[0] for same in alike.values()]
    found = results_of_ranks(steps_of_twins, ranks, names, folders, data, tmp_path)
    assert found.keys() == set(names)
    print(f"{ranks} ranks: {len(names)} runs stand for {sum(map(len, alike.values()))} recipes")
    for name, step in found.items():
        expected, limits = whole[family(name)]
        compared = errors(step, expected)
        if "_peft_" in name:  # the whole twin has no adapters
            del compared["grad_norm"]
        print(name)
        check(compared, limits)
        assert abs(step["rounded"] / expected["loss"] - 1) <= ROUNDED, (name, step, expected)
        assert step["trained"] > 0 and step["strayed"] == 0
        assert step["changed"] > step["trained"] / 2, (name, step)
        assert step["saved"] > 0, name


@pytest.mark.slow
def test_tiny_recipe_layouts_cover_every_kind_of_parallelism():
    overlapped = [name for name in NAMES if recipes()[name]().model.overlap_moe_expert_parallel_comm]
    assert len(overlapped) == 5 and all(pattern(name).expert == 2 for name in overlapped)
    patterns = {name: pattern(name) for name in NAMES}
    assert {one.ranks for one in patterns.values()} == set(RANKS)
    assert patterns["qwen3_vl_8b_sft_config"].tensor == 2 and patterns["qwen3_vl_8b_sft_config"].data == 2
    assert max(one.pipeline for one in patterns.values()) == max(one.context for one in patterns.values()) == 2
    apart = [one for name, one in patterns.items() if "_dist_train_" in name]
    assert len(apart) == 2 and all(one.vision and one.vision % one.vision_tensor == 0 for one in apart)
    for way in ("tensor", "pipeline", "expert", "vision_tensor"):
        assert {getattr(one, way) for one in apart} == {1, 2}, way
    assert not any(one.vision for name, one in patterns.items() if "_dist_train_" not in name)

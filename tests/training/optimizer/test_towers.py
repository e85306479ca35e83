"""Parts of the model with learning rates of their own, and parts that are frozen for the first steps: one process.

`test_parts_on_ranks.py` compares them with transformers and torch's AdamW.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from qwen3vl_bridge.compat.adam import Adam
from qwen3vl_bridge.training.optimizer.delayed_unfreezing import DelayedUnfreezing
from qwen3vl_bridge.training.optimizer.tower_settings import Qwen3VLTowers
from qwen3vl_bridge.weights.model_parts import Part

import pytest
import torch

from ..conftest import losses
from ..running import replicate, stored, train
from .spoilt import Before

SCHEDULE = dict(vision_model_lr=1e-3, freeze_vision_model_steps=3, freeze_language_model_steps=1)


def config(inputs, save, **towers):
    cfg = inputs.config(save, validation__eval_interval=0, checkpoint__save_interval=2)
    cfg.mixed_precision, cfg.optimizer_config_override_provider = "bf16_mixed", Qwen3VLTowers(**towers)
    return replicate(cfg)


class Rates(Before):
    """The learning rate and weight decay of each parameter in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def on_train_step_start(self, context):
        groups = [(g["lr"], g["weight_decay"], p) for g in context.optimizer.param_groups for p in g["params"]]
        mains = {p: (lr, decay) for lr, decay, p in groups}
        named = context.model[0].named_parameters()
        self.seen.append({name: mains[getattr(p, "main_param", p)] for name, p in named})


def test_rates_and_decay_of_every_parameter_follow_the_schedule(inputs):
    rates = Rates()
    cfg = config(inputs, None, vision_model_lr=1e-3, vision_projection_lr=6e-3)
    cfg.optimizer.min_lr = 3e-4
    log = train(cfg, stop_after=4, callbacks=[rates])
    for step, seen in enumerate(rates.seen):
        lr = log[step]["lr"]
        own = {"vision_model": lr / 3, "merger": lr * 2, "language_model": lr}
        for name, (found, decay) in seen.items():
            kind = "merger" if "merger" in name else name.removeprefix("module.module.").split(".")[0]
            assert math.isclose(found, own[kind], rel_tol=1e-12), name
            is_matrix = name.endswith("weight") and "norm" not in name
            assert decay == (0.1 if is_matrix else 0.0), name


def test_a_run_resumed_while_a_part_is_frozen_or_right_after_is_the_whole(inputs, tmp_path):
    whole = train(config(inputs, tmp_path / "whole", **SCHEDULE))
    pieces = [train(config(inputs, tmp_path / "pieces", **SCHEDULE), stop_after=2) for _ in range(3)]
    assert losses(list(itertools.chain.from_iterable(pieces))) == losses(whole)
    found, expected = stored(tmp_path / "pieces"), stored(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    frozen = [entry["grad_norm_vision_model"] == 0.0 for entry in whole]
    assert frozen == [True] * 3 + [False] * 3


@dataclass
class Steps:
    """As much of megatron-core's optimizer as `Rest` looks at."""

    optimizer: torch.optim.Optimizer


def by_torch(groups):
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def by_group(groups):
    return Adam(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def test_adam_starts_on_a_part_as_new():
    """Beside torch's AdamW that sees no gradient of a part before; one step in the middle is skipped."""
    from qwen3vl_bridge.training.process_groups import _join

    _join()
    firsts = dict(zip(Part, (0, 3, 40), strict=True))
    weights = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def build(make_adam):
        # Parts lie across groups.
        parameters = [torch.nn.Parameter(w.clone()) for w in weights]
        return parameters, make_adam([dict(params=parameters[:4]), dict(params=parameters[4:], weight_decay=0.0)])

    ours, adam = build(by_group)
    reference, torchs = build(by_torch)
    parts = {p: list(Part)[i % 3] for i, p in enumerate(ours)}
    unfreezing = DelayedUnfreezing(Steps(adam), parts, {part: first for part, first in firsts.items() if first})
    updates = 0
    for step in range(1100):
        for i, (mine, theirs) in enumerate(zip(ours, reference, strict=True)):
            gradient = torch.randn(3, generator=torch.Generator().manual_seed(100 * step + i))
            mine.grad = gradient.clone()
            theirs.grad = gradient if updates >= firsts[parts[mine]] else None
        unfreezing.drop_frozen_gradients()
        unfreezing.before()
        if updated := step != 20:
            adam.step()
            torchs.step()
            updates += 1
        unfreezing.after(updated=updated)
        # What a checkpoint of Megatron's has room for: one count.
        assert {g["step"] for g in adam.param_groups if "step" in g} == {updates}
        assert len(adam.param_groups) == 2 and len(adam.state) == 6
    assert not unfreezing._delayed, "parts that were unfrozen long ago need no count of their own"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, reference, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(vision_model_lr=-1.0), r"vision_model_lr is -1.0, expected more than 0; model.freeze_vision_model"),
        (dict(freeze_vision_model_steps=-1), r"freeze_vision_model_steps is -1, expected 0 or more"),
        (dict(freeze_vision_model_steps=6), r"is 6, expected fewer than train.train_iters, 6"),
        (dict(vision_model_lr=1e-4, model__freeze_vision_model=True), r"expected None with model.freeze_vision_model"),
        (dict(freeze_vision_model_steps=2, model__freeze_vision_model=True), r"expected 0 with model.freeze_vision"),
        (dict(vision_model_lr=1e-4, cfg__peft="any"), r"expected none with peft"),
        (dict(vision_model_lr=1e-4, optimizer__min_lr=1.0), r"that is at least min_lr"),
        (dict(vision_model_lr=1e-4, scheduler__lr_warmup_init=1e-3), r"no less than scheduler.lr_warmup_init, 0.001"),
        (dict(language_model_lr=1e-4, optimizer__decoupled_lr=1e-4), r"expected None, or optimizer.decoupled_lr None"),
        (dict(freeze_vision_model_steps=2, optimizer__optimizer="sgd"), r"do not work with optimizer.optimizer"),
        (dict.fromkeys([f"freeze_{part.value}_steps" for part in Part], 2), r"every trained part is frozen"),
        (
            dict(
                freeze_language_model_steps=1,
                model__freeze_vision_model=True,
                model__freeze_vision_projection=True,
            ),
            r"every trained part is frozen",
        ),
        (dict.fromkeys([f"{part.value}_lr" for part in Part], 1e-4), r"optimizer.lr, 0.003, would be ignored"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(inputs, settings, message):
    towers = {name: value for name, value in settings.items() if "__" not in name}
    cfg = config(inputs, None, **towers)
    for name, value in settings.items():
        section, sep, field = name.partition("__")
        if sep:
            setattr(cfg if section == "cfg" else getattr(cfg, section), field, value)
    with pytest.raises(ValueError, match=message):
        cfg.validate()


def test_schedules_under_megatron_fsdp_are_refused(inputs):
    from qwen3vl_bridge.training.optimizer.before_step import _check_settings

    cfg = config(inputs, None, **SCHEDULE)
    cfg.ddp.use_megatron_fsdp = True
    with pytest.raises(ValueError, match=r"freeze_\*_steps with ddp.use_megatron_fsdp"):
        _check_settings(cfg)


def test_settings_are_changed_on_the_command_line(inputs):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    provider = "optimizer_config_override_provider"
    overrides = [f"{provider}.vision_model_lr=1e-6", f"{provider}.freeze_vision_model_steps=2", "guard.on_nan=skip"]
    cfg = process_config_with_overrides(inputs.config(None), cli_overrides=overrides)
    towers = cfg.optimizer_config_override_provider
    assert towers == Qwen3VLTowers(vision_model_lr=1e-6, freeze_vision_model_steps=2) and cfg.guard.on_nan == "skip"
    cfg.validate()

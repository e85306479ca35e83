"""Parts of the model with learning rates of their own, and a part that is frozen: one process.

`test_parts_on_ranks.py` compares them with transformers and torch's AdamW.
"""

import itertools
import math

from qwen3vl_bridge.training.run_settings import Qwen3VLTowers
from qwen3vl_bridge.weights.rows import Part

import pytest
import torch

from ..conftest import losses
from ..running import replicate, stored, train
from .test_guard import Before


def config(inputs, save, **towers):
    cfg = inputs.config(save, validation__eval_interval=0, checkpoint__save_interval=2)
    cfg.mixed_precision, cfg.optimizer_config_override_provider = "bf16_mixed", Qwen3VLTowers(**towers)
    return replicate(cfg)


class Rates(Before):
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


def test_a_run_with_a_frozen_part_is_resumed_bit_exactly(inputs, tmp_path):
    def frozen(save):
        cfg = config(inputs, save, vision_projection_lr=1e-3)
        cfg.model.freeze_vision_model = True
        return cfg

    whole = train(frozen(tmp_path / "whole"))
    pieces = [train(frozen(tmp_path / "pieces"), stop_after=2) for _ in range(3)]
    assert losses(list(itertools.chain.from_iterable(pieces))) == losses(whole)
    found, expected = stored(tmp_path / "pieces"), stored(tmp_path / "whole")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    for entry in (entry for entry in whole if "lr" in entry):
        assert entry["grad_norm_vision_model"] == 0.0 < entry["grad_norm_vision_projection"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(vision_model_lr=-1.0), r"vision_model_lr is -1.0, expected more than 0; model.freeze_vision_model"),
        (dict(vision_model_lr=1e-4, model__freeze_vision_model=True), r"expected None with model.freeze_vision_model"),
        (dict(vision_model_lr=1e-4, cfg__peft="any"), r"expected none with peft"),
        (dict(vision_model_lr=1e-4, optimizer__min_lr=1.0), r"that is at least min_lr"),
        (dict(vision_model_lr=1e-4, scheduler__lr_warmup_init=1e-3), r"no less than scheduler.lr_warmup_init, 0.001"),
        (dict(language_model_lr=1e-4, optimizer__decoupled_lr=1e-4), r"expected None, or optimizer.decoupled_lr None"),
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


def test_settings_are_changed_on_the_command_line(inputs):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    provider = "optimizer_config_override_provider"
    overrides = [f"{provider}.vision_model_lr=1e-6", "guard.on_nan=skip"]
    cfg = process_config_with_overrides(inputs.config(None), cli_overrides=overrides)
    towers = cfg.optimizer_config_override_provider
    assert towers == Qwen3VLTowers(vision_model_lr=1e-6) and cfg.guard.on_nan == "skip"
    cfg.validate()

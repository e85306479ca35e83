"""Settings that Megatron-Bridge's loop does not support with separate vision ranks raise before training."""

from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.config.checks import run_checks
from qwen3vl_bridge.training.run_validation import RUN_CAN_START

import pytest
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.bridge.training.config import TrainingConfig

from tests.models.settings.test_parallel_settings import DENSE, finalized


def run(vision, language, *, sharded=True, skip=(), dataset=None, **checkpoint):
    split = DistTrainConfig(use_dist_train=True, vision_world_size=vision, language_world_size=language)
    saved = dict(save=None, save_optim=True, dist_ckpt_optim_fully_reshardable=True) | checkpoint
    return SimpleNamespace(
        model=finalized(DENSE, dict(dist_train=split, variable_seq_lengths=True)), checkpoint=SimpleNamespace(**saved),
        optimizer=SimpleNamespace(use_distributed_optimizer=sharded, optimizer_cuda_graph=False),
        optimizer_config_override_provider=None, train=TrainingConfig(iterations_to_skip=list(skip)),
        logger=SimpleNamespace(wandb_project=None, wandb_exp_name=None),
        dataset=dataset or qwen3vl_bridge.Qwen3VLConversationProvider(hf_processor_path="x", seq_length=8),
    )  # fmt: skip


NUMBERED = dict(save="run", dist_ckpt_optim_fully_reshardable=False)


@pytest.mark.parametrize(("ranks", "changed", "message"), [
    ((1, 1), NUMBERED, "checkpoint.dist_ckpt_optim_fully_reshardable is False .* expected True.*number of their param"),
    ((2, 1), dict(skip=[2]), r"train.iterations_to_skip is \[2\] .* expected \[\]"),
    ((1, 2), dict(dataset=object()), "dataset.__class__ is <class 'object'> .*vision ranks read its rows by"),
])  # fmt: skip
def test_dist_train_raises_if_setting_is_unsupported(ranks, changed, message):
    with pytest.raises(ValueError, match=message):
        run_checks(RUN_CAN_START, run(*ranks, **changed))


@pytest.mark.parametrize("changed", [
    {}, dict(save="run"), dict(skip=[2], dataset=object()), NUMBERED | dict(sharded=False),
    NUMBERED | dict(save_optim=False),
])  # fmt: skip
def test_dist_train_supported_settings_pass_checks(changed):
    run_checks(RUN_CAN_START, run(2, 2, **changed))

"""What Megatron-Bridge's own loop cannot do with vision and language on ranks of their own is refused before a step."""

from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.models.rules import check
from qwen3vl_bridge.training.run_refusals import ON_TRAIN_START

import pytest
from megatron.bridge.models.qwen_vl.qwen3_vl_provider import DistTrainConfig
from megatron.bridge.training.config import TrainingConfig

from tests.model.settings.test_parallel_settings import DENSE, finalized


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
    ((1, 1), NUMBERED, "checkpoint.dist_ckpt_optim_fully_reshardable is False .* expected True.*by group number"),
    ((2, 1), dict(skip=[2]), r"train.iterations_to_skip is \[2\] .* expected \[\]"),
    ((1, 2), dict(dataset=object()), "dataset.__class__ is <class 'object'> .*the tower's ranks read its rows by"),
])  # fmt: skip
def test_what_their_loop_cannot_is_refused(ranks, changed, message):
    with pytest.raises(ValueError, match=message):
        check(ON_TRAIN_START, run(*ranks, **changed))


@pytest.mark.parametrize("changed", [
    {}, dict(save="run"), dict(skip=[2], dataset=object()), NUMBERED | dict(sharded=False),
    NUMBERED | dict(save_optim=False),
])  # fmt: skip
def test_what_it_can_is_not(changed):
    check(ON_TRAIN_START, run(2, 2, **changed))

"""What Megatron-Bridge's own loop cannot do with vision and language on ranks of their own is refused before a step."""

from types import SimpleNamespace

import qwen3vl_bridge
from qwen3vl_bridge.dist_train import DistTrainConfig
from qwen3vl_bridge.training.modules import Modules

import pytest

from tests.model.split_providers import DENSE, finalized


def context(vision, language, **changed):
    """Of a run that Megatron-Bridge's loop is about to start."""
    split = DistTrainConfig(use_dist_train=True, vision_world_size=vision, language_world_size=language)
    values = dict(eval_iters=0, save=None, save_rng=True, save_optim=True, step=0, skip=[], dataset=None) | changed
    dataset = values["dataset"] or qwen3vl_bridge.Qwen3VLConversationProvider(hf_processor_path="x", seq_length=8)
    cfg = SimpleNamespace(
        model=finalized(DENSE, dict(dist_train=split, variable_seq_lengths=True)),
        validation=SimpleNamespace(eval_iters=values["eval_iters"]),
        checkpoint=SimpleNamespace(**{name: values[name] for name in ("save", "save_rng", "save_optim")}),
        train=SimpleNamespace(iterations_to_skip=values["skip"]),
        dataset=dataset,
    )
    return SimpleNamespace(state=SimpleNamespace(cfg=cfg, train_state=SimpleNamespace(step=values["step"])), model=[])


@pytest.mark.parametrize(
    ("ranks", "changed", "message"),
    [
        ((1, 1), dict(eval_iters=4), "validation.eval_iters is 4 with .* expected 0 .*it would evaluate one module"),
        ((1, 1), dict(save="run"), "checkpoint.save_rng is True .* expected False .*by the same names"),
        ((1, 1), dict(save="run", save_rng=False), "checkpoint.save_optim is True .* expected False"),
        ((1, 1), dict(step=3), "the step to go on from is 3 .* expected 0 .*counts samples by the tower's replicas"),
        ((2, 1), dict(skip=[2]), r"train.iterations_to_skip is \[2\] .* expected \[\]"),
        ((1, 2), dict(dataset=object()), "dataset is <class 'object'> .*its rows have numbers"),
    ],
)
def test_what_their_loop_cannot_is_refused(ranks, changed, message):
    with pytest.raises(ValueError, match=message):
        Modules().on_train_start(context(*ranks, **changed))


@pytest.mark.parametrize(
    "changed", [{}, dict(skip=[2], dataset=object()), dict(save="run", save_rng=False, save_optim=False)]
)
def test_what_it_can_is_not(changed):
    with pytest.raises(IndexError):  # it goes on to the model, of which there is none here
        Modules().on_train_start(context(2, 2, **changed))

"""Right answers while training are those that transformers generates from the same weights."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.forked import run_ranks

from .asking import asking, write_questions

TEXTS = [
    "Which digit?",
    "Say it.",
    "And this one, in a word or two?",
    "Five?",
    "What is there?",
    "No picture here.",
    "?",
]


@pytest.fixture(scope="module", params=["untied", "moe"])
def places(request, inputs, tmp_path_factory):
    """A checkpoint, a folder with conversations and questions, and which of these have the right answer beside them."""
    hf = request.getfixturevalue(f"{request.param}_folder")
    folder = tmp_path_factory.mktemp("questions") / "data"
    shutil.copytree(inputs.data, folder)
    picture = next((folder / "images").iterdir()).relative_to(folder)
    lines = write_questions(folder, hf, folder / picture, TEXTS)
    return request.param, hf, folder, lines


def test_the_share_of_right_answers(places):
    from qwen3vl_bridge.training.loop import train

    _, hf, data, right = places
    assert 0 < sum(right) < len(right)
    log = train(asking(hf, data, {}))
    assert log[-1]["accuracy"] == sum(right) / len(right)
    contained = asking(hf, data, {})
    contained.accuracy.metric, contained.accuracy.samples = "contains", 2
    assert train(contained)[-1]["accuracy"] == sum(right[:2]) / 2


def test_ranks_share_the_questions(places, tmp_path):
    """Or ask all in step, where they share experts."""
    kind, hf, data, right = places
    splits = [{}, dict(tensor_model_parallel_size=2, sequence_parallel=True)]
    if kind == "moe":
        splits = [dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)]
    run_ranks("tests.training.asking", 2, tmp_path / "found.pt", hf, data, json.dumps(splits), timeout=400)
    assert torch.load(tmp_path / "found.pt") == [sum(right) / len(right)] * len(splits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(pipeline_model_parallel_size=2), "with pipeline parallelism 2: generation needs a whole model"),
        (dict(context_parallel_size=2), "with context parallelism 2"),
    ],
)
def test_models_that_cannot_generate_are_not_asked(places, fields, message):
    _, hf, data, _ = places
    with pytest.raises(ValueError, match=message):
        asking(hf, data, fields).validate()

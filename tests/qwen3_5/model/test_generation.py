"""Greedy answers of a model with linear attention are those of transformers' `generate`, token for token.

Run on ranks it is the script of the test of parallel ranks: -m tests.qwen3_5.model.test_generation OUTPUT FOLDER...
"""

import sys

import qwen3vl_bridge  # noqa: F401  (first: it prepares Megatron's import)
from qwen3vl_bridge.inference.generation import generate

import pytest
import torch

from tests.forked import results_of_ranks
from tests.model.test_generation import NEVER, NEW, PAD, answers, load, prompts
from tests.parity.batches import CONTENTS
from tests.ranks import begin, leave

TP = dict(tensor_model_parallel_size=2, sequence_parallel=True)


@pytest.fixture(scope="module", params=["dense", "tied", "moe"])
def pair(request, qwen3_5_folders):
    return load(qwen3_5_folders[request.param])


@pytest.mark.parametrize("content", CONTENTS)
def test_answers_are_those_of_transformers(pair, content):
    batch = prompts(content, pair.config)
    expected = pair.reference.generate(**batch, max_new_tokens=NEW)
    assert len(expected[:, -NEW:].unique()) >= 5  # not one token for ever
    assert torch.equal(generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=NEVER), expected)


def test_rows_end_where_transformers_ends_them(pair):
    batch = prompts("mixed", pair.config)
    free = answers(pair, batch)
    ends = [int(row[2 + 3 * number]) for number, row in enumerate(free)]
    expected = pair.reference.generate(**batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
    found = generate(pair.megatron, **batch, max_new_tokens=NEW, eos_token_id=ends, pad_token_id=PAD)
    assert torch.equal(found, expected)
    assert (found[:, batch["input_ids"].shape[1] :] == PAD).any()


def test_two_ranks_give_the_same_answers(qwen3_5_folders):
    folders = [qwen3_5_folders[kind] for kind in ("dense", "moe")]
    for folder, found in results_of_ranks("tests.qwen3_5.model.test_generation", 2, *folders).items():
        alone = load(folder)
        assert torch.equal(found, answers(alone, prompts("mixed", alone.config)))


if __name__ == "__main__":
    begin()
    results = {}
    for name in sys.argv[2:]:
        split = load(name, **TP)
        results[name] = answers(split, prompts("mixed", split.config))
    leave(results, sys.argv[1])

"""Accepted drafts of multi-token prediction, compared with transformers' modules run by hand for every draft."""

import json
import shutil
from pathlib import Path
from typing import Any

from qwen3vl_bridge.cli.main import main
from qwen3vl_bridge.inference.drafts import count_accepted_drafts, drafts_tokens
from qwen3vl_bridge.inference.generation import generate
from qwen3vl_bridge.testing.tiny_processor import make_processor

import pytest
import torch
from torch import nn

from tests.helpers.batches import CONTENTS, Sample, make_batch, make_samples
from tests.helpers.forked import results_of_ranks
from tests.models.qwen3_5.conftest import pair_with_mtp
from tests.models.qwen3_5.tiny import rewritten, weights
from tests.parity.conftest import Pair
from tests.parity.topologies import TOPOLOGIES

TOKENS = 12
LETTERS = make_processor(512).tokenizer.convert_tokens_to_ids([*"abcd"])


def with_few_words(folder: Path, target: Path) -> Path:
    """Write a model that says four letters only, so that a draft is often right by chance."""
    tensors = weights(folder)
    words = tensors["lm_head.weight"][:2] * 4
    tensors["lm_head.weight"] = torch.zeros_like(tensors["lm_head.weight"])
    tensors["lm_head.weight"][LETTERS] = torch.cat((words, -words))  # the largest logit is above 0
    return rewritten(folder, tensors, target)


@pytest.fixture(scope="module")
def folders(qwen3_5_folders, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("few words")
    return {kind: with_few_words(qwen3_5_folders[kind], root / kind) for kind in ("dense", "moe")}


@torch.no_grad()
def count_drafts(pair: Pair, seed: int = 4) -> list[tuple[Sample, torch.Tensor, int]]:
    """Return prompts, answers, and the number of accepted drafts of each."""
    model, found = [pair.megatron], []
    for content in CONTENTS:
        for sample in make_samples(content, pair.config, seed):
            ids = sample.ids[None]
            answer = generate(model, ids, max_new_tokens=TOKENS, eos_token_id=[], **sample.pixels)[0, ids.shape[1] :]
            found.append((sample, answer, count_accepted_drafts(model, sample.ids, answer, sample.pixels)))
    return found


def accepted_by_hand(model: nn.Module, prompt: Sample, answer: torch.Tensor) -> int:
    """Decode token by token, draft each next token, and count the drafts that equal the model's own greedy token."""
    count = 0
    for number in range(1, len(answer)):
        # The newest token is answer[number - 1]; its embedding and the state before it make the draft.
        seen: dict = {}
        text = model.model.language_model
        hooks = [
            text.register_forward_pre_hook(lambda _, __, given, s=seen: s.update(given), with_kwargs=True),
            text.rotary_emb.register_forward_hook(lambda _, __, angles, s=seen: s.update(angles=angles)),
            text.register_forward_hook(lambda _, __, out, s=seen: s.update(hidden=out.last_hidden_state)),
        ]
        ids = torch.cat((prompt.ids, answer[:number]))[None]
        kinds = (ids == model.config.image_token_id).int() + 2 * (ids == model.config.video_token_id).int()
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **prompt.pixels).logits[0, -1]
        for hook in hooks:
            hook.remove()
        angles = tuple(one[:, :-1] for one in seen["angles"])
        state = model.mtp(seen["hidden"][:, :-1], seen["inputs_embeds"][:, 1:], angles)[0, -1]
        assert logits.argmax() == answer[number]  # the model's own greedy answer
        count += int(model.lm_head(state).argmax() == answer[number])
    return count


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_count_of_accepted_mtp_drafts_matches_transformers_modules(folders, kind):
    pair = pair_with_mtp(folders, kind)
    found = count_drafts(pair)
    for sample, answer, accepted in found:
        with torch.no_grad():
            assert accepted == accepted_by_hand(pair.reference.eval(), sample, answer)
    assert 0.1 < sum(accepted for *_, accepted in found) / (len(found) * (TOKENS - 1)) < 0.9
    assert drafts_tokens([pair.megatron])
    assert count_accepted_drafts([pair.megatron], found[0][0].ids, found[0][1][:1], found[0][0].pixels) == 0


def counts(folders: dict[str, Path], kind: str, **fields: Any) -> list[int]:
    return [accepted for *_, accepted in count_drafts(pair_with_mtp(folders, kind, **fields))]


LAYOUTS = {name: TOPOLOGIES[name].fields for name in ("TP2+SP", "PP2", "CP2", "EP2")}


def counts_of_ranks(folders: dict[str, Path], kind: str, layout: str) -> list[int]:
    return counts(folders, kind, **LAYOUTS[layout])


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize(("kind", "layout"), [("dense", "PP2"), ("dense", "TP2+SP"), ("dense", "CP2"), ("moe", "EP2")])
def test_accepted_mtp_drafts_on_two_ranks_match_one_rank(folders, kind, layout):
    expected = counts(folders, kind)
    assert sum(expected) and results_of_ranks(counts_of_ranks, 2, folders, kind, layout) == expected


@pytest.mark.slow
def test_training_with_mtp_loss_increases_draft_acceptance(qwen3_5_folders):
    """The task is to count, from any number on, modulo 12."""
    numbers = [torch.arange(first, first + 4 + TOKENS) % 12 + 40 for first in range(12)]
    samples = [Sample(row, (torch.arange(len(row)) < len(row) - 1).float(), {}) for row in numbers]

    def acceptance(factor: float, steps: int) -> float:
        """Train with the MTP loss weighted by `factor`, and return the fraction of accepted drafts."""
        pair = pair_with_mtp(qwen3_5_folders, "dense", mtp_loss_scaling_factor=factor)
        model = pair.megatron
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        inputs = make_batch(samples, pair.config).local(with_next_tokens=factor > 0)
        for _ in range(steps):
            optimizer.zero_grad()
            ((model(inputs=inputs) * inputs.loss_mask).sum() / inputs.loss_mask.sum()).backward()
            optimizer.step()
        accepted = 0
        for row in numbers:
            answer = generate(model, row[None, :4], max_new_tokens=TOKENS, eos_token_id=[])[0, 4:]
            assert not steps or torch.equal(answer, row[4:])
            accepted += count_accepted_drafts([model], row[:4], answer, {})
        return accepted / (len(numbers) * (TOKENS - 1))

    found = acceptance(0.0, 0), acceptance(0.0, 60), acceptance(1.0, 60)
    assert max(found[:2]) < 0.1 and found[2] > 0.9, found  # measured: 0.01, 0.01 and 1.00


def test_evaluate_prints_acceptance_rate_of_mtp_drafts(folders, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    turns = [{"role": "user", "content": "Which digit?"}, {"role": "assistant", "content": "7"}]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    words = ["evaluate", "--hf-model", str(folders["dense"]), "--data", str(data), "--max-new-tokens", str(TOKENS)]
    assert main([*words, "--json", "--output", str(tmp_path / "answers.jsonl")]) == 0
    scores = json.loads(capsys.readouterr().out)
    written = json.loads((tmp_path / "answers.jsonl").read_text())
    assert scores["drafts"] == written["drafts"] == TOKENS - 1
    assert scores["draft_acceptance"] == written["accepted"] / written["drafts"]
    end = written["answer"][TOKENS // 2]  # an answer that ends has fewer drafts, its end token's included
    ended = shutil.copytree(folders["dense"], tmp_path / "ended")
    (ended / "generation_config.json").write_text(json.dumps({"eos_token_id": LETTERS["abcd".index(end)]}))
    assert main([*words, "--json", "--hf-model", str(ended)]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == written["answer"].index(end) < TOKENS - 1
    assert main(words) == 0
    rate = f"the mean of 1 answers; {scores['draft_acceptance']:.1%} of 11 drafted tokens accepted"
    assert rate in capsys.readouterr().out
    assert main([*words, "--json", "--do-sample"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"metric", "score", "answers"}

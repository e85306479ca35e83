"""Right answers while training are those that transformers generates from the same weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked import results_of_ranks
from tests.training.bridges_loop import Start, run_all
from tests.training.running import replicate, train

NEW_TOKENS = 4


def write_questions(folder: Path, hf: Path, picture: Path, texts: list[str]) -> list[bool]:
    """Write `questions.jsonl`, where every other expected answer is what transformers generates. Return which."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(hf)
    model = AutoModelForImageTextToText.from_pretrained(hf, attn_implementation="eager")
    right, lines = [], []
    for number, text in enumerate(texts):
        content: list[dict[str, str]] = [{"type": "text", "text": text}]
        if number % 3:
            content.insert(0, {"type": "image", "image": str(picture)})
        user = {"role": "user", "content": content}
        prompt = processor.apply_chat_template(
            [user], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        ids = model.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[:, prompt["input_ids"].shape[1] :]
        answer = processor.tokenizer.decode(ids[0], skip_special_tokens=True)
        right.append(number % 2 == 0 and bool(answer.strip()))
        expected = answer if right[-1] else "none of its words"
        lines.append(json.dumps({"messages": [user, {"role": "assistant", "content": expected}]}) + "\n")
    (folder / "questions.jsonl").write_text("".join(lines))
    return right


def config_with_questions(hf: Path, data: Path, fields: dict[str, Any]) -> Any:
    from qwen3vl_recipes.paths import set_paths

    from tests.helpers.digits_recipe import digits_recipe_for

    cfg = set_paths(digits_recipe_for(hf), hf_path=hf, data_path=data, pretrained_checkpoint=hf)
    cfg.mixed_precision = cfg.checkpoint.save = cfg.checkpoint.load = cfg.logger.tensorboard_dir = None
    cfg.model.seq_length = cfg.dataset.seq_length = 128
    cfg.dataset.num_workers, cfg.train.train_iters, cfg.scheduler.lr_warmup_iters = 0, 1, 0
    cfg.optimizer.lr = cfg.optimizer.min_lr = 0.0
    cfg.validation.eval_interval = cfg.validation.eval_iters = 1
    cfg.accuracy.path, cfg.accuracy.max_new_tokens = str(data / "questions.jsonl"), NEW_TOKENS
    for name, value in fields.items():
        assert hasattr(cfg.model, name)
        setattr(cfg.model, name, value)
    return replicate(cfg)


def accuracies(hf: Path, data: Path, splits: list[dict[str, Any]]) -> list[float]:
    return [train(config_with_questions(hf, data, fields))[-1]["accuracy"] for fields in splits]


TEXTS = [
    "Which digit?", "Say it.", "And this one, in a word or two?", "Five?", "What is there?", "No picture here.", "?",
]  # fmt: skip


@pytest.fixture(scope="module", params=[pytest.param("untied", marks=pytest.mark.slow), "moe"])
def places(request, inputs, tmp_path_factory):
    """Return the kind of model, its folder, a folder with questions, and which expected answers are right."""
    hf = request.getfixturevalue(f"{request.param}_folder")
    folder = tmp_path_factory.mktemp("questions") / "data"
    shutil.copytree(inputs.data, folder)
    picture = next((folder / "images").iterdir()).relative_to(folder)
    lines = write_questions(folder, hf, folder / picture, TEXTS)
    return request.param, hf, folder, lines


@pytest.mark.slow
def test_log_entry_accuracy_equals_fraction_of_right_answers(places):
    _, hf, data, right = places
    assert 0 < sum(right) < len(right)
    log = train(config_with_questions(hf, data, {}))
    assert log[-1]["accuracy"] == sum(right) / len(right)
    contained = config_with_questions(hf, data, {})
    contained.accuracy.metric, contained.accuracy.samples = "contains", 2
    assert train(contained)[-1]["accuracy"] == sum(right[:2]) / 2


@pytest.mark.slow
def test_accuracy_on_two_ranks_is_fraction_of_right_answers(places):
    kind, hf, data, right = places
    splits = [
        {},
        dict(tensor_model_parallel_size=2, sequence_parallel=True),
        dict(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32, variable_seq_lengths=True),
        dict(context_parallel_size=2, calculate_per_token_loss=True),
    ]
    if kind == "moe":
        splits = [dict(expert_model_parallel_size=2, expert_tensor_parallel_size=1)]
    found = results_of_ranks(accuracies, 2, hf, data, splits, timeout=400)
    assert found == [sum(right) / len(right)] * len(splits)


@pytest.fixture(scope="module")
def sharded(inputs, untied_folder, moe_folder, tmp_path_factory):
    """Return which answers are right, and results of runs on two ranks, for each kind of model."""
    root, right, starts = tmp_path_factory.mktemp("sharded"), {}, []
    kinds = {"dense": (untied_folder, {}), "MoE": (moe_folder, dict(model__expert_model_parallel_size=2))}
    for kind, (hf, split) in kinds.items():
        shutil.copytree(inputs.data, data := root / kind)
        right[kind] = write_questions(data, hf, next((data / "images").iterdir()), TEXTS)
        steps = dict(train__train_iters=3, validation__eval_interval=1, validation__eval_iters=1) | split
        asked = dict(accuracy__path=str(data / "questions.jsonl"), accuracy__max_new_tokens=NEW_TOKENS)
        rests = dict(optimizer__lr=0.0, optimizer__min_lr=0.0)
        once = asked | dict(train__train_iters=1)
        for name, settings in (("rests", asked | rests), ("learns", asked), ("not asked", {}), ("bf16", once)):
            given = (str(hf), str(data), str(hf), None, steps | settings)
            starts.append(Start(f"{kind}, {name}", *given, fsdp=True, bf16=name == "bf16"))
    return right, results_of_ranks(run_all, 2, starts, timeout=900)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_accuracy_with_megatron_fsdp_equals_fraction_of_right_answers(sharded, kind):
    """Ranks gather parameters in each forward pass, so all must generate together."""
    right, runs = sharded
    right = right[kind]
    assert 0 < sum(right) < len(right)
    # After each of three steps with learning rate 0.
    assert runs[f"{kind}, rests"]["accuracy"] == [sum(right) / len(right)] * 3
    assert len(runs[f"{kind}, learns"]["accuracy"]) == 3
    assert runs[f"{kind}, learns"]["log"] == runs[f"{kind}, not asked"]["log"]
    assert len(runs[f"{kind}, bf16"]["accuracy"]) == 1

"""Generate answers to the prompts of a data set, and score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.core.collectives import gather_objects, raise_on_all_ranks
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.prompts import Prompt, Prompts, Question
from qwen3vl_bridge.inference.generation import generate, ranks_in_step
from qwen3vl_bridge.inference.scorers import SCORERS, Reference, choices_in

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import get_attr_wrapped_model
from torch import nn
from torch.nn.utils.rnn import pad_sequence

BATCH_SIZE = 16  # prompts


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer of the model.

    Attributes:
        sample_id: location of the conversation, "test.jsonl:12".
        question: text of the last message before the answer.
        references: accepted answers.
        answer: what the model said, without reasoning.
        score: 1 for a right answer, 0 for a wrong one, or between.
    """

    sample_id: str
    question: str
    references: tuple[str, ...]
    answer: str
    score: float


def make_references(questions: Iterable[Question], metric: str) -> list[Reference]:
    """Return what the answers to questions are compared with.

    Raises:
        DataError: the metric cannot score a question. "multiple_choice" needs options in lines such as "A. a dog", and
            the letter of one as the accepted answer. "vqa_accuracy" needs the answers of several people.
    """
    found = []
    for question in questions:
        accepted, choices = question.references, {}
        if metric == "multiple_choice":
            accepted, choices = tuple(answer.strip() for answer in accepted), choices_in(question.text)
            if not (choices and choices.keys() >= set(accepted)):
                raise DataError(
                    question.sample_id,
                    f"found the options {list(choices)} in the question and the accepted answers {list(accepted)}, "
                    'expected lines such as "A. a dog" and the letter of one of them',
                )
        if metric == "vqa_accuracy" and len(accepted) == 1:
            problem = "found one accepted answer, expected those of several people under 'references': others score 0"
            raise DataError(question.sample_id, problem)
        found.append(Reference(accepted, choices))
    return found


def evaluate(
    model: list[nn.Module],
    prompts: Prompts,
    metric: str,
    *,
    batch_size: int = BATCH_SIZE,
    seed: int | None = None,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **settings: Any,
) -> list[ScoredAnswer]:
    """Return the scored answers to all prompts, on all ranks. All ranks must pass the same prompts.

    Data-parallel ranks divide the prompts. Where experts or Megatron-FSDP shard weights over these ranks, they run
    their forward passes together, so every rank generates all answers.

    Args:
        model: the chunks of this rank, as for `generate`.
        prompts: the prompts.
        metric: a key of `SCORERS`.
        batch_size: number of prompts that are decoded together.
        seed: as for `generate`; None for 0. Each batch draws with another seed.
        progress: wraps the numbers of this rank's batches to show progress.
        settings: further arguments of `generate`.

    Raises:
        DataError: a prompt cannot be encoded; and see `make_references`.
        CheckpointError: a prompt of another rank cannot be encoded.
    """
    groups: ProcessGroupCollection = get_attr_wrapped_model(model[0], "pg_collection")
    questions, references = prompts.questions, make_references(prompts.questions, metric)
    rank, ranks = (0, 1) if ranks_in_step(model) is not None else (groups.dp.rank(), groups.dp.size())
    # Prompts of similar length need little padding.
    order = sorted(range(len(questions)), key=lambda number: questions[number].tokens)[rank::ranks]
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    answers: dict[int, str] = {}
    with raise_on_all_ranks():
        for number in progress(range(len(batches))):
            encoded = [prompts.encode(questions[index]) for index in batches[number]]
            drawn = (seed or 0) + number * ranks + rank if settings.get("do_sample") else seed
            texts = _generate_texts(model, encoded, prompts, seed=drawn, **settings)
            for index, prompt, text in zip(batches[number], encoded, texts, strict=True):
                answers[index] = prompt.extract_answer(text).strip()
    if ranks > 1:
        answers = {index: text for found in gather_objects(answers, groups.dp) for index, text in found.items()}
    scored = []
    for index, (question, reference) in enumerate(zip(questions, references, strict=True)):
        score = SCORERS[metric](answers[index], reference)
        scored.append(ScoredAnswer(question.sample_id, question.text, question.references, answers[index], score))
    return scored


def _generate_texts(model: list[nn.Module], encoded: Sequence[Prompt], prompts: Prompts, **settings: Any) -> list[str]:
    """Return the decoded answers to a batch of prompts."""
    device = next(model[0].parameters()).device
    tokens = [prompt.sample.input_ids for prompt in encoded]
    ids = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in tokens], batch_first=True)
    vision: dict[str, torch.Tensor] = {}
    for name in sorted({name for prompt in encoded for name in prompt.vision_inputs}):
        vision[name] = torch.cat([p.vision_inputs[name] for p in encoded if name in p.vision_inputs]).to(device)
    sequences = generate(model, ids.to(device), mask.to(device), **vision, **settings)
    decode = prompts.encoder.processor.tokenizer.batch_decode
    return decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)


def mean_score(answers: Sequence[ScoredAnswer]) -> float:
    """Return the mean of the scores; 0 without answers."""
    return sum(answer.score for answer in answers) / max(len(answers), 1)

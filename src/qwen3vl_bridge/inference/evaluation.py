"""Generate answers to the prompts of a data set, and score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.core.collectives import gather_objects, raise_on_all_ranks
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.prompts import Prompt, Prompts, Question
from qwen3vl_bridge.inference.drafts import count_accepted_drafts
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
        answer: answer of the model, without reasoning.
        score: from 0 for a wrong answer to 1 for a right one.
        drafts: number of tokens of the answer for which multi-token prediction made a draft.
        accepted: number of drafts that equal the model's token, see `drafts.py`.
    """

    sample_id: str
    question: str
    references: tuple[str, ...]
    answer: str
    score: float
    drafts: int = 0
    accepted: int = 0


def make_references(questions: Iterable[Question], metric: str) -> list[Reference]:
    """Return a `Reference` for each question: the accepted answers, to compare the model's answer with.

    Raises:
        DataError: the metric cannot score a question. "multiple_choice" needs a question with options in lines such as
            "A. a dog", and the letter of an option as the accepted answer. "vqa_accuracy" needs several accepted
            answers, one from each annotator.
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
            problem = "vqa_accuracy needs answers of several people under 'references', found only one accepted answer"
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
    count_drafts: bool = False,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **settings: Any,
) -> list[ScoredAnswer]:
    """Return the scored answers to all prompts, on all ranks. All ranks must pass the same prompts.

    Data-parallel ranks divide the prompts. But if expert parallelism or Megatron-FSDP shards weights over these ranks,
    they run each forward pass together, and every rank generates all answers.

    Args:
        model: the chunks of this rank, as for `generate`.
        prompts: the prompts.
        metric: a key of `SCORERS`.
        batch_size: number of prompts that are decoded together.
        seed: as for `generate`; None for 0. Each batch uses a different seed, which is derived from this one.
        count_drafts: whether to count accepted drafts. The model needs multi-token prediction, and decoding is greedy.
        progress: function that receives the indices of this rank's batches, and returns an iterable over them that may
            show progress.
        settings: further arguments of `generate`.

    Raises:
        DataError: a prompt cannot be encoded, or `metric` cannot score a question (see `make_references`).
        CheckpointError: a prompt of another rank cannot be encoded.
    """
    groups: ProcessGroupCollection = get_attr_wrapped_model(model[0], "pg_collection")
    questions, references = prompts.questions, make_references(prompts.questions, metric)
    rank, ranks = (0, 1) if ranks_in_step(model) is not None else (groups.dp.rank(), groups.dp.size())
    # Prompts of similar length need little padding.
    order = sorted(range(len(questions)), key=lambda number: questions[number].tokens)[rank::ranks]
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    answers: dict[int, tuple[str, int, int]] = {}  # text, number of drafts, accepted drafts
    with raise_on_all_ranks():
        for number in progress(range(len(batches))):
            encoded = [prompts.encode(questions[index]) for index in batches[number]]
            drawn = (seed or 0) + number * ranks + rank if settings.get("do_sample") else seed
            sequences = _generate_tokens(model, encoded, seed=drawn, **settings)
            texts = prompts.encoder.processor.tokenizer.batch_decode(sequences, skip_special_tokens=True)
            for index, prompt, text, tokens in zip(batches[number], encoded, texts, sequences, strict=True):
                drafts = (0, 0)
                if count_drafts:
                    tokens = _until_end(tokens, settings["eos_token_id"])
                    vision = {name: pixels.to(tokens.device) for name, pixels in prompt.vision_inputs.items()}
                    accepted = count_accepted_drafts(model, prompt.sample.input_ids, tokens.cpu(), vision)
                    drafts = (len(tokens) - 1, accepted)
                answers[index] = (prompt.extract_answer(text).strip(), *drafts)
    if ranks > 1:
        answers = {index: one for found in gather_objects(answers, groups.dp) for index, one in found.items()}
    scored = []
    for index, (question, reference) in enumerate(zip(questions, references, strict=True)):
        answer, *drafts = answers[index]
        score = SCORERS[metric](answer, reference)
        scored.append(ScoredAnswer(question.sample_id, question.text, question.references, answer, score, *drafts))
    return scored


def _generate_tokens(model: list[nn.Module], encoded: Sequence[Prompt], **settings: Any) -> torch.Tensor:
    """Return the tokens of the answers to a batch of prompts, [prompts, longest answer]."""
    device = next(model[0].parameters()).device
    tokens = [prompt.sample.input_ids for prompt in encoded]
    ids = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in tokens], batch_first=True)
    vision: dict[str, torch.Tensor] = {}
    for name in sorted({name for prompt in encoded for name in prompt.vision_inputs}):
        vision[name] = torch.cat([p.vision_inputs[name] for p in encoded if name in p.vision_inputs]).to(device)
    sequences = generate(model, ids.to(device), mask.to(device), **vision, **settings)
    return sequences[:, ids.shape[1] :]


def _until_end(answer: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Return an answer [tokens] up to and including the first token in `ends`; the full answer if it has none."""
    is_end = torch.isin(answer, torch.tensor(ends, dtype=answer.dtype, device=answer.device)).nonzero()
    return answer[: int(is_end[0]) + 1] if len(is_end) else answer


def mean_score(answers: Sequence[ScoredAnswer]) -> float:
    """Return the mean of the scores, or 0 if there are no answers."""
    return sum(answer.score for answer in answers) / max(len(answers), 1)


def acceptance_rate(answers: Sequence[ScoredAnswer]) -> float | None:
    """Return the fraction of drafts that are accepted, or None if there are no drafts."""
    drafts = sum(answer.drafts for answer in answers)
    return sum(answer.accepted for answer in answers) / drafts if drafts else None

"""Generate answers to the prompts of a data set, and score them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.core.collectives import gather_objects
from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.prompts import Prompt
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


def references_of(prompts: Iterable[Prompt], metric: str) -> list[Reference]:
    """Return what the answers to prompts are compared with.

    Raises:
        DataError: `metric` is "multiple_choice", and a question has no options in lines such as "A. a dog", or an
            accepted answer is not the letter of one.
    """
    found = []
    for prompt in prompts:
        choices = choices_in(prompt.question) if metric == "multiple_choice" else {}
        letters = tuple(answer.strip() for answer in prompt.references)
        if metric == "multiple_choice" and not (choices and choices.keys() >= set(letters)):
            raise DataError(
                prompt.sample_id,
                f"found the options {list(choices)} in the question and the accepted answers {list(letters)}, expected "
                'lines such as "A. a dog" and the letter of one of them',
            )
        found.append(Reference(letters if choices else prompt.references, choices))
    return found


def evaluate(
    model: nn.Module | list[nn.Module],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    metric: str,
    *,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **settings: Any,
) -> list[ScoredAnswer]:
    """Return the scored answers to all prompts, on all ranks. All ranks must pass the same prompts.

    Data-parallel ranks divide the prompts. With expert parallelism or Megatron-FSDP they run their forward passes
    together, so every rank generates all answers.

    Args:
        model: as for `generate`.
        prompts: the prompts.
        tokenizer: decodes answers.
        metric: a key of `SCORERS`.
        batch_size: number of prompts that are decoded together.
        progress: wraps the numbers of this rank's batches to show progress.
        settings: further arguments of `generate`.

    Raises:
        DataError: see `references_of`.
    """
    chunks = model if isinstance(model, list) else [model]
    groups: ProcessGroupCollection = get_attr_wrapped_model(chunks[0], "pg_collection")
    references = references_of(prompts, metric)
    rank, ranks = (0, 1) if ranks_in_step(model) is not None else (groups.dp.rank(), groups.dp.size())
    # Prompts of similar length need little padding.
    order = sorted(range(len(prompts)), key=lambda number: len(prompts[number].prompt.input_ids))[rank::ranks]
    batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    texts: dict[int, str] = {}
    for number in progress(range(len(batches))):
        asked = [prompts[index] for index in batches[number]]
        for index, text in zip(batches[number], _answers(chunks, asked, tokenizer, settings), strict=True):
            texts[index] = prompts[index].extract_answer(text)
    if ranks > 1:
        texts = {index: text for found in gather_objects(texts, groups.dp) for index, text in found.items()}
    scorer, scored = SCORERS[metric], []
    for index, (prompt, reference) in enumerate(zip(prompts, references, strict=True)):
        answer = texts[index].strip()
        scores = scorer(answer, reference)
        scored.append(ScoredAnswer(prompt.sample_id, prompt.question, prompt.references, answer, scores))
    return scored


def _answers(
    model: list[nn.Module], prompts: Sequence[Prompt], tokenizer: Any, settings: dict[str, Any]
) -> Iterator[str]:
    """Yield the decoded answers to a batch of prompts."""
    device = next(model[0].parameters()).device
    tokens = [prompt.prompt.input_ids for prompt in prompts]
    ids = pad_sequence(tokens, batch_first=True)
    mask = pad_sequence([torch.ones_like(prompt) for prompt in tokens], batch_first=True)
    vision: dict[str, torch.Tensor] = {}
    for name in sorted({name for prompt in prompts for name in prompt.vision_inputs}):
        vision[name] = torch.cat([p.vision_inputs[name] for p in prompts if name in p.vision_inputs]).to(device)
    sequences = generate(model, ids.to(device), mask.to(device), **vision, **settings)
    yield from tokenizer.batch_decode(sequences[:, ids.shape[1] :], skip_special_tokens=True)


def mean_score(answers: Sequence[ScoredAnswer]) -> float:
    """Return the mean of the scores; 0 without answers."""
    return sum(answer.score for answer in answers) / max(len(answers), 1)

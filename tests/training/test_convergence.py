"""Fifty steps of the loop and of transformers with torch's AdamW on the same data: one loss curve."""

from __future__ import annotations

import math

import pytest

from tests.steps import set_up, train_step

from .adamw import matrices_decay, reference_steps
from .running import replicate

pytestmark = pytest.mark.slow

STEPS, ROWS, LR, MIN_LR, WARMUP, DECAY, CLIP = 50, 2, 1e-3, 1e-4, 5, 0.1, 1.0
# Relative errors of losses and gradient norms in float32, the largest of all steps; measured 2.6e-7 and 2.3e-6.
LOSS, NORM = 1e-5, 1e-4


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine from LR to MIN_LR; as megatron-core's scheduler has it at the end of a step."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


def test_fifty_steps_are_those_of_transformers(inputs, record_property):
    from transformers import Qwen3VLForConditionalGeneration

    settings = dict(
        optimizer__lr=LR,
        optimizer__min_lr=MIN_LR,
        optimizer__weight_decay=DECAY,
        optimizer__clip_grad=CLIP,
        scheduler__lr_warmup_iters=WARMUP,
        train__train_iters=STEPS,
        train__global_batch_size=ROWS,
    )
    stream = inputs.config(None).dataset.stream("train")
    batches = [next(stream) for _ in range(STEPS * ROWS)]
    reference = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    cfg = inputs.config(None, **settings)
    run = set_up(replicate(cfg))
    errors = {"loss": 0.0, "norm": 0.0}
    curve = []
    steps = reference_steps(reference, matrices_decay(reference, DECAY), batches, ROWS, learning_rate, CLIP)
    for step, (loss, norm) in enumerate(steps):
        ours = train_step(run)
        assert math.isclose(ours["lr"], learning_rate(step), rel_tol=1e-9)
        errors["loss"] = max(errors["loss"], abs(ours["loss"] / loss - 1))
        errors["norm"] = max(errors["norm"], abs(ours["grad_norm"] / norm - 1))
        curve.append(loss)
    record_property("errors", errors)
    assert curve[-1] < curve[0] / 2, "nothing was learnt"
    assert errors["loss"] <= LOSS, errors
    assert errors["norm"] <= NORM, errors

"""Steps of the loop are the steps of transformers with torch's AdamW on the same batches."""

from __future__ import annotations

import math

import pytest

from tests.steps import set_up, train_step

from .adamw import matrices_decay, reference_steps
from .running import replicate

# Relative errors in float32: of losses and gradient norms, the largest of all steps, and of each weight against how far
# it moved. Measured after two steps 1.5e-7, 3.1e-5 and 5.1e-4, and of fifty 2.6e-7 and 2.3e-6.
LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-2
ROWS, LR, MIN_LR, WARMUP, DECAY = 2, 1e-3, 1e-4, 5, 0.1


def cosine(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from LR to MIN_LR; as megatron-core's scheduler has it at the end of a step."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / (steps - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


@pytest.mark.parametrize("steps", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_steps_equal_transformers_with_adamw(inputs, steps, record_property):
    """Two at a constant rate, also their weights; fifty of a schedule, with clipping."""
    from megatron.bridge import AutoBridge
    from transformers import Qwen3VLForConditionalGeneration

    two = steps == 2
    clip = math.inf if two else 1.0
    schedule = dict(scheduler__lr_decay_style="constant") if two else dict(train__train_iters=steps)
    cfg = inputs.config(
        None, optimizer__lr=LR, optimizer__min_lr=LR if two else MIN_LR, optimizer__weight_decay=DECAY,
        optimizer__clip_grad=0.0 if two else clip, scheduler__lr_warmup_iters=0 if two else WARMUP,
        train__global_batch_size=ROWS, **schedule,
    )  # fmt: skip
    stream = inputs.config(None).dataset.stream("train")
    batches = [next(stream) for _ in range(steps * ROWS)]
    reference = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    run = set_up(replicate(cfg))
    rate = (lambda _: LR) if two else (lambda step: cosine(step, steps))
    errors, curve = {"loss": 0.0, "norm": 0.0}, []
    expected = reference_steps(
        reference, matrices_decay(reference, DECAY), batches, ROWS, rate, *([] if two else [clip])
    )
    for step, (loss, norm) in enumerate(expected):
        ours = train_step(run)
        assert math.isclose(ours["lr"], rate(step), rel_tol=1e-9)
        errors["loss"] = max(errors["loss"], abs(ours["loss"] / loss - 1))
        errors["norm"] = max(errors["norm"], abs(ours["grad_norm"] / norm - 1))
        curve.append(loss)
    record_property("errors", errors)
    assert errors["loss"] <= LOSS, errors
    assert errors["norm"] <= NORM, errors
    if not two:
        assert curve[-1] < curve[0] / 2, "nothing was learnt"
        return
    bridge = AutoBridge.from_hf_pretrained(str(inputs.hf))
    trained = dict(bridge.export_hf_weights(run.model, cpu=True, show_progress=False))
    for name, p in reference.named_parameters():
        assert (trained[name] - p).norm() / (p - before[name]).norm() <= WEIGHT, name

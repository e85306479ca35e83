"""Fifty steps of the loop and of transformers with torch's AdamW on the same data: one loss curve."""

from __future__ import annotations

import math

import torch

from .test_against_adamw import documents, sum_of_losses

STEPS, ROWS, LR, MIN_LR, WARMUP, DECAY, CLIP = 50, 2, 1e-3, 1e-4, 5, 0.1, 1.0
# Relative errors of losses and gradient norms in float32, the largest of all steps; measured 2.6e-7 and 2.3e-6.
LOSS, NORM = 1e-5, 1e-4


def learning_rate(step: int) -> float:
    """Linear warm-up, then a cosine from LR to MIN_LR; as megatron-core's scheduler has it at the end of a step."""
    if step <= WARMUP:
        return LR * step / WARMUP
    done = (step - WARMUP) / (STEPS - WARMUP)
    return MIN_LR + (LR - MIN_LR) * (1 + math.cos(math.pi * done)) / 2


def reference_curve(model, batches):
    """Loss and gradient norm of each step; the model is trained in place."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [dict(params=matrices, weight_decay=DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        total = tokens = 0.0
        for batch in batches[step * ROWS : (step + 1) * ROWS]:
            for document in documents(batch):
                loss, count = sum_of_losses(model, *document)
                total, tokens = total + loss, tokens + count
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        yield total.item() / tokens, norm.item()


def test_fifty_steps_are_those_of_transformers(inputs, record_property):
    from qwen3vl_bridge.training.loop import set_up, train_step

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
    cfg.guard = None  # steps are taken one by one here, without callbacks
    run = set_up(cfg)
    errors = {"loss": 0.0, "norm": 0.0}
    curve = []
    for step, (loss, norm) in enumerate(reference_curve(reference, batches)):
        ours = train_step(run)
        assert math.isclose(ours["lr"], learning_rate(step), rel_tol=1e-9)
        errors["loss"] = max(errors["loss"], abs(ours["loss"] / loss - 1))
        errors["norm"] = max(errors["norm"], abs(ours["grad_norm"] / norm - 1))
        curve.append(loss)
    record_property("errors", errors)
    assert curve[-1] < curve[0] / 2, "nothing was learnt"
    assert errors["loss"] <= LOSS, errors
    assert errors["norm"] <= NORM, errors

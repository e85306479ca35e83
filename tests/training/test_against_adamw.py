"""Steps of the loop are the steps of transformers with torch's AdamW on the same batches."""

from __future__ import annotations

from tests.steps import set_up, train_step

from .adamw import matrices_decay, reference_steps
from .running import replicate

# Relative errors after two steps in float32; measured 1.5e-7, 3.1e-5 and, of each
# weight against how far it moved, 5.1e-4.
LOSS, NORM, WEIGHT = 1e-5, 1e-4, 1e-2
STEPS, ROWS, LR, DECAY = 2, 2, 1e-3, 0.1


def test_two_steps_equal_transformers_with_adamw(inputs):
    from megatron.bridge import AutoBridge
    from transformers import Qwen3VLForConditionalGeneration

    cfg = inputs.config(
        None,
        optimizer__lr=LR,
        optimizer__min_lr=LR,
        optimizer__weight_decay=DECAY,
        optimizer__clip_grad=0.0,
        scheduler__lr_decay_style="constant",
        scheduler__lr_warmup_iters=0,
        train__global_batch_size=ROWS,
    )
    run = set_up(replicate(cfg))
    stream = inputs.config(None).dataset.stream("train")
    batches = [next(stream) for _ in range(STEPS * ROWS)]
    reference = Qwen3VLForConditionalGeneration.from_pretrained(inputs.hf, attn_implementation="eager").train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    errors = {"loss": 0.0, "norm": 0.0}
    for loss, norm in reference_steps(reference, matrices_decay(reference, DECAY), batches, ROWS, lambda _: LR):
        ours = train_step(run)
        errors["loss"] = max(errors["loss"], abs(ours["loss"] / loss - 1))
        errors["norm"] = max(errors["norm"], abs(ours["grad_norm"] / norm - 1))
    assert errors["loss"] <= LOSS, errors
    assert errors["norm"] <= NORM, errors

    bridge = AutoBridge.from_hf_pretrained(str(inputs.hf))
    trained = dict(bridge.export_hf_weights(run.model, cpu=True, show_progress=False))
    worst = 0.0
    for name, p in reference.named_parameters():
        moved = (p - before[name]).norm()
        worst = max(worst, ((trained[name] - p).norm() / moved).item())
    assert worst <= WEIGHT, worst

"""What transformers and torch's AdamW make of the batches of a run: the reference of tests that compare steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F


def documents(batch):
    """The conversations of a packed row: ids, labels, mask, pixels (each has one picture of 4 x 4 patches)."""
    starts = batch.layout.cu_seqlens_padded.tolist()
    for i, n in enumerate(length for length in batch.layout.lengths if length):
        place = slice(starts[i], starts[i] + n)
        pixels = batch.vision.pixel_values[16 * i : 16 * (i + 1)]
        yield batch.input_ids[0, place], batch.labels[0, place], batch.loss_mask[0, place], pixels


def sum_of_losses(model, ids, labels, mask, pixels):
    """Of the tokens of a conversation that count, and how many these are."""
    kinds = (ids == model.config.image_token_id).int()[None]
    grid = torch.tensor([[1, 4, 4]])
    out = model(input_ids=ids[None], mm_token_type_ids=kinds, pixel_values=pixels, image_grid_thw=grid)
    return (F.cross_entropy(out.logits[0], labels, reduction="none") * mask).sum(), mask.sum().item()


def matrices_decay(model: torch.nn.Module, decay: float) -> list[dict[str, Any]]:
    """Parameter groups as Megatron has them: norms and biases do not decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return [dict(params=matrices, weight_decay=decay), dict(params=others, weight_decay=0.0)]


def reference_steps(
    model: torch.nn.Module,
    groups: list[dict[str, Any]],
    batches: Sequence,
    rows: int,
    learning_rate: Callable[[int], float],
    clip: float = float("inf"),
    eps: float = 1e-8,
) -> Iterator[tuple[float, float]]:
    """Loss and gradient norm of each step, the norm before clipping; the model is trained in place."""
    optimizer = torch.optim.AdamW(groups, lr=learning_rate(0), betas=(0.9, 0.95), eps=eps)
    trained = [p for group in groups for p in group["params"]]
    for step in range(len(batches) // rows):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        total = tokens = 0.0
        for batch in batches[step * rows : (step + 1) * rows]:
            for document in documents(batch):
                loss, count = sum_of_losses(model, *document)
                total, tokens = total + loss, tokens + count
        (total / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
        yield total.item() / tokens, norm.item()

"""What transformers and torch make of Muon: each projection orthogonalised by itself, the rest with AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.parity.batches import run_reference
from tests.parity.references import ADAM, CLIP, DECAY, step_samples, torch_linear_attention

STEPS, CONTENT = 2, "mixed"
MOMENTUM, ITERATIONS = 0.9, 5
# Of the quintic polynomial, https://kellerjordan.github.io/posts/muon/: megatron-core's coefficient type "simple".
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SETTINGS = dict(
    optimizer__optimizer="muon", optimizer__muon_momentum=MOMENTUM, optimizer__muon_num_ns_steps=ITERATIONS,
    optimizer__muon_coefficient_type="simple", optimizer__muon_fp32_matmul_prec="highest",
    optimizer__muon_tp_mode="duplicated",
)  # fmt: skip


def newton_schulz(matrix: Tensor) -> Tensor:
    """An approximation of the nearest matrix with orthonormal rows or columns."""
    a, b, c = COEFFICIENTS
    x = matrix.T if len(matrix) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if len(matrix) > matrix.size(1) else x


def parts_of(name: str, tensor: Tensor, text: Any) -> list[Tensor]:
    """Views of a parameter's parts [..., rows, columns] that a layer uses as matrices of their own."""
    if name.endswith("attn.qkv.weight"):
        return list(tensor.chunk(3))
    if name.endswith("in_proj_qkv.weight"):
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        return list(tensor.split([keys, keys, len(tensor) - 2 * keys]))
    if name.endswith("q_proj.weight") and len(tensor) == 2 * text.num_attention_heads * text.head_dim:
        return list(tensor.view(text.num_attention_heads, 2, text.head_dim, -1).unbind(1))  # queries and gates
    return list(tensor) if tensor.ndim == 3 else [tensor]  # experts


def matrices_of(tensors: dict[str, Tensor], text: Any) -> list[list[Tensor]]:
    """The matrices that Muon orthogonalises, each as views whose rows are its own.

    As in all models of megatron-core, gate and up projection of an MLP are one matrix.
    """
    found = []
    for name, tensor in tensors.items():
        if name.endswith("up_proj.weight"):
            continue
        up = name.replace("gate_proj", "up_proj")
        found += [[tensor, tensors[up]]] if up != name else [[part] for part in parts_of(name, tensor, text)]
    return found


def is_for_adam(name: str, p: Tensor) -> bool:
    embedding = any(part in name for part in ("embed_tokens", "lm_head", "pos_embed"))
    return embedding or not (p.ndim == 2 or ".experts." in name)


def train_with_muon(folder: Path, *, last_first: bool = False) -> dict[str, dict[str, Tensor]]:
    """Two steps; `before` and `after` are the weights by name."""
    from transformers import AutoModelForImageTextToText

    with torch_linear_attention():
        model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").train()
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    adam = {name: p for name, p in named.items() if is_for_adam(name, p)}
    muon = {name: p for name, p in named.items() if name not in adam}
    groups = [
        dict(params=[p for p in adam.values() if (p.ndim > 1) == decays], weight_decay=DECAY if decays else 0.0)
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, **ADAM)
    momentum = {name: torch.zeros_like(p) for name, p in muon.items()}
    for step in range(STEPS):
        model.zero_grad()
        microbatches = step_samples(CONTENT, model.config, step)
        tokens = sum(sample.loss_mask.sum() for samples in microbatches for sample in samples)
        for samples in reversed(microbatches) if last_first else microbatches:
            (run_reference(model, samples)[1] / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        with torch.no_grad():
            for name, p in muon.items():
                momentum[name].lerp_(p.grad, 1 - MOMENTUM)
                p.mul_(1 - ADAM["lr"] * DECAY)
            text = model.config.text_config
            for moments, weights in zip(matrices_of(momentum, text), matrices_of(muon, text), strict=True):
                step_matrix(moments, weights)
    return dict(before=before, after={name: p.detach().clone() for name, p in named.items()})


def step_matrix(moments: list[Tensor], weights: list[Tensor]) -> None:
    """Subtract the orthogonalised moments of one matrix, scaled by the root of its longer side."""
    matrix = torch.cat([part.flatten(0, -2) for part in moments])
    update = newton_schulz(matrix) * ADAM["lr"] * max(matrix.shape) ** 0.5
    for part, rows in zip(weights, update.split([part.flatten(0, -2).size(0) for part in weights]), strict=True):
        part -= rows.view_as(part)

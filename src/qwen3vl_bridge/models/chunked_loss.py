"""The loss of long rows, without all of their logits in memory at once.

megatron-core keeps the softmax of s * vocabulary logits in float32 until the backward pass: 74 GiB for 131,072 tokens
of Qwen3-VL. Here the forward pass keeps only the hidden states, and the backward pass recomputes one chunk's logits
after the other, for one more product of hidden states and output weights. (Gradients in the forward pass, as in Liger
Kernel, would need the loss scale, the tokens of the global batch and callers' weights there, which are applied later.)

Output layer and loss are the model's own, so parallelism, adapters, the vocabulary's padding and fused kernels work as
for a whole row. The parameters' gradients are summed in float32 and rounded once; if megatron-core's layer adds them to
`main_grad` by itself (`gradient_accumulation_fusion`), it does so chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Head:
    """Computes losses from hidden states."""

    # (hidden states [s / sp, b, h], weight, runtime_gather_output) -> logits [s, b, v / tp] and a bias.
    output_layer: nn.Module
    weight: Tensor | None  # that of tied embeddings, or None for the layer's own
    gather: bool | None  # `runtime_gather_output`
    loss: Callable[[Tensor, Tensor], Tensor]  # (labels [b, s], logits) -> losses [b, s]

    def logits(self, hidden: Tensor) -> Tensor:
        """[s, b, v / tp] of hidden states [s / sp, b, h]."""
        return self.output_layer(hidden, weight=self.weight, runtime_gather_output=self.gather)[0]

    def trained(self) -> list[Tensor]:
        """Weights that get a gradient."""
        weights = [*self.output_layer.parameters(), *([] if self.weight is None else [self.weight])]
        return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]


# Called with each chunk's logits [n, b, v / tp] and its parts of tensors [b, s].
Seen = Callable[..., None]


def loss_processor(
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    runtime_gather_output: bool | None,
    compute_language_model_loss: Callable[[Tensor, Tensor], Tensor],
    config: Any,
    **_: Any,
) -> Tensor:
    """Losses [b, s], like GPTModel's; the arguments are those of its `output_processor`."""
    head = Head(output_layer, output_weight, runtime_gather_output, compute_language_model_loss)
    tokens = 0 if is_distilled(output_layer) else config.loss_chunk_tokens
    return token_losses(head, hidden_states, labels, tokens)


def is_distilled(output_layer: nn.Module) -> bool:
    """Whether ModelOpt takes a teacher's or a student's logits here, all at once, and reads them after the loss."""
    return hasattr(output_layer, "_intermediate_output")


def token_losses(
    head: Head, hidden: Tensor, labels: Tensor, tokens: int, seen: Seen | None = None, others: tuple[Tensor, ...] = ()
) -> Tensor:
    """Losses [b, s] in float32 of hidden states [s / sp, b, h]. With more labels [b, s] than `tokens`, over rows and
    ranks, they are computed from the logits of one chunk of at most so many at a time; 0: at once.

    Chunks differ by at most one token of each row and rank, of which each has at least one. Under sequence parallelism
    a chunk has the tokens of the same positions in every rank's part. `seen` is called in the forward pass with each
    chunk's logits and its parts of `others`, tensors [b, s], in order.

    Raises:
        ValueError: labels of another number of tokens.
    """
    if not 0 < tokens < labels.numel():
        return _losses(head, seen, hidden, labels, *others)
    (length, rows, _), (of_rows, of_length) = hidden.shape, labels.shape
    if of_rows != rows or of_length % length:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected {[rows, length]}, or a multiple of {length} tokens if "
            "sequence parallelism has split them"
        )
    chunks = min(-(-labels.numel() // tokens), length)
    return _ChunkedLosses.apply(head, chunks, seen, others, hidden, labels, *head.trained())


def _losses(head: Head, seen: Seen | None, hidden: Tensor, labels: Tensor, *others: Tensor) -> Tensor:
    logits = head.logits(hidden)
    if seen is not None:
        seen(logits.detach(), *others)  # before the loss, which may overwrite logits
    return head.loss(labels, logits)


class _ChunkedLosses(torch.autograd.Function):
    """Losses of hidden states. Weights are passed as arguments, so that autograd computes their gradients."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # logits are recomputed with the same autocast
    def forward(
        ctx: Any,
        head: Head,
        chunks: int,
        seen: Seen | None,
        others: tuple[Tensor, ...],
        hidden: Tensor,
        labels: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.head, ctx.chunks, ctx.weights = head, chunks, weights
        ctx.save_for_backward(hidden, labels)
        cuts = (_in_chunks(x, len(hidden), chunks) for x in (labels, *others))
        losses = [_losses(head, seen, *parts) for parts in zip(hidden.tensor_split(chunks), *cuts, strict=True)]
        ranks = labels.size(1) // len(hidden)  # the inverse of `_in_chunks`
        return torch.cat([part.unflatten(1, (ranks, -1)) for part in losses], dim=2).flatten(1)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        of_hidden, sums = torch.empty_like(hidden), dict[Tensor, Tensor]()
        cuts = (_in_chunks(x, len(hidden), ctx.chunks) for x in (labels, gradient))
        parts = (x.tensor_split(ctx.chunks) for x in (hidden, of_hidden))
        for part, of_part, of_labels, of_losses in zip(*parts, *cuts, strict=True):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                losses = _losses(ctx.head, None, part, of_labels)
            wanted = (part, *ctx.weights)
            of_input, *of_weights = torch.autograd.grad(losses, wanted, of_losses, allow_unused=True)
            of_part.copy_(of_input)
            _add(sums, ctx.weights, of_weights)
            del losses, of_weights  # before the next chunk's are made
        of_weights = (sums[weight].to(weight.dtype) if weight in sums else None for weight in ctx.weights)
        return None, None, None, None, of_hidden, None, *of_weights


def _add(sums: dict[Tensor, Tensor], weights: tuple[Tensor, ...], gradients: list[Tensor | None]) -> None:
    """Add gradients of weights to their sums in float32."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if not getattr(weight, "grad_added_to_main_grad", False):  # otherwise it is only a placeholder
            gradient = sums[weight].add_(gradient) if weight in sums else gradient.float()
        sums[weight] = gradient


def _in_chunks(x: Tensor, length: int, chunks: int) -> list[Tensor]:
    """[b, sp * length] -> a chunk's [b, sp * n] each, with the same positions of every rank's part."""
    return [part.flatten(1) for part in x.unflatten(1, (-1, length)).tensor_split(chunks, dim=2)]

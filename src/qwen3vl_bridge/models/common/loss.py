"""The loss of each token: cross-entropy of 16-bit logits, and losses in chunks for long rows.

Cross-entropy: megatron-core's native fused loss, compiled for a GPU, moves 43 bytes per logit and holds 10 bytes per
logit (the logits, their exponentials and the softmax). Here the forward pass reads the logits and keeps two numbers per
token. The backward pass reads the logits again and writes their gradient. That moves 6 bytes per logit and holds 4.
Each number is computed in float32 by the same operations as in megatron-core's unfused loss.

Chunks: megatron-core keeps the softmax of s * vocabulary logits in float32 until the backward pass: 74 GiB for 131,072
tokens of Qwen3-VL. Here the forward pass keeps only the hidden states, and the backward pass recomputes the logits of
one chunk at a time, at the cost of one more product of hidden states and output weights. (Liger Kernel computes the
gradients in the forward pass. It would have to know the loss scale, the number of tokens of the global batch and the
loss weights of callers, which are applied later.) Output layer and loss are the model's own, so parallelism, adapters,
padding of the vocabulary and fused kernels work as for a full row. Gradients of parameters are summed in float32 and
rounded once. If megatron-core's layer adds gradients to `main_grad` (`gradient_accumulation_fusion`), it does so for
each chunk.

Legend of shapes: b rows, s tokens, h hidden size, v vocabulary with padding, t tokens of all rows, n tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.core.collectives import max_in_group, sum_in_group
from qwen3vl_bridge.upstream.dynamic_shapes import call_compiled
from qwen3vl_bridge.upstream.modelopt_layers import keeps_output

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


def cross_entropy(logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Return losses [s, b] in float32 for labels [s, b] and logits [s, b, vocabulary / tp] of one TP rank."""
    first = group.rank() * logits.size(-1)
    return _CrossEntropy.apply(logits.flatten(0, 1), labels.flatten() - first, group).view(labels.shape)


class _CrossEntropy(torch.autograd.Function):
    """Autograd function for losses [tokens] of logits [tokens, vocabulary / tp] and labels [tokens].

    Labels are relative to the first vocabulary entry of this rank.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        logits = logits.detach()  # torch would otherwise compile a second variant for logits that require gradients
        local_max, total, label_logit = call_compiled(_statistics, logits, labels)
        largest = max_in_group(local_max, group)
        if group.size() > 1:
            total, label_logit = sum_in_group(torch.stack((total * (local_max - largest).exp(), label_logit)), group)
        ctx.save_for_backward(logits, labels, largest, total)
        return total.log() - (label_logit - largest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return call_compiled(_logits_gradient, *ctx.saved_tensors, gradient.contiguous()), None, None


def _statistics(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest logit, the sum of exp(logit - largest), and the label's logit: three tensors [tokens].

    The label's logit is 0 if another rank has the label.
    """
    exact = logits.float()
    largest = exact.amax(-1).clamp(min=torch.finfo(torch.float32).min)  # a rank may have only padding
    total = (exact - largest[:, None]).exp().sum(-1)
    label_logit = exact.gather(-1, labels.clamp(0, exact.size(-1) - 1)[:, None])[:, 0]
    return largest, total, torch.where((labels >= 0) & (labels < exact.size(-1)), label_logit, 0.0)


def _logits_gradient(logits: Tensor, labels: Tensor, largest: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    softmax = (logits.float() - largest[:, None]).exp() / total[:, None]
    is_label = torch.arange(logits.size(-1), device=logits.device) == labels[:, None]
    return ((softmax - is_label.float()) * gradient[:, None]).to(logits.dtype)


@dataclass(frozen=True)
class LossHead:
    """The output layer and the loss function, which compute losses from hidden states.

    Attributes:
        output_layer: (hidden states [s / sp, b, h], weight, runtime_gather_output) -> logits [s, b, vocabulary / tp]
            and a bias.
        weight: the weight of tied embeddings; None to use the output layer's own weight.
        gather: the output layer's argument `runtime_gather_output`.
        loss: (labels [b, s], logits) -> losses [b, s].
    """

    output_layer: nn.Module
    weight: Tensor | None
    gather: bool | None
    loss: Callable[[Tensor, Tensor], Tensor]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits [s, b, vocabulary / tp] of hidden states [s / sp, b, h]."""
        return self.output_layer(hidden, weight=self.weight, runtime_gather_output=self.gather)[0]

    def compute_losses(
        self, on_logits: LogitsHook | None, hidden: Tensor, labels: Tensor, *hook_inputs: Tensor
    ) -> Tensor:
        """Return losses [b, s] of hidden states [s / sp, b, h] and labels [b, s].

        `on_logits` is called with the logits and `hook_inputs` before the loss is computed.
        """
        logits = self.compute_logits(hidden)
        if on_logits is not None:
            on_logits(logits.detach(), *hook_inputs)  # before the loss, which may overwrite the logits
        return self.loss(labels, logits)

    def trained_weights(self) -> list[Tensor]:
        """Return the weights of the output layer that require gradients, including a tied weight."""
        weights = [*self.output_layer.parameters(), *([] if self.weight is None else [self.weight])]
        return [weight for weight in dict.fromkeys(weights) if weight.requires_grad]


# Called with the logits [n, b, v / tp] of each chunk, and with the chunk of each additional tensor [b, s].
LogitsHook = Callable[..., None]


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
    """Return losses [b, s], computed in chunks of `config.loss_chunk_tokens`. An `output_processor` of GPTModel."""
    head = LossHead(output_layer, output_weight, runtime_gather_output, compute_language_model_loss)
    chunk_tokens = 0 if keeps_output(output_layer) else config.loss_chunk_tokens
    return token_losses(head, hidden_states, labels, chunk_tokens)


def token_losses(
    head: LossHead,
    hidden: Tensor,
    labels: Tensor,
    chunk_tokens: int,
    on_logits: LogitsHook | None = None,
    hook_inputs: tuple[Tensor, ...] = (),
) -> Tensor:
    """Return losses [b, s] in float32, computed in chunks if there are more than `chunk_tokens` labels.

    Args:
        head: the output layer and the loss.
        hidden: [s / sp, b, h]. Under sequence parallelism, a chunk consists of the same positions on every rank.
        labels: [b, s].
        chunk_tokens: maximum number of tokens in a chunk, over rows and ranks, but at least one token of each row and
            rank; 0 for a single chunk.
        on_logits: called in the forward pass with the logits of each chunk and its chunks of `hook_inputs`, in order.
        hook_inputs: tensors [b, s].

    Raises:
        ValueError: the number of labels does not match the hidden states.
    """
    if not 0 < chunk_tokens < labels.numel():
        return head.compute_losses(on_logits, hidden, labels, *hook_inputs)
    (length, rows, _), (label_rows, label_length) = hidden.shape, labels.shape
    if label_rows != rows or label_length % length:
        raise ValueError(
            f"labels have shape {list(labels.shape)}, expected {[rows, length]}, or a multiple of {length} as the "
            "second size under sequence parallelism: one label for each hidden state of all sequence-parallel ranks"
        )
    chunks = min(-(-labels.numel() // chunk_tokens), length)
    return _ChunkedLosses.apply(head, chunks, on_logits, hook_inputs, hidden, labels, *head.trained_weights())


class _ChunkedLosses(torch.autograd.Function):
    """Autograd function for losses of hidden states, computed in chunks, and recomputed in the backward pass."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # logits are recomputed with the same autocast
    def forward(
        ctx: Any,
        head: LossHead,
        chunks: int,
        on_logits: LogitsHook | None,
        hook_inputs: tuple[Tensor, ...],
        hidden: Tensor,
        labels: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.head, ctx.chunks, ctx.weights = head, chunks, weights
        ctx.save_for_backward(hidden, labels)
        by_row = (_split_rows(x, len(hidden), chunks) for x in (labels, *hook_inputs))
        losses = [
            head.compute_losses(on_logits, *chunk) for chunk in zip(hidden.tensor_split(chunks), *by_row, strict=True)
        ]
        ranks = labels.size(1) // len(hidden)  # the inverse of `_split_rows`
        return torch.cat([chunk.unflatten(1, (ranks, -1)) for chunk in losses], dim=2).flatten(1)

    @staticmethod
    @once_differentiable
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        hidden_gradient, sums = torch.empty_like(hidden), dict[Tensor, Tensor]()
        by_position = (x.tensor_split(ctx.chunks) for x in (hidden, hidden_gradient))
        by_row = (_split_rows(x, len(hidden), ctx.chunks) for x in (labels, gradient))
        for chunk, chunk_gradient, chunk_labels, loss_gradient in zip(*by_position, *by_row, strict=True):
            with torch.enable_grad():
                chunk = chunk.detach().requires_grad_()
                losses = ctx.head.compute_losses(None, chunk, chunk_labels)
            inputs = (chunk, *ctx.weights)
            input_gradient, *weight_gradients = torch.autograd.grad(losses, inputs, loss_gradient, allow_unused=True)
            chunk_gradient.copy_(input_gradient)
            _add_gradients(sums, ctx.weights, weight_gradients)
            del losses, weight_gradients  # free their memory before the next chunk
        weight_gradients = (sums[weight].to(weight.dtype) if weight in sums else None for weight in ctx.weights)
        return None, None, None, None, hidden_gradient, None, *weight_gradients


def _add_gradients(sums: dict[Tensor, Tensor], weights: tuple[Tensor, ...], gradients: list[Tensor | None]) -> None:
    """Add the gradient of each weight to its float32 sum in `sums`.

    Gradients that megatron-core has already added to `main_grad` are not summed.
    """
    for weight, gradient in zip(weights, gradients, strict=True):
        if gradient is None:
            continue
        if not getattr(weight, "grad_added_to_main_grad", False):  # otherwise it is only a placeholder
            gradient = sums[weight].add_(gradient) if weight in sums else gradient.float()
        sums[weight] = gradient


def _split_rows(x: Tensor, length: int, chunks: int) -> list[Tensor]:
    """Split x [b, sp * length] into `chunks` tensors, each with the same positions of every sequence-parallel rank."""
    return [chunk.flatten(1) for chunk in x.unflatten(1, (-1, length)).tensor_split(chunks, dim=2)]

"""Labels and loss masks as callers give them: for the whole batch, or for this context-parallel rank's tokens alone.

What lives here: which labels there can be a loss of, and where they lie. What may not: where tokens lie
(`padding_and_packing.py`), losses (`models/common/model.py`).

Megatron-Bridge's `qwen3_vl_step` and verl's fused kernels give whole rows of tokens, whose pictures need them, and
labels that are cut over context-parallel ranks already. They are told by their shape. Nobody else's are needed, but for
multi-token prediction, which reads those of next tokens, on other ranks where a chunk ends.
Legend: B rows, S tokens a row, T tokens of the layout, b and s a rank's own of it.
"""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.batch import ModelInputs, PackedBatch, gathered_index
from qwen3vl_bridge.batch.device_transfer import on_host, sent
from qwen3vl_bridge.models.common.inputs.agreement import gather_share
from qwen3vl_bridge.models.common.inputs.padding_and_packing import Arrangement

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# What torch's cross_entropy leaves out, and collators put where nothing is trained on.
IGNORED = -100


def are_cut(arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, cp_size: int) -> bool:
    """Whether labels and mask, those that are given, are of this context-parallel rank's tokens alone."""
    given = [values.shape for values in (labels, loss_mask) if values is not None]
    return cp_size > 1 and bool(given) and all(shape == _of_a_rank(arranged, cp_size) for shape in given)


def with_labels(
    batch: PackedBatch, arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> PackedBatch:
    """A batch with labels and mask that were given for the whole of it.

    Args:
        batch: without them.
        arranged: where the caller's tokens lie in it.
        labels: [B, S] in the caller's places or, of a packed row, [1, T] in the layout's. None: zeros then.
        loss_mask: of the shape of labels, 0 where they may be anything. None: ones.
        vocab_size: of the tokens that labels may be.

    Returns:
        The batch; labels are `IGNORED` where there can be no loss.

    Raises:
        ValueError: other shapes, or labels that count and are no token ids.
    """
    if labels is not None and loss_mask is not None and loss_mask.shape != labels.shape:
        raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {list(labels.shape)} as labels")
    if labels is not None:
        labels = _readable(labels, loss_mask, arranged.shapes, vocab_size)
        batch = replace(batch, labels=arranged.take_given(labels))
    if loss_mask is not None:
        if loss_mask.shape not in arranged.shapes:
            raise ValueError(f"loss_mask has shape {list(loss_mask.shape)}, expected {_words(arranged.shapes)}")
        batch = replace(batch, loss_mask=arranged.take_given(loss_mask).float())
    return batch


def with_own_labels(
    inputs: ModelInputs, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> ModelInputs:
    """A rank's inputs with labels and mask of its own tokens, [b, s]; the rest as `with_labels`."""
    if labels is not None:
        labels = _readable(labels, loss_mask, [inputs.input_ids.shape], vocab_size)
    return replace(inputs, labels=labels, loss_mask=None if loss_mask is None else loss_mask.float())


def with_joined_labels(
    batch: PackedBatch,
    labels: Tensor,
    loss_mask: Tensor | None,
    vocab_size: int,
    group: ProcessGroup,
    device: torch.device,
) -> PackedBatch:
    """A batch with labels and mask of which each context-parallel rank gives its own tokens', [b, s].

    The host waits once, for those of all ranks.

    Args:
        batch: without them, on the host.
        labels, loss_mask, vocab_size: as for `with_labels`, on the host.
        group: context-parallel ranks; all of them give the same arguments, see `agreement.check_agreement`.
        device: which the group talks over.
    """
    given = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    shares = on_host({name: gather_share(sent(own, device), group) for name, own in given.items()})
    index, shape = gathered_index(batch.layout, group.size()), batch.input_ids.shape
    whole = {name: of_ranks.flatten()[index].view(shape) for name, of_ranks in shares.items()}
    mask = whole.get("loss_mask")
    labels = _readable(whole["labels"], mask, [shape], vocab_size)
    return replace(batch, labels=labels, loss_mask=batch.loss_mask if mask is None else mask.float())


def without_ignored(inputs: ModelInputs) -> tuple[ModelInputs, Tensor | None]:
    """Inputs whose labels are token ids, and [b, s] where they were `IGNORED`; None where none was."""
    if inputs.labels is None:
        return inputs, None
    ignored = inputs.labels < 0
    return (replace(inputs, labels=inputs.labels.clamp(min=0)), ignored) if ignored.any() else (inputs, None)


def _of_a_rank(arranged: Arrangement, cp_size: int) -> tuple[int, int]:
    rows = arranged.layout.num_rows
    return rows, arranged.layout.total // cp_size // rows


def _readable(labels: Tensor, loss_mask: Tensor | None, shapes: list, vocab_size: int) -> Tensor:
    """Labels that are token ids, or `IGNORED` where they need not be."""
    right = (labels >= 0) & (labels < vocab_size)
    free = labels == IGNORED if loss_mask is None else loss_mask == 0
    if labels.is_floating_point() or labels.shape not in shapes or not bool((right | free).all()):
        found = [labels.min().item(), labels.max().item()] if labels.numel() else []
        raise ValueError(
            f"labels has shape {list(labels.shape)} {labels.dtype} and entries in {found}, expected "
            f"{_words(shapes)} token ids below {vocab_size}, and anything else only where loss_mask is 0, or {IGNORED} "
            "without one"
        )
    return torch.where(right, labels, IGNORED)


def _words(shapes: list) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)

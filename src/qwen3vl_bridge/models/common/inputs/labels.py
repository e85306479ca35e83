"""Labels and loss masks from callers: for the whole batch, or only for this context-parallel rank's tokens.

What lives here: which labels can have a loss, and their positions. What may not: the positions of tokens
(`padding_and_packing.py`), losses (`models/common/model.py`).

Megatron-Bridge's `qwen3_vl_step` and verl's fused kernels pass whole rows of tokens, which images and videos need,
together with labels that are already split over context-parallel ranks. The two cases are distinguished by shape.
Labels of other ranks are needed only for multi-token prediction, which reads the labels of next tokens; at the end of a
chunk these are on another rank.
Legend: B rows, S tokens per row, T tokens of the layout, b and s a rank's local sizes.
"""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.batch import ModelInputs, PackedBatch, gathered_index
from qwen3vl_bridge.batch.device_transfer import on_host, sent
from qwen3vl_bridge.models.common.inputs.agreement import gather_slices
from qwen3vl_bridge.models.common.inputs.padding_and_packing import Arrangement

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

# The ignore_index of torch's cross_entropy, which collators set for tokens that are not trained on.
IGNORED = -100


def are_cut(arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, cp_size: int) -> bool:
    """Whether the given labels and mask cover only this context-parallel rank's tokens."""
    given = [values.shape for values in (labels, loss_mask) if values is not None]
    return cp_size > 1 and bool(given) and all(shape == _of_a_rank(arranged, cp_size) for shape in given)


def with_labels(
    batch: PackedBatch, arranged: Arrangement, labels: Tensor | None, loss_mask: Tensor | None, vocab_size: int
) -> PackedBatch:
    """Add labels and a loss mask for the whole batch to a batch.

    Args:
        batch: a batch without labels.
        arranged: maps the caller's tokens to positions in the layout.
        labels: [B, S] in the caller's order or, for a packed row, [1, T] in the layout's order. None: zeros.
        loss_mask: same shape as labels, 0 where labels are arbitrary. None: ones.
        vocab_size: labels must be token ids below this size.

    Returns:
        The batch; labels are `IGNORED` where no loss is defined.

    Raises:
        ValueError: other shapes, or unmasked labels that are not token ids.
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
    """Add labels and a mask of the rank's local tokens [b, s] to its inputs; other arguments as for `with_labels`."""
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
    """Add labels and a mask to a batch, given as local slices [b, s] by each context-parallel rank.

    The host synchronizes with the device once, to read the slices of all ranks.

    Args:
        batch: a batch without labels, on the host.
        labels, loss_mask, vocab_size: as for `with_labels`, on the host.
        group: context-parallel ranks; all of them pass the same kinds of arguments, see `agreement.check_agreement`.
        device: device of the group's collectives.
    """
    given = {"labels": labels} if loss_mask is None else {"labels": labels, "loss_mask": loss_mask}
    slices = on_host({name: gather_slices(sent(own, device), group) for name, own in given.items()})
    index, shape = gathered_index(batch.layout, group.size()), batch.input_ids.shape
    whole = {name: of_ranks.flatten()[index].view(shape) for name, of_ranks in slices.items()}
    mask = whole.get("loss_mask")
    labels = _readable(whole["labels"], mask, [shape], vocab_size)
    return replace(batch, labels=labels, loss_mask=batch.loss_mask if mask is None else mask.float())


def without_ignored(inputs: ModelInputs) -> tuple[ModelInputs, Tensor | None]:
    """Replace `IGNORED` labels by token ids; also returns [b, s] where they were, or None if there were none."""
    if inputs.labels is None:
        return inputs, None
    ignored = inputs.labels < 0
    return (replace(inputs, labels=inputs.labels.clamp(min=0)), ignored) if ignored.any() else (inputs, None)


def _of_a_rank(arranged: Arrangement, cp_size: int) -> tuple[int, int]:
    rows = arranged.layout.num_rows
    return rows, arranged.layout.total // cp_size // rows


def _readable(labels: Tensor, loss_mask: Tensor | None, shapes: list, vocab_size: int) -> Tensor:
    """Check that unmasked labels are token ids, and replace all entries that are not token ids by `IGNORED`."""
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

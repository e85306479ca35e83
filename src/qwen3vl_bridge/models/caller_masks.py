"""Reading a caller's arguments on the host: one copy for all of them; masks and offsets as lengths and booleans.

Legend: B rows, S tokens per row, n segments.
"""

from __future__ import annotations

import copy
from typing import Any

from qwen3vl_bridge.batch import SequenceLayout
from qwen3vl_bridge.batch.device_transfer import on_host

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

# Entries of an additive mask at or below this value mean "masked"; the constant is Megatron's.
_NEVER = -10000.0


def real_tokens(attention_mask: Tensor | None, padding_mask: Tensor | None, ids: Tensor) -> Tensor | None:
    """The real (non-padding) tokens [B, S] by a caller's masks on the host; None if no mask gives any information.

    Args:
        attention_mask: [B, S], 1 for real tokens; or a square mask, see `_real_of_square`; or None.
        padding_mask: [B, S], 1 for padding, as in megatron-core's MoE layers; or None.
        ids: [B, S].

    Raises:
        ValueError: masks with other shapes or values, masks that contradict each other, or masks with another meaning.
    """
    real = None
    if attention_mask is not None:
        square = attention_mask.dim() > 2
        real = _real_of_square(attention_mask, *ids.shape) if square else check_mask(attention_mask, ids)
    if padding_mask is None:
        return real
    without = ~check_mask(padding_mask, ids, "padding_mask", "1 for padding, 0 for real tokens")
    if real is not None and not torch.equal(real, without):
        row, token = (int(place) for place in (real != without).nonzero()[0])
        raise ValueError(
            f"padding_mask has {int(not without[row, token])} for token {token} of row {row}, expected "
            f"{int(not real[row, token])} to agree with attention_mask"
        )
    return without


def check_mask(
    mask: Tensor, ids: Tensor, name: str = "attention_mask", meaning: str = "1 for real tokens, 0 for padding"
) -> Tensor:
    """Check a mask and return it as [B, S] bool."""
    if mask.shape != ids.shape:
        raise ValueError(f"{name} has shape {list(mask.shape)}, expected {list(ids.shape)}: {meaning}")
    return _as_booleans(mask, name, meaning)


def _as_booleans(mask: Tensor, name: str, meaning: str) -> Tensor:
    """Convert a mask of 0 and 1 with any dtype to booleans on its device."""
    found = mask.bool()
    if not torch.equal(found.to(mask.dtype), mask):
        wrong = mask[found.to(mask.dtype) != mask][0].item()
        raise ValueError(f"{name} has an entry {wrong}, expected {meaning}")
    return found


def _real_of_square(mask: Tensor, rows: int, tokens: int) -> Tensor | None:
    """Derive the real tokens of rows from a square mask of which token attends to which.

    The mask has to be causal, with padding that no real token attends to: attention here is always causal, and padding
    is placed last. The value that means "masked" is determined from the first token's entry for the last token, which
    it must not attend to; so Megatron's booleans, transformers' inverted ones and additive masks are all supported. A
    token that does not attend to itself is padding.

    Args:
        mask: [B, 1, S, S] or [B, S, S], or with one row for all; on any device, where it is evaluated.
        rows, tokens: B, S.

    Returns:
        [B, S] bool on the host; None for one causal mask shared by all rows, which says nothing about padding.
    """
    squares = mask.squeeze(1) if mask.dim() == 4 else mask
    if squares.dim() != 3 or len(squares) not in (1, rows) or squares.shape[1:] != (tokens, tokens):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}, expected [{rows}, {tokens}], 1 for real tokens and 0 for "
            f"padding, or what tokens see, [{rows} or 1, 1, {tokens}, {tokens}]"
        )
    if tokens == 1:
        return None
    last = squares[:, 0, -1]
    if bool((last != last[0]).any()):
        raise _not_causal("some rows hide the last token from the first one and others don't")
    real = torch.stack([_real_of_row(square, last[0]) for square in squares])
    if not real.any():
        raise _not_causal("no token sees itself, or all see the last one")
    if len(real) == 1 and real.all():
        return None
    return real.expand(rows, tokens).cpu()


def square_in_brief(mask: Tensor, rows: int, tokens: int) -> dict[str, Tensor]:
    """On its device, without a wait: `real` tokens [B or 1, S] of a square mask, and whether it is `plain`, [] bool.

    Plain is causal with padding and nothing else. Empty for a mask of another shape, or of one token.
    """
    squares = mask.squeeze(1) if mask.dim() == 4 else mask
    if squares.dim() != 3 or len(squares) not in (1, rows) or squares.shape[1:] != (tokens, tokens) or tokens < 2:
        return {}
    last = squares[:, 0, -1]
    real, plain = [], [(last == last[0]).all()]
    for square in squares:
        of_row, known, wrong = _row_in_brief(square, last[0])
        real.append(of_row)
        plain += [known.all(), ~wrong.any()]
    found = torch.stack(real)
    return {"real": found, "plain": torch.stack([*plain, found.any()]).all()}


def _row_in_brief(square: Tensor, hides: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For one row: real tokens [S]; which entries are valid mask values [S, S]; which entries of real tokens differ
    from a causal mask with padding [S, S].
    """
    hidden = square.bool() == hides.bool()
    known = square.bool().to(square.dtype) == square
    if square.is_floating_point():
        added = hides < 0
        hidden = torch.where(added, square <= _NEVER, hidden)
        known = torch.where(added, hidden | (square == 0), known)
    real = ~hidden.diagonal()
    return real, known, (hidden == real.expand(square.shape).tril()) & real[:, None]


def _real_of_row(square: Tensor, hides: Tensor) -> Tensor:
    """[S] bool, True for tokens of one row that attend to themselves; `square` [S, S] has one line per query."""
    real, known, wrong = _row_in_brief(square, hides)
    if not known.all():
        if square.is_floating_point() and hides < 0:
            raise _not_causal("it has numbers between 0 and -10000, which is a bias and no mask")
        _as_booleans(square, "attention_mask", "booleans, 0 and 1, or numbers to be added")
    if wrong.any():
        token, other = (int(place) for place in wrong.nonzero()[0])
        sees = other > token or not real[other]  # which it must not
        raise _not_causal(f"token {token} {'sees' if sees else 'does not see'} token {other}")
    return real


def _not_causal(found: str) -> ValueError:
    return ValueError(
        f"attention_mask says what each token sees, and {found}. Expected a causal mask that also hides padding, "
        "or [rows, tokens] that only marks padding; several documents in a row need packed_seq_params"
    )


def runs(keep: Tensor) -> tuple[Tensor, Tensor]:
    """First real token [B] and number of real tokens [B], for rows whose real tokens are contiguous."""
    first, lengths = keep.int().argmax(-1), keep.sum(-1)
    place = torch.arange(keep.shape[1])
    run = (place >= first[:, None]) & (place < (first + lengths)[:, None])
    holes = (keep != run).any(-1).nonzero()
    if len(holes):
        raise ValueError(
            f"attention_mask has padding between real tokens in row {int(holes[0])}; expected padding on the left or "
            "right of a row. Several documents in a row need packed_seq_params"
        )
    return first, lengths


def without_trailing(ids: Tensor, pad_token_id: int | None) -> Tensor:
    """[B, S] bool, False for a trailing run of `pad_token_id` in a row."""
    real = torch.ones_like(ids, dtype=torch.bool) if pad_token_id is None else ids != pad_token_id
    return real.flip(-1).cummax(-1).values.flip(-1)


def segment_lengths(packed: PackedSeqParams) -> tuple[Tensor, Tensor]:
    """Logical and physical segment lengths [n], int64, from offsets on the host."""
    given = {name: getattr(packed, f"cu_seqlens_{name}") for name in ("q", "kv", "q_padded", "kv_padded")}
    offsets = {name: tensor.long() for name, tensor in given.items() if tensor is not None}
    logical = offsets.get("q")
    if packed.qkv_format != "thd" or logical is None:
        raise ValueError(
            f"packed_seq_params has qkv_format {packed.qkv_format!r} and cu_seqlens_q {given['q']}, expected 'thd' "
            "and the offsets of the segments"
        )
    if packed.local_cp_size is not None:
        raise ValueError(
            f"packed_seq_params has local_cp_size {packed.local_cp_size}, expected None: this model's rows are shared "
            "by all context-parallel ranks; turn dynamic context parallelism off"
        )
    physical = offsets.get("q_padded", logical)
    for name, tensor in offsets.items():
        if tensor.dim() != 1 or len(tensor) < 2 or tensor[0] != 0 or (tensor.diff() < 0).any():
            raise ValueError(f"cu_seqlens_{name} is {tensor.tolist()}, expected offsets that ascend from 0")
        ours = physical if "padded" in name else logical
        if not torch.equal(tensor, ours):
            raise ValueError(f"cu_seqlens_{name} is {tensor.tolist()}, expected {ours.tolist()} as for queries")
    if logical.shape != physical.shape:
        raise ValueError(f"cu_seqlens_q has {len(logical)} entries, cu_seqlens_q_padded {len(physical)}")
    return logical.diff(), physical.diff()


def check_counts(lengths: Tensor, logical: Tensor, physical: Tensor) -> None:
    """Refuse a mask whose number of real tokens differs from that of the offsets.

    Offsets may include a segment's padding: RL frameworks round lengths up and keep only the rounded ones.
    """
    agree = (lengths == logical) | ((logical == physical) & (lengths <= logical))
    wrong = (~agree).nonzero()
    if len(wrong):
        segment = int(wrong[0])
        raise ValueError(
            f"segment {segment}: attention_mask has {int(lengths[segment])} real tokens, packed_seq_params "
            f"{int(logical[segment])} in a length of {int(physical[segment])}"
        )


def packed_layout(lengths: Tensor, physical: Tensor) -> SequenceLayout:
    """Layout of one packed row. Empty segments are dropped: offset tables of a fixed size repeat their last entry."""
    if (lengths > physical).any() or not physical.any():
        raise ValueError(
            f"packed_seq_params has segments of {lengths.tolist()} tokens in lengths of {physical.tolist()}, expected "
            "no more tokens than their lengths, and at least one token"
        )
    lengths, physical = lengths[physical > 0], physical[physical > 0]
    offsets = (F.pad(values.cumsum(0), (1, 0)).int() for values in (lengths, physical))
    return SequenceLayout(*offsets, 1, tuple(lengths.tolist()), tuple(physical.tolist()))


OFFSETS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
_READ = (
    *("input_ids", "position_ids", "attention_mask", "padding_mask", "labels", "loss_mask"),
    *("image_grid_thw", "video_grid_thw"),
)


def arguments_on_host(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, as for `as_model_inputs`, with those that are read copied to the host, in one wait.

    The size of a square attention mask is quadratic in the tokens, so the real tokens are computed from it on its
    device, and replace it. A mask that is not merely causal with padding is kept; `real_tokens` then refuses it.
    """
    given = {name: value for name in _READ if isinstance(value := arguments.get(name), Tensor)}
    square, ids = {}, given.get("input_ids")
    if "attention_mask" in given and given["attention_mask"].dim() > 2:
        mask = given.pop("attention_mask")
        square = square_in_brief(mask, *ids.shape) if ids is not None and ids.dim() == 2 else {}
    packed = copy.copy(arguments.get("packed_seq_params"))
    offsets = {name: value for name in OFFSETS if isinstance(value := getattr(packed, name, None), Tensor)}
    found = on_host(given | offsets | square)
    for name in offsets:
        setattr(packed, name, found.pop(name))
    if square:
        real, plain = found.pop("real"), found.pop("plain")
        if plain:  # one causal mask for all rows gives no information about padding
            found["attention_mask"] = None if len(real) == 1 and real.all() else real.expand(ids.shape)
    return arguments | found | (dict(packed_seq_params=packed) if offsets else {})

"""What the microbatches of a step held, for figures such as tokens a second.

What lives here: counting them, on the host. What may not: time, ranks, logs (`metrics.py`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from itertools import accumulate
from typing import Self

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.packing.set_counts import SetCounts, add_counts, most_of
from qwen3vl_bridge.models.common.provider import VisionLanguageProvider

from megatron.bridge.training.state import GlobalState

_METER = "qwen3vl_meter"


@dataclass(frozen=True)
class Amounts:
    """How much there is in some microbatches. Two can be added.

    Attributes:
        tokens: real ones.
        trained_tokens: whose loss counts.
        slots: places for tokens, filled or not.
        token_pairs: the squares of the tokens of each segment.
        patches: of all pictures.
        patch_pairs: the squares of the patches of each frame.
        images: pictures that are no frames of a video.
        video_frames: as the vision tower sees them, which takes two of a video as one.
        rows: of microbatches.
    """

    tokens: int = 0
    trained_tokens: int = 0
    slots: int = 0
    token_pairs: int = 0
    patches: int = 0
    patch_pairs: int = 0
    images: int = 0
    video_frames: int = 0
    rows: int = 0

    @classmethod
    def of(cls, batch: PackedBatch, config: VisionLanguageProvider) -> Self:
        """Those of a microbatch. It reads tokens on the host."""
        frames = batch.vision.lengths if batch.vision is not None else ()
        images = _images(batch, frames, config)
        return cls(
            tokens=sum(batch.layout.lengths),
            trained_tokens=int(batch.loss_mask.count_nonzero()),
            slots=batch.layout.total,
            token_pairs=sum(length**2 for length in batch.layout.lengths),
            patches=sum(frames),
            patch_pairs=sum(patches**2 for patches in frames),
            images=images,
            video_frames=len(frames) - images,
            rows=batch.layout.num_rows,
        )

    def __add__(self, other: Amounts) -> Amounts:
        return Amounts(*(a + b for a, b in zip(self.values(), other.values(), strict=True)))

    def values(self) -> tuple[int, ...]:
        """All of them, in order."""
        return astuple(self)

    @classmethod
    def count(cls) -> int:
        """How many there are."""
        return len(fields(cls))


def _images(batch: PackedBatch, frames: tuple[int, ...], config: VisionLanguageProvider) -> int:
    """How many of the frames are images, which come before all videos: as many as their tokens fill."""
    if not frames:
        return 0
    of_images = (batch.input_ids.flatten() == config.image_token_id) & (batch.vision_slot >= 0)
    patches = int(of_images.sum()) * config.vision_config.spatial_merge_size**2
    return sum(end <= patches for end in accumulate(frames))


class Meter:
    """Counts microbatches until somebody takes the amounts.

    Attributes:
        dropped: as `PackedBatch` has it, of the latest rows.
        newly_dropped: in the same way, of all rows.
        unreadable: in the same way.
    """

    def __init__(self) -> None:
        self._amounts = Amounts()
        self.dropped: SetCounts = ()
        self.newly_dropped: SetCounts = ()
        self.unreadable: SetCounts = ()

    def add(self, amounts: Amounts) -> None:
        """Count a microbatch more."""
        self._amounts += amounts

    def add_left_out(self, batch: PackedBatch) -> None:
        """Note what was left out of a microbatch's rows, and of those before."""
        self.dropped = most_of(self.dropped, batch.dropped)
        self.newly_dropped = add_counts(self.newly_dropped, batch.newly_dropped)
        self.unreadable = add_counts(self.unreadable, batch.unreadable)

    def take(self) -> Amounts:
        """What was counted since the last call."""
        taken, self._amounts = self._amounts, Amounts()
        return taken


def meter_of(state: GlobalState) -> Meter:
    """The meter of a run: what this rank's microbatches held, and so what those of its data-parallel rank held."""
    if not hasattr(state, _METER):
        setattr(state, _METER, Meter())
    return getattr(state, _METER)


def count_microbatch(state: GlobalState, batch: PackedBatch, config: VisionLanguageProvider) -> None:
    """Note what a microbatch of training holds, for our figures and for those that Megatron-Bridge logs itself.

    Args:
        state: the run.
        batch: on the host.
        config: the provider.
    """
    amounts = Amounts.of(batch, config)
    meter_of(state).add(amounts)
    meter_of(state).add_left_out(batch)
    count_operations(state, amounts)


def count_operations(state: GlobalState, amounts: Amounts) -> None:
    """Note what Megatron-Bridge makes its own figures of.

    It sets them to zero before each step. Lengths differ from rank to rank, so it has to add them up.

    Args:
        state: the run.
        amounts: of a microbatch, once among the data-parallel ranks of a module.
    """
    for name, amount in {
        "_flops_seqlen_sum": amounts.tokens,
        "_flops_seqlen_sq_sum": amounts.token_pairs,
        "_flops_vision_patches": amounts.patches,
        # See flops.operations_of_a_step.
        "_flops_cross_seqlen_sum": amounts.patches,
        "_flops_cross_seqlen_product_sum": amounts.patch_pairs,
    }.items():
        setattr(state, name, getattr(state, name, 0) + amount)
    state._flops_requires_global_reduce = True

"""Contents of a step's microbatches, for metrics such as tokens per second.

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
    """Contents of some microbatches. Two can be added.

    Attributes:
        tokens: real tokens.
        trained_tokens: tokens whose loss counts.
        slots: tokens including padding.
        token_pairs: sum over segments of the squared number of tokens.
        patches: of all images and videos.
        patch_pairs: sum over frames of the squared number of patches.
        images: images, without frames of videos.
        video_frames: frames as the vision tower sees them, each of two frames of a video.
        rows: rows of microbatches.
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
        """Contents of a microbatch. Reads tokens on the host."""
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
        """All values, in order."""
        return astuple(self)

    @classmethod
    def count(cls) -> int:
        """Number of values."""
        return len(fields(cls))


def _images(batch: PackedBatch, frames: tuple[int, ...], config: VisionLanguageProvider) -> int:
    """Number of frames that are images, which come before all videos: as many as the image tokens fill."""
    if not frames:
        return 0
    of_images = (batch.input_ids.flatten() == config.image_token_id) & (batch.vision_slot >= 0)
    patches = int(of_images.sum()) * config.vision_config.spatial_merge_size**2
    return sum(end <= patches for end in accumulate(frames))


class Meter:
    """Counts microbatches until `take`.

    Attributes:
        dropped: as in `PackedBatch`, of the latest rows.
        newly_dropped: as in `PackedBatch`, of all rows.
        unreadable: as in `PackedBatch`, of all rows.
    """

    def __init__(self) -> None:
        self._amounts = Amounts()
        self.dropped: SetCounts = ()
        self.newly_dropped: SetCounts = ()
        self.unreadable: SetCounts = ()

    def add(self, amounts: Amounts) -> None:
        """Count one more microbatch."""
        self._amounts += amounts

    def add_left_out(self, batch: PackedBatch) -> None:
        """Note the samples dropped in a microbatch's rows, and in those before."""
        self.dropped = most_of(self.dropped, batch.dropped)
        self.newly_dropped = add_counts(self.newly_dropped, batch.newly_dropped)
        self.unreadable = add_counts(self.unreadable, batch.unreadable)

    def take(self) -> Amounts:
        """The counts since the last call."""
        taken, self._amounts = self._amounts, Amounts()
        return taken


def meter_of(state: GlobalState) -> Meter:
    """The meter of a run: contents of this rank's microbatches, which are those of its data-parallel rank."""
    if not hasattr(state, _METER):
        setattr(state, _METER, Meter())
    return getattr(state, _METER)


def count_microbatch(state: GlobalState, batch: PackedBatch, config: VisionLanguageProvider) -> None:
    """Count a training microbatch, for our metrics and for those that Megatron-Bridge logs itself.

    Args:
        state: the run's global state.
        batch: on the host.
        config: the provider.
    """
    amounts = Amounts.of(batch, config)
    meter_of(state).add(amounts)
    meter_of(state).add_left_out(batch)
    count_operations(state, amounts)


def count_operations(state: GlobalState, amounts: Amounts) -> None:
    """Add to the counts from which Megatron-Bridge computes its own metrics.

    It sets them to zero before each step. Lengths differ between ranks, so it has to sum them.

    Args:
        state: the run's global state.
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

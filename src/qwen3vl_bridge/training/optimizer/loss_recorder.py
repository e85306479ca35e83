"""The losses of a training step, recorded by the forward step for callbacks that run before the weights change.

What lives here: the recorder of a run's microbatches, the loss function that writes to it, and the sample of each loss.
What may not: judging them (`step_guard.py`), collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from qwen3vl_bridge.batch import PackedBatch, SequenceLayout, token_index
from qwen3vl_bridge.dist_train.joint_step import is_split_unjoined

import torch
from megatron.bridge.training.state import GlobalState
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor


class SampleLoss(NamedTuple):
    """The part of a sample's loss that a rank has computed.

    Attributes:
        place: data-parallel rank, microbatch and segment: the same on all context-parallel ranks.
        name: of the sample.
        loss: sum over tokens.
        tokens: number of tokens that count.
    """

    place: tuple[int, int, int]
    name: str
    loss: float
    tokens: float


@dataclass(frozen=True)
class Microbatch:
    """The losses of one microbatch on this rank; they stay on the device until they are read.

    Attributes:
        losses: [b, s] float32, of every token.
        mask: [b, s] float32, 1 where the loss counts.
        sums: [2] float32, sum of the losses that count, and their number.
        layout: of the whole batch, on the host.
        sample_ids: of its segments, as far as they are known.
    """

    losses: Tensor
    mask: Tensor
    sums: Tensor
    layout: SequenceLayout
    sample_ids: tuple[str, ...]

    def samples(self, number: int, groups: ProcessGroupCollection) -> list[SampleLoss]:
        """The samples whose tokens this rank has; waits for the device.

        Args:
            number: of the microbatch in its step.
            groups: process groups.
        """
        layout, rank = self.layout, groups.dp.rank()
        index = token_index(layout, groups.cp.size(), groups.cp.rank()).T.flatten()
        segment = layout.per_token(torch.arange(len(layout.lengths)))[index]
        counted = torch.stack((self.losses.float() * self.mask, self.mask), -1).view(-1, 2).double().cpu()
        sums = torch.zeros(len(layout.lengths), 2, dtype=torch.float64).index_add_(0, segment, counted)
        names = dict(enumerate(self.sample_ids))
        return [
            SampleLoss(
                (rank, number, i),
                names.get(i, f"segment {i} of microbatch {number} on data-parallel rank {rank}"),
                *sums[i].tolist(),
            )
            for i, length in enumerate(layout.lengths)
            if length
        ]


@dataclass
class LossRecorder:
    """The microbatches of the current step, on ranks that compute losses.

    Attributes:
        state: the run's global state.
        microbatches: in order.
    """

    state: GlobalState
    microbatches: list[Microbatch] = field(default_factory=list)

    def sums(self, device: torch.device) -> Tensor:
        """[2] float64, sum of all losses that count and their number, on the model's device."""
        if not self.microbatches:
            return torch.zeros(2, dtype=torch.float64, device=device)
        return torch.stack([one.sums for one in self.microbatches]).double().sum(0)

    def samples(self, groups: ProcessGroupCollection) -> list[SampleLoss]:
        """Samples of all microbatches."""
        return [sample for i, one in enumerate(self.microbatches) for sample in one.samples(i, groups)]


# By the identity of the run's state, to which a recorder holds a reference; callbacks hold one to the recorder.
_RECORDERS: WeakValueDictionary[int, LossRecorder] = WeakValueDictionary()


def start_recording(state: GlobalState) -> LossRecorder:
    """Make the forward step record a run's losses.

    Raises:
        ValueError: they are already recorded.
    """
    if id(state) in _RECORDERS:
        raise ValueError("the callbacks of training_callbacks(cfg) were given twice, expected once")
    recorder = _RECORDERS[id(state)] = LossRecorder(state)
    return recorder


def stop_recording(state: GlobalState) -> None:
    """Stop recording a run's losses."""
    _RECORDERS.pop(id(state), None)


def recorded(count: Callable, state: GlobalState, batch: PackedBatch, mask: Tensor) -> Callable:
    """The loss function of a training microbatch, which records losses if a recorder has been started.

    Args:
        count: from losses [b, s] to (sum, tokens, values to report).
        state: the run's global state.
        batch: the microbatch, on the host.
        mask: [b, s] this rank's part of its loss mask, on the device.

    Raises:
        ValueError: the configuration has settings that callbacks implement, and none was started.
    """
    if (recorder := _RECORDERS.get(id(state))) is None:
        _check_nothing_is_ignored(state.cfg)
        return count

    def count_and_record(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        counted = count(losses)
        sums = counted[2]["lm loss"]
        recorder.microbatches.append(Microbatch(losses.detach(), mask, sums, batch.layout, batch.sample_ids))
        return counted

    return count_and_record


def _check_nothing_is_ignored(cfg: Any) -> None:
    settings = {
        "model.dist_train.use_dist_train": is_split_unjoined(cfg.model),
        "guard": getattr(cfg, "guard", None) is not None,
    }
    if ignored := [name for name, is_set in settings.items() if is_set]:
        raise ValueError(
            f"{' and '.join(ignored)} would be ignored: the callbacks have not started; expected "
            "finetune(cfg, qwen3vl_bridge.forward_step, callbacks=qwen3vl_bridge.training_callbacks(cfg))"
        )

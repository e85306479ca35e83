"""Data with samples that would spoil a run, and what a run was before and after each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from qwen3vl_bridge.batch import PackedBatch
from qwen3vl_bridge.data.collation import Collator
from qwen3vl_bridge.data.dataset_provider import Qwen3VLConversationProvider
from qwen3vl_bridge.data.encoding import EncodedSample
from qwen3vl_bridge.training.before_step import optimizers_of

import torch
from megatron.bridge.training.callbacks import Callback, CallbackContext


@dataclass(frozen=True)
class Spoil:
    """What happens to a sample of a row: which is known by the samples in it."""

    row: tuple[str, ...]
    sample: int
    kind: str

    def apply(self, batch: PackedBatch) -> PackedBatch:
        """The batch as it is seen; each sample has one picture of 16 patches."""
        if batch.sample_ids != self.row:
            return batch
        if self.kind == "nan":
            pixels = batch.vision.pixel_values.clone()
            pixels[16 * self.sample] = torch.nan
            return replace(batch, vision=replace(batch.vision, pixel_values=pixels))
        starts = batch.layout.cu_seqlens_padded.tolist()
        place = slice(starts[self.sample], starts[self.sample + 1])
        labels, mask = batch.labels.clone(), batch.loss_mask.clone()
        labels[0, place], mask[0, place] = 7, 1.0
        return replace(batch, labels=labels, loss_mask=mask)


@dataclass(frozen=True)
class SpoiltCollator(Collator):
    spoils: tuple[Spoil, ...] = ()

    def packed(self, samples: Sequence[EncodedSample]) -> PackedBatch:
        batch = super().packed(samples)
        for spoil in self.spoils:
            batch = spoil.apply(batch)
        return batch


@dataclass(kw_only=True)
class SpoiltProvider(Qwen3VLConversationProvider):
    spoils: tuple[Spoil, ...] = ()

    def collator(self) -> SpoiltCollator:
        good = super().collator()
        return SpoiltCollator(**{f.name: getattr(good, f.name) for f in fields(good)}, spoils=self.spoils)

    @classmethod
    def of(cls, good: Qwen3VLConversationProvider, spoils: tuple[Spoil, ...]) -> SpoiltProvider:
        return cls(**{f.name: getattr(good, f.name) for f in fields(good) if f.init}, spoils=spoils)


def states(context: CallbackContext) -> list[torch.Tensor]:
    """Copies of all that a step may change: weights, Adam's moments and counts, the schedule."""
    adams = [one.optimizer for one in optimizers_of(context.optimizer)]
    kept = [torch.as_tensor(v).clone() for a in adams for s in a.state.values() for v in s.values()]
    return [
        *(p.detach().clone() for chunk in context.model for p in chunk.parameters()),
        *kept,
        torch.tensor(context.scheduler.num_steps),
    ]


class Before(Callback):
    """Remembers what a run was before its latest step, and whether skipped steps changed anything."""

    def __init__(self) -> None:
        self.states, self.context, self.skipped_changed = [], None, []

    def on_train_step_start(self, context: CallbackContext) -> None:
        self.states, self.context = states(context), context

    def on_train_step_end(self, context: CallbackContext) -> None:
        if context.skipped_iter:
            self.skipped_changed.append(self.changed())

    def changed(self) -> bool:
        after = states(self.context)
        return len(after) != len(self.states) or not all(map(torch.equal, after, self.states))


class BadGradient(Callback):
    def __init__(self, step: int, name: Callable[[str], bool]) -> None:
        self.step, self.name, self.handles = step, name, []

    def on_train_step_start(self, context: CallbackContext) -> None:
        if context.state.train_state.step + 1 == self.step:
            named = [p for n, p in context.model[0].named_parameters() if self.name(n)]
            self.handles = [p.register_hook(lambda gradient: gradient * torch.nan) for p in named]

    def on_train_step_end(self, context: CallbackContext) -> None:
        for handle in self.handles:
            handle.remove()

"""Batches as RL frameworks give them: context-parallel ranks' shares of a packed row, and the forward step for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from qwen3vl_bridge.batch import PackedBatch, token_index

import torch
from megatron.bridge.training.losses import create_masked_next_token_loss_function
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from .batches import Sample


@dataclass(frozen=True)
class Shared:
    """A packed row, and the pictures of its documents as the processor gives them."""

    batch: PackedBatch
    samples: list[Sample]

    def arguments(self, cp_size: int, cp_rank: int) -> dict[str, Any]:
        """What a rank calls the model with: its tokens, the whole row's offsets and pictures."""
        layout = self.batch.layout
        index = token_index(layout, cp_size, cp_rank).T

        def take(whole: Tensor) -> Tensor:
            return whole.flatten()[index]

        names = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
        found = {name: [s.pixels[name] for s in self.samples if name in s.pixels] for name in names}
        return dict(
            input_ids=take(self.batch.input_ids),
            labels=take(self.batch.labels),
            loss_mask=take(self.batch.loss_mask),
            packed_seq_params=PackedSeqParams("thd", *[layout.cu_seqlens] * 2, *[layout.cu_seqlens_padded] * 2),
            **{name: torch.cat(parts) for name, parts in found.items() if parts},
        )


def forward_step(state: Any, data_iterator: Iterator[Shared], model: torch.nn.Module) -> tuple[Tensor, Callable]:
    """As `training.step.forward_step`, by the model's door."""
    groups = get_attr_wrapped_model(model, "pg_collection")
    arguments = next(data_iterator).arguments(groups.cp.size(), groups.cp.rank())
    checks = state.cfg.rerun_state_machine
    count = create_masked_next_token_loss_function(
        arguments["loss_mask"], checks.check_for_nan_in_loss, checks.check_for_spiky_loss
    )
    return model(**arguments), count

"""Megatron-Bridge's mapping of the n-gram tables, which Hugging Face checkpoints divide into parts by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from qwen3vl_bridge.core.collectives import gather_stacked
from qwen3vl_bridge.models.qwen4_exp.table import NgramHead
from qwen3vl_bridge.weights.rows import Dimensions

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from torch import Tensor, nn


class NgramHeadMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping of the table of one hash head from the parts that have its rows.

    A part may have rows of two heads, so one head exports the tables of all heads of its layer.

    Args:
        row: the expanded entry of the weight table.
        dimensions: the dimensions of the model.
    """

    def __init__(self, row: NgramHead, dimensions: Dimensions) -> None:
        super().__init__(row.megatron, {name: name for name in row.hf})
        self.row, self.dimensions = row, dimensions

    def resolve(self, captures: tuple[str, ...]) -> Self:
        """Return this mapping, whose names have no wildcards."""
        return self

    def hf_to_megatron(self, hf_weights: dict[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """Return this rank's columns of the table of the head."""
        slices = self.row.hf_slices(self.dimensions)
        rows = torch.cat([hf_weights[part.tensor].flatten()[part.start :][: part.length] for part in slices])
        return rows.view(self.row.megatron_shape(self.dimensions))[:, megatron_module.columns]

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return all parts of the table, in host memory, from the first head of each rank; nothing from other heads.

        Ranks that divide the tables must call this together for their first heads.
        """
        head = self.row.position[1]
        is_first = None if megatron_module is None else head == megatron_module.heads.start
        if not self.broadcast_obj_from_pp_rank(is_first, self.row.megatron):
            return {}
        table = None if megatron_module is None else torch.cat(list(_gather_heads(megatron_module)))
        table = self.broadcast_from_pp_rank(table, cache_key=self.row.megatron)
        prefix, _, _ = self.row.hf[0].rpartition("shard_")
        parts = table.cpu().chunk(self.dimensions["ngram_parts"])
        return {f"{prefix}shard_{number}.weight": part for number, part in enumerate(parts)}


def _gather_heads(module: nn.Module) -> Iterator[Tensor]:
    """Yield the table of each head of a layer, [rows, columns], from all ranks that divide the tables."""
    if (ranks := module.group.size()) == 1:
        yield from (weight.data for weight in module.parameters())
        return
    owners, parts = ranks // module.column_parts, module.column_parts
    largest = max(module.rows)
    gathered = []  # for each head of a rank, [ranks, rows, columns]
    for weight in module.parameters():
        padded = F.pad(weight.data, (0, 0, 0, largest - len(weight)))
        gathered.append(gather_stacked(padded, module.group))
    for owner in range(owners):
        for number, of_ranks in enumerate(gathered):
            rows = module.rows[owner * len(gathered) + number]
            yield torch.cat([part[:rows] for part in of_ranks[owner * parts : (owner + 1) * parts]], 1)

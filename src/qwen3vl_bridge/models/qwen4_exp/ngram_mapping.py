"""Load and export the n-gram tables with Megatron-Bridge. Hugging Face checkpoints divide them into parts by rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from qwen3vl_bridge.core.collectives import broadcast_from_rank, gather_stacked, max_in_group
from qwen3vl_bridge.models.qwen4_exp.layer import StreamLayer
from qwen3vl_bridge.models.qwen4_exp.ngram_embedding import NgramEmbedding
from qwen3vl_bridge.models.qwen4_exp.table import NgramHead
from qwen3vl_bridge.weights.rows import Dimensions

import torch
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn


class NgramHeadMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping of the table of one hash head from the parts that have its rows.

    It exports nothing: a part may have rows of two heads, which different ranks may hold. `gather_tables` exports them.

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

    def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """Return this rank's columns of the table of the head."""
        slices = self.row.hf_slices(self.dimensions)
        rows = torch.cat([hf_weights[part.tensor].flatten()[part.start :][: part.length] for part in slices])
        return rows.view(self.row.megatron_shape(self.dimensions))[:, megatron_module.columns]

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return an empty dict."""
        return {}


def gather_tables(
    chunks: Sequence[nn.Module], dimensions: Dimensions, groups: ProcessGroupCollection
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value, in host memory, of each part of the n-gram tables; on every rank.

    All ranks must call this together.

    Args:
        chunks: the parts of the model on this rank.
        dimensions: the dimensions of the model.
        groups: the process groups of the model.
    """
    layers = [layer for chunk in chunks for layer in chunk.decoder.layers if isinstance(layer, StreamLayer)]
    heads = len(dimensions.indices["ngram_heads"])
    parameter = next(chunks[0].parameters())
    for index, number in enumerate(dimensions.indices["ple_layers"]):
        owned = [layer.ple.ngram_embedding for layer in layers if layer.layer_number == number + 1]
        rows = sum(dimensions.indices["ngram_rows"][index * heads : (index + 1) * heads])
        if owned:
            table = torch.cat(list(_gather_heads(owned[0])))
        else:
            table = parameter.new_empty(rows, dimensions["ngram_dim"], dtype=chunks[0].config.params_dtype)
        if groups.pp.size() > 1:
            owner = torch.tensor(groups.pp.rank() if owned else 0, device=parameter.device)
            table = broadcast_from_rank(table, int(max_in_group(owner, groups.pp)), groups.pp)
        prefix = f"model.language_model.layers.{number}.ple.ple_embedding.ngram_embedding.shard_"
        for part, tensor in enumerate(table.cpu().chunk(dimensions["ngram_parts"])):
            yield f"{prefix}{part}.weight", tensor


def _gather_heads(embedding: NgramEmbedding) -> Iterator[Tensor]:
    """Yield the table of each head of a layer, [rows, columns], from all ranks that divide the tables."""
    tables = [weight.data for weight in embedding.parameters()]
    if (ranks := embedding.group.size()) == 1:
        yield from tables
        return
    largest, parts = max(embedding.rows), embedding.column_parts
    # For each head of a rank, [ranks, rows, columns].
    gathered = [gather_stacked(F.pad(table, (0, 0, 0, largest - len(table))), embedding.group) for table in tables]
    for owner in range(ranks // parts):
        for number, of_ranks in enumerate(gathered):
            rows = embedding.rows[owner * len(gathered) + number]
            yield torch.cat([part[:rows] for part in of_ranks[owner * parts : (owner + 1) * parts]], 1)

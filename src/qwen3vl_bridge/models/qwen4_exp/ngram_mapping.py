"""Load and export the n-gram tables with Megatron-Bridge. Hugging Face checkpoints store parts of their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Self

from qwen3vl_bridge.core.collectives import broadcast_from_rank, max_in_group
from qwen3vl_bridge.models.qwen4_exp.layer import StreamLayer
from qwen3vl_bridge.models.qwen4_exp.table import NgramHead
from qwen3vl_bridge.weights.hybrid_rows import ngram_head_sizes
from qwen3vl_bridge.weights.rows import Dimensions

import torch
from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping
from megatron.core.utils import get_attr_wrapped_model, unwrap_model
from torch import Tensor, nn

# Number of elements of an n-gram table that are quantized at a time.
_BLOCK = 1 << 22


class NgramHeadMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping that loads the n-gram table of one hash head from the parts that contain its rows.

    The mapping exports nothing: a part may have rows of two heads, which different ranks may hold. `gather_tables`
    exports the parts.

    Args:
        row: the expanded weight-table row of the hash head.
        dimensions: the dimensions of the model.
        find_scale: returns the scale with which the checkpoint stores a tensor in FP8, or None.
    """

    def __init__(self, row: NgramHead, dimensions: Dimensions, find_scale: Callable[[str], float | None]) -> None:
        super().__init__(row.megatron, {name: name for name in row.hf})
        self.row, self.dimensions, self.find_scale = row, dimensions, find_scale

    def resolve(self, captures: tuple[str, ...]) -> Self:
        """Return this mapping, whose names have no wildcards."""
        return self

    def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: nn.Module) -> Tensor:
        """Return this rank's columns of the head's n-gram table."""
        slices = self.row.hf_slices(self.dimensions)
        rows = torch.cat([hf_weights[part.tensor].flatten()[part.start :][: part.length] for part in slices])
        rows, (_, head) = rows.view(self.row.megatron_shape(self.dimensions)), self.row.position
        if megatron_module.weight_scale is None:
            return rows[:, megatron_module.columns]
        blocks = rows.split(max(1, _BLOCK // rows.shape[1]))
        return torch.cat(list(megatron_module.encode(head, lambda: blocks, self.find_scale(self.row.hf[0]))))

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return an empty dict, because `gather_tables` exports the n-gram tables."""
        return {}


class NgramScaleMapping(MegatronParamMapping[dict[str, Tensor]]):
    """Mapping of the scales of tables in FP8. It loads nothing, because loading the tables sets the scales."""

    def __init__(self, row: NgramHead) -> None:
        super().__init__(f"{row.megatron.rpartition('.')[0]}.weight_scale", {})

    def resolve(self, captures: tuple[str, ...]) -> Self:
        """Return this mapping, whose names have no wildcards."""
        return self

    def hf_to_megatron(self, hf_weights: Mapping[str, Tensor], megatron_module: nn.Module) -> None:
        """Return None, so that the scales are kept."""

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return an empty dict: exported tables are dequantized."""
        return {}


def gather_tables(chunks: Sequence[nn.Module], dimensions: Dimensions) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each part of the n-gram tables, on every rank.

    The tables are gathered head by head. All ranks must call this together.

    Args:
        chunks: the parts of the model on this rank, wrapped or not.
        dimensions: the dimensions of the model.
    """
    groups, parameter = get_attr_wrapped_model(chunks[0], "pg_collection"), next(chunks[0].parameters())
    dtype = unwrap_model(chunks[0]).config.params_dtype
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, StreamLayer)]
    for index, number in enumerate(dimensions.indices["ple_layers"]):
        owned = [layer.ple.ngram_embedding for layer in layers if layer.ple and layer.layer_number == number + 1]
        owner = 0
        if groups.pp.size() > 1:
            rank = torch.tensor(groups.pp.rank() if owned else 0, device=parameter.device)
            owner = int(max_in_group(rank, groups.pp))
        sizes = ngram_head_sizes(dimensions, index)
        rows, part = sum(sizes) // dimensions["ngram_parts"], 0
        rest = parameter.new_empty(0, dimensions["ngram_dim"], dtype=dtype)
        for head, size in enumerate(sizes):
            if owned:
                table = owned[0].gather_table(head)
            else:
                table = rest.new_empty(size, dimensions["ngram_dim"])
            if groups.pp.size() > 1:
                table = broadcast_from_rank(table.contiguous(), owner, groups.pp)
            rest = torch.cat((rest, table))
            while len(rest) >= rows:
                name = f"model.language_model.layers.{number}.ple.ple_embedding.ngram_embedding.shard_{part}.weight"
                yield name, rest[:rows].clone()
                rest, part = rest[rows:], part + 1

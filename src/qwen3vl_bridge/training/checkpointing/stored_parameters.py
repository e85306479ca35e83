"""Which of a checkpoint's tensors a rank holds, and which part of each.

What lives here: mapping a rank's parameters to the names and offsets in the fsdp_dtensor layout. What may not: files,
optimizers, other formats.

A checkpoint is independent of ranks: each parameter is whole in it, layers and experts are numbered through the model,
gate and up projection are separate. A rank's part of a tensor is described by a DTensor over the group of ranks that
share it, a view of the rank's own memory; torch.distributed.checkpoint slices, joins and skips copies accordingly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from qwen3vl_bridge.models.common.provider import VisionLanguageProvider
from qwen3vl_bridge.registry import family
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.names import local_name
from qwen3vl_bridge.weights.rows import Row, expand, stored_rows

import torch
from megatron.bridge.models.conversion.model_bridge import _megatron_local_name_to_global
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# The last pipeline stage of a tied model has its own copy of the embedding by this name.
_OUTPUT, _EMBEDDING = "language_model.output_layer.weight", "language_model.embedding.word_embeddings.weight"


@dataclass(frozen=True)
class StoredParameter:
    """A parameter of this rank.

    Attributes:
        row: of the weight table, expanded.
        parameter: this rank's part.
        mesh: the ranks that have the other parts; None if the part is the whole.
        dimension: along which it is split.
        ratio: of the rows of the tensors as which it is stored, concatenated.
    """

    row: Row
    parameter: torch.nn.Parameter
    mesh: DeviceMesh | None = None
    dimension: int = 0
    ratio: tuple[int, ...] = (1,)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """Names of the stored tensors, with views of the parameter."""
        tensor = self.parameter.detach()
        share = len(tensor) // sum(self.ratio)
        for name, part in zip(self.row.stored, tensor.split([n * share for n in self.ratio]), strict=True):
            if self.mesh is None:
                yield name, part
            else:
                yield name, DTensor.from_local(part, self.mesh, [Shard(self.dimension)], run_check=False)


def rows_by_name(provider: VisionLanguageProvider) -> dict[str, Row]:
    """The whole model's rows under the parameter names of both layer specs, which experts and other layers may use."""
    rows = list(expand(family(provider.family).rows(), provider.dimensions()))
    return {name: row for row in rows for name in (row.megatron, local_name(row.megatron))}


def stored_parameters(model: Sequence[torch.nn.Module], groups: ProcessGroupCollection) -> Iterator[StoredParameter]:
    """This rank's parameters.

    Args:
        model: its chunks, wrapped or not, without adapters.
        groups: its process groups.
    """
    chunks = unwrap_model(list(model))
    config = chunks[0].config
    rows, meshes, dimensions = rows_by_name(config), {}, config.dimensions()
    for stage, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            whole = _megatron_local_name_to_global(chunks, config, name, stage)
            if whole == _OUTPUT and config.share_embeddings_and_output_weights:
                whole = _EMBEDDING
            row = rows[whole]
            ratio = _ratio(row, dimensions)
            group = groups.expt_tp if "experts" in row.indices else groups.tp
            if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
                yield StoredParameter(row, parameter, ratio=ratio)
                continue
            if group not in meshes:
                meshes[group] = DeviceMesh.from_group(group, parameter.device.type)
            yield StoredParameter(row, parameter, meshes[group], parameter.partition_dim, ratio)


def _ratio(row: Row, dimensions: Dimensions) -> tuple[int, ...]:
    """Ratio of the rows of each stored tensor, in lowest terms."""
    rows = stored_rows(row, len(row.stored), dimensions)
    return tuple(n // math.gcd(*rows) for n in rows)

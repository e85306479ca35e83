"""Linear attention of the text model: megatron-core's GatedDeltaNet with corrections, and without device
synchronizations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwen3vl_bridge.models.qwen3_5.linear_attention import delta_rule
from qwen3vl_bridge.models.qwen3_5.table import LINEAR_ATTENTION_ROWS
from qwen3vl_bridge.weights.names import MAGNITUDE, MARK, OUT

import torch
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from torch import Tensor, nn

# Parameters that are in float32 in a model of 16 bits too.
_FLOAT32 = tuple(row.megatron.rpartition("self_attention.")[2] for row in LINEAR_ATTENTION_ROWS if row.float32)


class LinearAttention(GatedDeltaNet):
    """GatedDeltaNet without device synchronizations for packed rows, and with its decays and output norm in float32.

    In addition, adapters of its input projection are saved in the same sections as the projection, so that they can be
    loaded with another tensor-parallel size.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in _FLOAT32:
            parameter = self.get_parameter(name)
            parameter.data = parameter.data.float()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LinearAttention:
        """Keep float32 parameters when the model is cast to 16 bits, which all wrappers do by this method."""
        before = {name: self.get_parameter(name).data for name in _FLOAT32}
        super()._apply(fn, recurse)
        for name, data in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < data.dtype.itemsize:
                parameter.data = data.to(parameter.device)
        return self

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        # flash-linear-attention's chunked kernel does not support float32.
        if self.config.params_dtype is torch.float32:
            self.gated_delta_rule = delta_rule.chunk_gated_delta_rule

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        # megatron-core checks on the host that the offsets match the row, which synchronizes; those of a layout always
        # do.
        return cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded

    def fused_projection(self) -> tuple[nn.Module, list[int]]:
        """`in_proj`, and this rank's rows of its sections."""
        return self.in_proj, list(self.in_proj_split_sections)

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Like megatron-core's, which splits the projection into sections; also splits the rows of its adapters.

        Each rank holds its part of every section, concatenated, so that concatenating the ranks' rows would not restore
        the order of the full tensor.
        """
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        for name in (f"{prefix}in_proj{MARK}{kind}" for kind in (OUT, MAGNITUDE)):
            if name in state:
                sections = list(self.in_proj_split_sections)
                state[name] = _split_tensor_factory(state[name], sections, self.in_proj_split_names, 0)
        return state

"""Linear attention of the text model: megatron-core's GatedDeltaNet with corrections, and without device
synchronizations.

What lives here: the subclass. What may not: the delta rule in torch (`delta_rule.py`), how megatron-core finds its
kernels (`kernels.py`), the layers that contain it (`models/qwen3_5/layer_specs.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.qwen3_5.linear_attention import delta_rule
from qwen3vl_bridge.weights.adapter_rows import MAGNITUDE, MARK, OUT

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from torch import Tensor, nn


class LinearAttention(GatedDeltaNet):
    """GatedDeltaNet without device synchronizations for packed rows, and with decays computed in float32.

    In addition, adapters of its input projection are saved in the same sections as the projection, so that they can be
    loaded with another tensor-parallel size.
    """

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

    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, in float32, and the writing strength.

        megatron-core computes the exponential of `A_log` in the parameter's dtype, which in bfloat16 gives errors of up
        to 0.4 % in the decays. Source: transformers, Qwen3_5GatedDeltaNet.forward.
        """
        decay = -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp)
        return decay, beta.sigmoid()

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

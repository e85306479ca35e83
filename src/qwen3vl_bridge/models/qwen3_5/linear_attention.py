"""Linear attention of the text model: megatron-core's GatedDeltaNet, with what it gets wrong or asks the device for.

What lives here: the subclass. What may not: the delta rule in torch (`delta_rule.py`), where megatron-core finds its
kernels (`compat/linear_attention_kernels.py`), the layers it stands in (`layer_specs.py`).
"""

from __future__ import annotations

from typing import Any

from qwen3vl_bridge.models.qwen3_5 import delta_rule
from qwen3vl_bridge.weights.adapter_rows import MAGNITUDE, MARK, OUT

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from torch import Tensor


class LinearAttention(GatedDeltaNet):
    """megatron-core's, in which packed rows cost no host waits and decays are computed in float32.

    And adapters of its projection are stored as the projection is, so that other tensor-parallel ranks can load them.
    """

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        # flash-linear-attention's chunked kernel refuses float32.
        if self.config.params_dtype is torch.float32:
            self.gated_delta_rule = delta_rule.chunk_gated_delta_rule

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        # megatron-core asks the device whether they fit the row. A layout's do, by the way it is made.
        return cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded

    def _compute_g_and_beta(
        self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, in float32, and the writing strength.

        megatron-core takes the exponential of `A_log` in its own precision, which in bfloat16 puts decays off by up to
        0.4 %. Source: transformers, Qwen3_5GatedDeltaNet.forward.
        """
        decay = -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp)
        return decay, beta.sigmoid()

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As megatron-core's, which keeps the projection's sections apart; those of its adapter's rows too.

        A rank has its part of each section, one above the other, so the rows of several are in no order as a whole.
        """
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        for name in (f"{prefix}in_proj{MARK}{kind}" for kind in (OUT, MAGNITUDE)):
            if name in state:
                sections = list(self.in_proj_split_sections)
                state[name] = _split_tensor_factory(state[name], sections, self.in_proj_split_names, 0)
        return state

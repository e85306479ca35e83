"""megatron-core's Gated DeltaNet, with public places to change its kernel, offsets and casts.

Borrowed: `GatedDeltaNet._setup_variant_attrs`, which sets `gated_delta_rule`; `_resolve_cu_seqlens`, which checks
offsets on the host (packed rows came with NVIDIA/Megatron-LM#2645); `_apply_gated_norm`, whose gate has the activation
of MLPs; and
`megatron.core.ssm.utils._split_tensor_factory`, by which `sharded_state_dict` splits the weight of the fused
projection. Delete this module when megatron-core neither reads packed offsets on the host nor computes the delta rule
in a lower precision than float32 parameters, and splits adapters like their weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.utils import _split_tensor_factory
from torch import Tensor

GatedDeltaRule = Callable[..., tuple[Tensor, Tensor | None]]


class SegmentedGatedDeltaNet(GatedDeltaNet):
    """GatedDeltaNet that does not check the offsets of packed rows. A subclass implements `choose_delta_rule`."""

    def choose_delta_rule(self, default: GatedDeltaRule | None) -> GatedDeltaRule:
        """Return the function that computes the delta rule.

        `default` is megatron-core's function; None without flash-linear-attention.
        """
        raise NotImplementedError

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the factor of the normalized output for a gate in float32."""
        raise NotImplementedError

    def split_sections(self, weight: ShardedTensor) -> ShardedTensorFactory:
        """Split a sharded tensor into the sections of the fused input projection, like the projection's weight."""
        return _split_tensor_factory(weight, list(self.in_proj_split_sections), self.in_proj_split_names, 0)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = self.choose_delta_rule(self.gated_delta_rule)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.out_norm(x.reshape(-1, x.shape[-1]))
        return (normed * self.activate_gate(gate.reshape(normed.shape).float())).to(x.dtype)

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        # megatron-core checks on the host that the offsets match the row, which synchronizes with the device; those of
        # a layout always do.
        return cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded

"""megatron-core's Gated DeltaNet, with public places to change its kernel, offsets and casts.

Overridden in `GatedDeltaNet`: `_setup_variant_attrs`, which sets `gated_delta_rule`; `_resolve_cu_seqlens`, which
checks offsets on the host (packed rows came with NVIDIA/Megatron-LM#2645); and `_apply_gated_norm`, which applies the
activation of the MLPs to the gate. Called: `_prepare_input_for_gated_delta_rule` and `_compute_g_and_beta`, for
generation, because `forward` rejects an inference context; and `megatron.core.ssm.utils._split_tensor_factory`, with
which `sharded_state_dict` splits the weight of the fused projection. For `linear_cp_mode="chunkwise"`, which
megatron-core lacks, a layer gets `SingleRank` as its context-parallel group, and a configuration is checked
`with_divisible_heads`. Delete this module when megatron-core neither reads packed offsets on the host nor computes the
delta rule in a lower precision than float32 parameters, splits the weights of adapters like the weight of their layer,
and has chunk-wise context parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, gdn
from megatron.core.ssm.gated_delta_net.common import get_parameter_local_cp
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class SingleRank:
    """Stands for a process group of one rank. megatron-core's Gated DeltaNet only asks for its size and rank."""

    def size(self) -> int:
        """Return 1, so that megatron-core exchanges nothing."""
        return 1

    def rank(self) -> int:
        """Return 0, the only rank."""
        return 0


@contextlib.contextmanager
def with_divisible_heads(config: TransformerConfig) -> Iterator[None]:
    """Multiply the numbers of heads of linear attention by tp * cp inside the `with` block.

    megatron-core rejects a configuration in which tp * cp does not divide them. All other checks give the same result.
    """
    names = ("linear_num_key_heads", "linear_num_value_heads")
    heads = {name: getattr(config, name) for name in names}
    for name, number in heads.items():
        setattr(config, name, number * config.tensor_model_parallel_size * config.context_parallel_size)
    try:
        yield
    finally:
        for name, number in heads.items():
            setattr(config, name, number)


GatedDeltaRule = Callable[..., tuple[Tensor, Tensor | None]]


class SegmentedGatedDeltaNet(GatedDeltaNet):
    """GatedDeltaNet that does not check the offsets of packed rows. A subclass implements `choose_delta_rule`."""

    def choose_delta_rule(self, default: GatedDeltaRule | None) -> GatedDeltaRule:
        """Return the function that computes the delta rule.

        `default` is megatron-core's function; None without flash-linear-attention.
        """
        raise NotImplementedError

    def activate_gate(self, gate: Tensor) -> Tensor:
        """Return the factor by which the normalized output is multiplied, given the gate in float32."""
        raise NotImplementedError

    def split_sections(self, weight: ShardedTensor) -> ShardedTensorFactory:
        """Split a sharded tensor into the sections of the fused input projection, like the projection's weight."""
        return _split_tensor_factory(weight, list(self.in_proj_split_sections), self.in_proj_split_names, 0)

    def convolution_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return the weight [channels / cp, w] and bias of the convolution for the heads of this rank."""
        sections = [self.qk_dim_local_tp, self.qk_dim_local_tp, self.v_dim_local_tp]
        weight, bias = (
            None if x is None else get_parameter_local_cp(x, 0, self.pg_collection.cp, sections)
            for x in (self.conv1d.weight, self.conv1d.bias)
        )
        return weight.squeeze(1), bias

    def convolve(self, inputs: Tensor) -> Tensor:
        """Return the causal convolution and activation of padded rows [b, s, channels / cp], as in training."""
        weight, bias = self.convolution_weights()
        # `choose_kernels` has replaced or wrapped the function in this module.
        return gdn.causal_conv1d(x=inputs, weight=weight, bias=bias, activation=self.activation)[0]

    def prepare_rule(
        self, convolved: Tensor, gate: Tensor, beta: Tensor, alpha: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the arguments of the delta rule: query, key, value, logarithm of the decay, and writing strength.

        Args:
            convolved: [b, s, channels / cp] queries, keys and values after the convolution.
            gate, beta, alpha: [b, s, ...], the other sections of the input projection.
        """
        rows, tokens = convolved.shape[:2]
        query, key, value, _, beta, alpha = self._prepare_input_for_gated_delta_rule(
            convolved, gate, rows, tokens, beta, alpha
        )
        decay, bias = (get_parameter_local_cp(x, 0, self.pg_collection.cp) for x in (self.A_log, self.dt_bias))
        return query, key, value, *self._compute_g_and_beta(decay, bias, alpha, beta)

    def gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return `x` [b, s, heads, e], normalized and multiplied by `gate` [b, s, heads * e], in the gate's shape."""
        return self._apply_gated_norm(x, gate).reshape(gate.shape)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = self.choose_delta_rule(self.gated_delta_rule)

    def _apply_gated_norm(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = self.out_norm(x.reshape(-1, x.shape[-1]))
        return (normed * self.activate_gate(gate.reshape(normed.shape).float())).to(x.dtype)

    def _resolve_cu_seqlens(
        self, cu_seqlens_padded: Tensor | None, cu_seqlens_actual: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        # megatron-core checks on the host that the offsets match the row, which synchronizes with the device. Offsets
        # of a `SequenceLayout` always match.
        return cu_seqlens_actual if cu_seqlens_padded is None else cu_seqlens_padded

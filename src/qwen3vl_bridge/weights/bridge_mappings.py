"""Convert weight-table rows to Megatron-Bridge's parameter mappings."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator

from qwen3vl_bridge.upstream.parameter_mapping import ConfigMapping
from qwen3vl_bridge.weights.rows import WeightRow, local_name

import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    MegatronParamMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# AutoMapping determines the tensor parallelism of a weight by the class of its module. These are subclasses of
# megatron-core's, with the same parallelism.
for _name, _parallelism in (
    ("BalancedRouter", "replicated"),
    ("ZeroCenteredRMSNorm", "replicated"),
    ("LinearAttention", "column"),
):
    AutoMapping.register_module_type(_name, _parallelism)


class ZeroCenteredMapping(RMSNorm2ZeroCenteredRMSNormMapping):
    """Mapping of norm weights, where Megatron's weight is the Hugging Face weight minus one.

    It subtracts in float32. Megatron-Bridge's own mapping subtracts in the dtype of the Hugging Face tensor.
    """

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """Return the weight minus one, in the dtype of the module's parameter."""
        return super().hf_to_megatron(hf_weights.float(), megatron_module)


class VocabularyMapping(ConfigMapping):
    """Mapping of a tensor with one row per token of the vocabulary, to which Megatron may add padding rows.

    Megatron-Bridge's own mapping adds padding only under tensor parallelism, and only to parameters with the names that
    text models use. It also exports the padding rows.
    """

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """Return this rank's rows of a tensor [vocabulary, hidden]; padding rows are zero.

        Raises:
            ValueError: the number of rows of the tensor is not `vocab_size`.
        """
        if len(hf_weights) != (tokens := self.config_of(megatron_module).vocab_size):
            raise ValueError(f"{self.hf_param} has {len(hf_weights)} rows, expected vocab_size, {tokens}")
        rows = megatron_module.weight.shape[0]
        if not isinstance(megatron_module.weight, DTensor):  # a DTensor has the shape of the full tensor
            rows *= self.tp_size
        return super().hf_to_megatron(F.pad(hf_weights, (0, 0, 0, rows - len(hf_weights))), megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return Hugging Face name -> tensor [vocabulary, hidden], without padding rows."""
        tokens = None if megatron_module is None else self.config_of(megatron_module).vocab_size
        tokens = self.broadcast_obj_from_pp_rank(tokens, f"{self.hf_param} tokens")
        exported = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: tensor[:tokens] for name, tensor in exported.items()}


class InputMajor:
    """Mixin of mappings that transposes input-major tensors, [..., in, out], before import and after export.

    Megatron-Bridge's own mappings of experts determine the orientation by shape, which fails for square tensors.
    """

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """Transpose weights [..., in, out] to [..., out, in], and return this rank's shard."""
        return super().hf_to_megatron(hf_weights.transpose(-1, -2), megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """Return Hugging Face name -> weights [..., in, out]; under expert parallelism, one local expert per rank."""
        exported = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: tensor.transpose(-1, -2).contiguous() for name, tensor in exported.items()}


class InputMajorExpertMapping(InputMajor, FusedExpertMapping):
    """Mapping of `down_proj` in released checkpoints, [experts, intermediate, hidden]."""


class InputMajorGatedExpertMapping(InputMajor, FusedGatedExpertMapping):
    """Mapping of `gate_up_proj` in released checkpoints, [experts, hidden, 2 * intermediate]."""


def param_mappings(rows: tuple[WeightRow, ...]) -> Iterator[MegatronParamMapping]:
    """Convert weight-table rows to Megatron-Bridge's mappings.

    Yield two mappings of a parameter that has different names in Transformer Engine's and the local layer spec.
    """
    for row in rows:
        mapping = pkgutil.resolve_name(row.bridge_mapping())
        for name in dict.fromkeys((row.megatron, local_name(row.megatron))):
            yield mapping(name, *row.hf)

"""The weight table's rows as Megatron-Bridge's parameter mappings."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qwen3vl_bridge.weights.rows import (
    QKV,
    ConcatenatedQKV,
    GatedMLP,
    GatedQKV,
    PackedExpert,
    WeightRow,
    ZeroCentered,
    local_name,
)

import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import (
    AutoMapping,
    ConcatenatedQKVMapping,
    FusedExpertMapping,
    FusedGatedExpertMapping,
    GatedMLPMapping,
    GDNConv1dMapping,
    GDNLinearMappingSeparate,
    MegatronParamMapping,
    QKVMapping,
    ReplicatedMapping,
    RMSNorm2ZeroCenteredRMSNormMapping,
)
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Megatron-Bridge determines by a module's class how its weight is split: these are split like megatron-core's base
# classes.
for _name, _split in (
    ("BalancedRouter", "replicated"),
    ("ZeroCenteredRMSNorm", "replicated"),
    ("LinearAttention", "column"),
):
    AutoMapping.register_module_type(_name, _split)


class ZeroCenteredMapping(RMSNorm2ZeroCenteredRMSNormMapping):
    """Subtracts one in float32; Megatron-Bridge's own mapping does so in the dtype of the Hugging Face tensor."""

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """Any shape, less one, in the dtype of the module's parameter."""
        return super().hf_to_megatron(hf_weights.float(), megatron_module)


_MAPPING_OF: dict[type[WeightRow], Callable[..., MegatronParamMapping]] = {
    WeightRow: AutoMapping,
    QKV: QKVMapping,
    ConcatenatedQKV: ConcatenatedQKVMapping,
    GatedMLP: GatedMLPMapping,
    GatedQKV: QKVMapping,
    ZeroCentered: ZeroCenteredMapping,
}


class VocabularyMapping(AutoMapping):
    """A tensor with a row for each token; Megatron's has more rows if the vocabulary is padded.

    Megatron-Bridge's own mapping pads only under tensor parallelism, for names of pure text models, and exports the
    padding.
    """

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """[vocabulary, h] -> this rank's rows; padding rows are zero."""
        if len(hf_weights) != (tokens := self._get_config(megatron_module).vocab_size):
            raise ValueError(f"{self.hf_param} has {len(hf_weights)} rows, expected vocab_size, {tokens}")
        rows = megatron_module.weight.shape[0]
        if not isinstance(megatron_module.weight, DTensor):  # whose shape is the whole tensor's
            rows *= self.tp_size
        return super().hf_to_megatron(F.pad(hf_weights, (0, 0, 0, rows - len(hf_weights))), megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """The rows of tokens, [vocabulary, h]."""
        tokens = None if megatron_module is None else self._get_config(megatron_module).vocab_size
        tokens = self.broadcast_obj_from_pp_rank(tokens, f"{self.hf_param} tokens")
        exported = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: tensor[:tokens] for name, tensor in exported.items()}


class InputMajor:
    """Transposes an expert of an input-major tensor; before import, after export.

    Megatron-Bridge's own mappings determine the orientation by comparing shapes, which fails if a tensor is square.
    """

    def hf_to_megatron(self, hf_weights: Tensor, megatron_module: nn.Module) -> Tensor:
        """[experts, in, out] -> this rank's part of the expert, [out, in]."""
        return super().hf_to_megatron(hf_weights.transpose(-1, -2), megatron_module)

    def megatron_to_hf(self, megatron_weights: Tensor | None, megatron_module: nn.Module | None) -> dict[str, Tensor]:
        """The expert, or one of every expert-parallel rank, as [..., in, out]."""
        exported = super().megatron_to_hf(megatron_weights, megatron_module)
        return {name: tensor.transpose(-1, -2).contiguous() for name, tensor in exported.items()}


class InputMajorExpertMapping(InputMajor, FusedExpertMapping):
    """`down_proj` [experts, I, H] of the released checkpoints."""


class InputMajorGatedExpertMapping(InputMajor, FusedGatedExpertMapping):
    """`gate_up_proj` [experts, H, 2 * I] of the released checkpoints."""


_PACKED: dict[tuple[bool, bool], type[MegatronParamMapping]] = {  # (gated, transposed)
    (False, False): FusedExpertMapping,
    (True, False): FusedGatedExpertMapping,
    (False, True): InputMajorExpertMapping,
    (True, True): InputMajorGatedExpertMapping,
}


def param_mappings(rows: tuple[WeightRow, ...]) -> Iterator[MegatronParamMapping]:
    """Megatron-Bridge's mapping of each row, for the names of both layer specs."""
    for row in rows:
        if isinstance(row, PackedExpert):
            make = _PACKED[row.gated, row.transposed]
        elif row.sections:
            make = GDNLinearMappingSeparate if len(row.hf) > 1 else GDNConv1dMapping
        elif row.of_vocabulary:
            make = VocabularyMapping
        else:
            make = ReplicatedMapping if row.replicated else _MAPPING_OF[type(row)]
        for name in dict.fromkeys((row.megatron, local_name(row.megatron))):
            yield make(name, *row.hf)

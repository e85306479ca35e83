"""The provider of Qwen3.8-Flash-Next: the configuration of a model and its training as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from qwen3vl_bridge.config.checks import Check, Requires, is_above, is_on, one_of, requires_default
from qwen3vl_bridge.core.ngrams import NgramHash
from qwen3vl_bridge.models.common.hybrid_provider import HybridExpertsMixin, HybridModelProvider
from qwen3vl_bridge.models.qwen4_exp import config as hf
from qwen3vl_bridge.models.qwen4_exp.config import FAMILY_NAME
from qwen3vl_bridge.models.qwen4_exp.hash_constants import head_sizes, multipliers
from qwen3vl_bridge.models.qwen4_exp.model import Qwen4ExpModel
from qwen3vl_bridge.weights.fp8 import E4M3
from qwen3vl_bridge.weights.rows import Dimensions

from megatron.core.process_groups_config import ProcessGroupCollection
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig

_NOT_WITH_STREAMS = "gated residuals do not support it"


def _check_recomputed_modules(provider: Any) -> None:
    """Raise ValueError if norms are to be recomputed: gated residuals replace norms, and are always recomputed."""
    if provider.recompute_granularity == "selective" and "layernorm" in (provider.recompute_modules or ()):
        raise ValueError(
            "recompute_modules has 'layernorm', but the model has no norms there. Remove 'layernorm': gated residuals "
            "replace norms, and are always recomputed"
        )


def _check_offloaded_modules(provider: Any) -> None:
    """Raise ValueError if norms are to be offloaded: gated residuals replace norms."""
    norms = {"attn_norm", "mlp_norm"}.intersection(provider.offload_modules or ())
    if provider.fine_grained_activation_offloading and norms:
        raise ValueError(
            f"offload_modules has {', '.join(sorted(norms))}, which the model does not have: gated residuals replace "
            "norms. Remove the names"
        )


_CHECKS: tuple[Check, ...] = (
    _check_recomputed_modules,
    _check_offloaded_modules,
    Requires("fp8", None, lambda model: model.trains_mtp, why="multi-token prediction is not computed in FP8"),
    Requires("fp4", None, lambda model: model.trains_mtp, why="multi-token prediction is not computed in FP4"),
    Requires("ngram_table_dtype", one_of(None, E4M3)),
    Requires(
        "freeze_ngram_table", True, is_on("ngram_table_dtype") & (lambda model: not model.freeze_language_model),
        why="an n-gram table in FP8 is not trained",
    ),
    *requires_default("fp32_residual_connection", _NOT_WITH_STREAMS),
    Requires("hidden_dropout", 0.0, why=_NOT_WITH_STREAMS),
    Requires("attention_dropout", 0.0, why="attention to selected blocks does not support it"),
    *requires_default("overlap_moe_expert_parallel_comm", _NOT_WITH_STREAMS),
    Requires(
        "variable_seq_lengths", True, is_above("pipeline_model_parallel_size", 1),
        why="pipeline stages send each other several residual streams, not one hidden state",
    ),
)  # fmt: skip


@dataclass
class Qwen4ExpModelProvider(HybridExpertsMixin, HybridModelProvider):
    """Provider of Qwen3.8-Flash-Next.

    Attributes:
        hc_count: number of residual streams.
        hc_lowrank: rank of the projection that mixes the residual streams.
        linear_output_gate: activation of the output gate of linear attention, "sigmoid" or "silu".
        ple_layers: indices of the layers with an n-gram embedding, from 0.
        ple_embed_dim: size of a token's n-gram embedding, of all hash heads together.
        ple_conv_kernel_size: kernel size of the convolution after the n-gram embedding.
        ngram_size: number of tokens of the longest n-grams; there are embeddings for 2, 3, ..., `ngram_size` tokens.
        heads_per_ngram: hash heads for each number of tokens.
        ngram_vocab_size_base: lower bound of the number of rows of each hash head's table.
        make_ngram_vocab_size_divisible_by: the rows of all hash heads together are padded to a multiple of this number.
        split_ngram_parts: number of tensors in which Hugging Face checkpoints store the table of a layer.
        ngram_seed: seed of the factors by which tokens are multiplied for the hash.
        freeze_ngram_table: do not train the n-gram tables.
        ngram_table_dtype: "float8_e4m3fn" keeps frozen n-gram tables in FP8 with a scale for each hash head, as the FP8
            release does; None keeps them in the dtype of the other weights.
        indexer_n_heads, indexer_head_dim: number and size of the query heads that select the blocks which full
            attention attends to. The indexer is never trained, because its choice has no gradient.
        indexer_budget: number of tokens in the selected blocks. Shorter documents have ordinary attention.
        indexer_compress_ratio: number of tokens of a block.
    """

    vision_config: Qwen3_5MoeVisionConfig = field(default_factory=Qwen3_5MoeVisionConfig)

    num_moe_experts: int | None = 512
    moe_router_topk: int = 10
    moe_ffn_hidden_size: int | None = 640
    moe_shared_expert_intermediate_size: int | None = 640
    linear_num_value_heads: int = 48

    hc_count: int = 4
    hc_lowrank: int = 320
    linear_output_gate: str = "sigmoid"

    ple_layers: list[int] = field(default_factory=lambda: [1])
    ple_embed_dim: int = 2560
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 128
    ngram_seed: int = hf.SEED
    freeze_ngram_table: bool = False
    ngram_table_dtype: str | None = None

    indexer_n_heads: int = 4
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4

    family: ClassVar[str] = FAMILY_NAME
    model_class = Qwen4ExpModel
    checks: ClassVar[tuple[Check, ...]] = (*HybridExpertsMixin.checks, *_CHECKS)

    def dimensions(self) -> Dimensions:
        """Return the dimensions that the weight table uses. The vocabulary size does not include padding rows."""
        return hf.add_dimensions(super().dimensions(), self._text_fields())

    def _text_fields(self) -> dict[str, Any]:
        """Return the fields that only this family has, under the names of a `config.json`."""
        names = (*hf.RESIDUAL_FIELDS, *hf.NGRAM_FIELDS, *hf.INDEXER_FIELDS, "ple_embed_dim")
        fields = {name: getattr(self, name) for name in names}
        return fields | {"ple_layer_ids": [layer + 1 for layer in self.ple_layers]}

    def ngram_table_rows(self, index: int) -> tuple[int, ...]:
        """Return the number of rows of each hash head's table in the layer `ple_layers[index]`."""
        return hf.ngram_table_rows(self._text_fields(), index)

    def ngram_hashes(self) -> tuple[NgramHash, ...]:
        """Return the hash of each layer in `ple_layers`."""
        heads = hf.ngram_heads(self._text_fields())
        return tuple(
            NgramHash(
                multipliers(self.vocab_size, self.ngram_size, index, self.ngram_seed),
                head_sizes(self.ngram_vocab_size_base, heads, index),
                self.ngram_size,
                self.heads_per_ngram,
                self.eos_token_id,
            )
            for index in range(len(self.ple_layers))
        )

    def check_wrapping(self, *, fsdp: bool) -> None:
        """Raise ValueError for Megatron-FSDP with n-gram tables that are divided over ranks.

        Megatron-FSDP recognizes divided parameters only by the names of experts, and would average the n-gram tables of
        different hash heads.
        """
        ranks = self.expert_model_parallel_size * (self.expert_tensor_parallel_size or self.tensor_model_parallel_size)
        if fsdp and self.ple_layers and ranks > 1:
            raise ValueError(
                f"Megatron-FSDP cannot train n-gram tables that are divided over {ranks} ranks. Set "
                "expert_model_parallel_size=1 and expert_tensor_parallel_size=1, or use_megatron_fsdp=False"
            )

    def local_arguments(self, groups: ProcessGroupCollection) -> dict[str, Any]:
        """Return the arguments with which `TokenBatch.local` selects the tokens and images of this rank."""
        return super().local_arguments(groups) | dict(ngram_hashes=self.ngram_hashes())

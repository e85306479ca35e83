"""The weight table of Qwen3.8-Flash-Next: maps every parameter between Hugging Face and Megatron.

It differs from Qwen3.5's table: rows of hyper connections (gated residuals) replace those of the layers' norms, and
rows are added for per-layer n-gram embeddings (`ple`) and for the indexer of full attention. Multi-token prediction is
one more layer with full attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Self

from qwen3vl_bridge.weights import rows
from qwen3vl_bridge.weights.hybrid_rows import (
    MTP,
    MTP_LAYER,
    TEXT_LAYER,
    gated_attention_rows,
    linear_attention_rows,
    ngram_head_sizes,
    shared_expert_rows,
)
from qwen3vl_bridge.weights.rows import Dimensions, ExpertLayout, TensorSlice, WeightRow, single_row

_NORMS = (".input_layernorm.weight", ".post_attention_layernorm.weight", "language_model.norm.weight")


class NgramHead(WeightRow):
    """Weight-table row of the n-gram table of one hash head.

    Hugging Face concatenates the n-gram tables of all heads, and stores the result in parts of equal length. The table
    of a head begins and ends anywhere in a part. The last head has the padding at the end.
    """

    def with_indices(self, *numbers: int) -> Self:
        """Return the weight-table row of one layer and head. `resolve` adds the names of the parts."""
        layer, _ = numbers
        return replace(super().with_indices(*numbers), hf=(self.hf[0].replace("*", str(layer), 1),))

    def resolve(self, dimensions: Dimensions) -> Self:
        """Return the weight-table row with the names of the parts that contain the table of this head."""
        part, start, stop = self._rows(dimensions)
        numbers = range(start // part, -(-stop // part))
        hf = tuple(self.hf[0].replace("*", str(number)) for number in numbers)
        return replace(self, hf=hf, shapes=((part, "ngram_dim"),) * len(hf))

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield the slice of this head's table in each part; see `WeightRow.hf_slices`."""
        part, start, stop = self._rows(dimensions)
        dim = dimensions["ngram_dim"]
        for name, first in zip(self.hf, itertools.count(start // part * part, part)):
            begin, end = max(start, first), min(stop, first + part)
            yield TensorSlice(name, (begin - first) * dim, (end - begin) * dim)

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        """Return the shape of this head's n-gram table, [rows, columns]."""
        _, start, stop = self._rows(dimensions)
        return stop - start, dimensions["ngram_dim"]

    def _rows(self, dimensions: Dimensions) -> tuple[int, int, int]:
        """Return the number of rows in a part, and where this head begins and ends in the table of all heads."""
        layer, head = self.position
        sizes = ngram_head_sizes(dimensions, dimensions.indices["ple_layers"].index(layer))
        start = sum(sizes[:head])
        return sum(sizes) // dimensions["ngram_parts"], start, start + sizes[head]


def _without_norms(table: Iterable[WeightRow]) -> tuple[WeightRow, ...]:
    """Return the weight-table rows that do not belong to norms, because gated residuals replace norms."""
    return tuple(row for row in table if not row.hf[0].endswith(_NORMS))


def _residual_rows(megatron: str, hf: str, *indices: str, injects: bool = True) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of a gated residual. The mixer at the end of the model does not inject outputs."""
    shapes = {
        "hc_norm": ("streams_hidden",),
        "input_mix_weight_down": ("lowrank", "streams_hidden"),
        "input_mix_weight_up": ("streams_hidden", "lowrank"),
        "block_inject_weight": ("streams", "streams_hidden"),
    }
    return tuple(
        single_row(f"{megatron}.{name}.weight", f"{hf}.{name}.weight", *shape, indices=indices, replicated=True)
        for name, shape in shapes.items()
        if injects or name != "block_inject_weight"
    )


def _layer_residual_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of both gated residuals of a layer. Megatron names them like the layer's norms."""
    return (
        *_residual_rows(f"{megatron}input_layernorm", f"{hf}attn_hyper_connection", *indices),
        *_residual_rows(f"{megatron}pre_mlp_layernorm", f"{hf}mlp_hyper_connection", *indices),
    )


def _indexed_attention_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of full attention with output gates, and of the indexer."""
    names = {
        "index_qk_proj": ("index_qk", "hidden"),
        "q_layernorm": ("index_dim",),
        "k_layernorm": ("index_dim",),
    }
    indexer = "indexer.{}.weight".format
    return (
        *_without_norms(gated_attention_rows(megatron, hf, *indices)),
        *(
            single_row(
                f"{megatron}self_attention.{indexer(name)}", f"{hf}self_attn.{indexer(name)}", *shape,
                indices=indices, replicated=True,
            )
            for name, shape in names.items()
        ),
    )  # fmt: skip


def _ple_rows(megatron: str, hf: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of per-layer n-gram embeddings (`ple`). Only some layers have an embedding."""
    shapes = {
        "key_proj": ("streams_hidden", "ple_dim"),
        "value_proj": ("hidden", "ple_dim"),
        "norm_key": ("streams_hidden",),
        "norm_query": ("streams_hidden",),
        "norm_conv": ("streams_hidden",),
        "conv1d": ("streams_hidden", 1, "ple_conv"),
    }
    table = f"{hf}ple.ple_embedding.ngram_embedding.shard_*.weight"
    return (
        *(
            single_row(
                f"{megatron}ple.{name}.weight", f"{hf}ple.{name}.weight", *shape,
                indices=("ple_layers",), replicated=True,
            )
            for name, shape in shapes.items()
        ),
        NgramHead(
            f"{megatron}ple.ngram_embedding.weight*", (table,), (("ngram_dim",),), ("ple_layers", "ngram_heads"),
            condition="ple",
        ),
    )  # fmt: skip


def _mtp_rows(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of multi-token prediction: two norms, two projections, a layer and a mixer."""
    joining = {
        "enorm": ("pre_fc_norm_embedding", ("hidden",)),
        "hnorm": ("pre_fc_norm_hidden", ("streams_hidden",)),
        "fc_embedding": ("fc_embedding", ("hidden", "hidden")),
        "fc_hidden": ("fc_hidden", ("hidden", "hidden")),
    }
    every = (
        *(
            # The norms are modules of a layer spec, and the projections plain torch modules.
            single_row(f"{MTP}{name}.weight", f"mtp.{other}.weight", *shape, replicated=name.startswith("fc"))
            for name, (other, shape) in joining.items()
        ),
        *_layer_residual_rows(*MTP_LAYER),
        *_indexed_attention_rows(*MTP_LAYER),
        *_without_norms(rows.moe_rows(*MTP_LAYER, experts=experts)),
        *shared_expert_rows(*MTP_LAYER),
        *_residual_rows(f"{MTP}hyper_connection_mixer", "mtp.hyper_connection_mixer", injects=False),
    )
    return tuple(replace(row, condition="mtp") for row in every)


def table(experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR) -> tuple[WeightRow, ...]:
    """Return the weight table for a checkpoint that stores experts in the format `experts`."""
    mixer = ("language_model.hyper_connection_mixer", "model.language_model.hyper_connection_mixer")
    layers = (
        *_layer_residual_rows(*TEXT_LAYER, "text_layers"),
        *_indexed_attention_rows(*TEXT_LAYER, "full_layers"),
        *_without_norms(linear_attention_rows(*TEXT_LAYER)),
        *_ple_rows(*TEXT_LAYER),
    )
    return (
        *rows.VISION_ROWS,
        *_without_norms(rows.text_rows(*layers)),
        *_without_norms(rows.moe_rows(*TEXT_LAYER, "moe_layers", experts=experts)),
        *shared_expert_rows(*TEXT_LAYER, "moe_layers"),
        *_residual_rows(*mixer, injects=False),
        *_mtp_rows(experts),
    )

"""The weight table of Qwen3.5-VL: maps every parameter between Hugging Face and Megatron.

Layers have linear or full attention, and a dense MLP or experts. Multi-token prediction (MTP) is one additional layer
with full attention. Source of Megatron's names and values: Megatron-Bridge 0.6, qwen35_vl_bridge.py.
"""

from __future__ import annotations

from dataclasses import replace

from qwen3vl_bridge.weights.rows import (
    OUTPUT_LAYER,
    VISION_ROWS,
    Copy,
    ExpertLayout,
    GatedMLP,
    GatedQKV,
    Sectioned,
    Shape,
    WeightRow,
    ZeroCentered,
    dense_mlp_rows,
    moe_rows,
)

_TEXT = "language_model.decoder.layers.*."
_HF_TEXT = "model.language_model.layers.*."
_LINEAR = ("linear_layers",)
_LINEAR_ATTENTION = f"{_TEXT}self_attention."
_HF_LINEAR_ATTENTION = f"{_HF_TEXT}linear_attn."
_MTP = "language_model.mtp.layers.0."
_MTP_LAYER, _HF_MTP_LAYER = f"{_MTP}mtp_model_layer.", "mtp.layers.0."


def _full_attention_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Rows of attention with a gated output per head, and of the input norm."""

    def copy(name: str, other: str, shape: Shape) -> WeightRow:
        return Copy(f"{megatron}self_attention.{name}", (f"{hf}{other}",), (shape,), indices)

    return (
        copy("linear_qkv.layer_norm_weight", "input_layernorm.weight", ("hidden",)),
        GatedQKV(
            f"{megatron}self_attention.linear_qkv.weight",
            tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"),
            (("gated_q", "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            indices,
        ),
        copy("q_layernorm.weight", "self_attn.q_norm.weight", ("head_dim",)),
        copy("k_layernorm.weight", "self_attn.k_norm.weight", ("head_dim",)),
        copy("linear_proj.weight", "self_attn.o_proj.weight", ("hidden", "q")),
    )


def _linear(kind: type[WeightRow], name: str, other: str, shape: Shape, *, float32: bool = False) -> WeightRow:
    return kind(_LINEAR_ATTENTION + name, (_HF_LINEAR_ATTENTION + other,), (shape,), _LINEAR, float32=float32)


_QKV = (("query", "l_key"), ("key", "l_key"), ("value", "l_value"))
LINEAR_ATTENTION_ROWS: tuple[
    WeightRow, ...
] = (  # float32: as in released Qwen3.5; in Qwen3.6's files they are bfloat16
    Copy(
        f"{_LINEAR_ATTENTION}in_proj.layer_norm_weight", (f"{_HF_TEXT}input_layernorm.weight",), (("hidden",),), _LINEAR
    ),
    Sectioned(
        f"{_LINEAR_ATTENTION}in_proj.weight",
        tuple(f"{_HF_LINEAR_ATTENTION}in_proj_{part}.weight" for part in ("qkv", "z", "b", "a")),
        (("l_qkv", "hidden"), ("l_value", "hidden"), ("l_value_heads", "hidden"), ("l_value_heads", "hidden")),
        _LINEAR,
        sections=(*_QKV, ("z", "l_value"), ("beta", "l_value_heads"), ("alpha", "l_value_heads")),
    ),
    Sectioned(
        f"{_LINEAR_ATTENTION}conv1d.weight",
        (f"{_HF_LINEAR_ATTENTION}conv1d.weight",),
        (("l_qkv", 1, "l_conv"),),
        _LINEAR,
        sections=_QKV,
    ),
    _linear(Copy, "A_log", "A_log", ("l_value_heads",), float32=True),
    _linear(Copy, "dt_bias", "dt_bias", ("l_value_heads",)),
    _linear(ZeroCentered, "out_norm.weight", "norm.weight", ("l_value_dim",), float32=True),
    _linear(Copy, "out_proj.weight", "out_proj.weight", ("hidden", "l_value")),
)

TEXT_ROWS: tuple[WeightRow, ...] = (
    Copy(
        "language_model.embedding.word_embeddings.weight",
        ("model.language_model.embed_tokens.weight",),
        (("vocab", "hidden"),),
    ),
    *_full_attention_rows(_TEXT, _HF_TEXT, "full_layers"),
    *LINEAR_ATTENTION_ROWS,
    Copy("language_model.decoder.final_layernorm.weight", ("model.language_model.norm.weight",), (("hidden",),)),
    Copy(f"{OUTPUT_LAYER}.weight", ("lm_head.weight",), (("vocab", "hidden"),), condition="untied"),
)


def _shared_expert_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Rows of the shared expert and its output gate."""
    megatron, hf = f"{megatron}mlp.shared_experts.", f"{hf}mlp.shared_expert"
    half = ("shared_ffn", "hidden")
    return (
        GatedMLP(
            f"{megatron}linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight"), (half, half), indices
        ),
        Copy(f"{megatron}linear_fc2.weight", (f"{hf}.down_proj.weight",), (("hidden", "shared_ffn"),), indices),
        Copy(f"{megatron}gate_weight", (f"{hf}_gate.weight",), ((1, "hidden"),), indices, replicated=True),
    )


# Format of MTP's experts if it differs from that of the layers' experts, as in released Qwen3.5 but not Qwen3.6.
_LAYOUT_OF_LAYERS = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.OUTPUT_MAJOR}
_LAYOUT_OF_MTP = {ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT: ExpertLayout.PER_EXPERT}


def _mtp_rows(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Rows of multi-token prediction: two input norms, a projection of both inputs, a layer, and a final norm."""
    joining = (
        ("eh_proj.weight", "mtp.fc.weight", ("hidden", "hidden_twice")),
        ("enorm.weight", "mtp.pre_fc_norm_embedding.weight", ("hidden",)),
        ("hnorm.weight", "mtp.pre_fc_norm_hidden.weight", ("hidden",)),
        ("final_layernorm.weight", "mtp.norm.weight", ("hidden",)),
    )
    always = (
        *(Copy(_MTP + name, (other,), (shape,)) for name, other, shape in joining),
        *_full_attention_rows(_MTP_LAYER, _HF_MTP_LAYER),
    )
    with_experts = (
        *moe_rows(_MTP_LAYER, _HF_MTP_LAYER, experts=experts),
        *_shared_expert_rows(_MTP_LAYER, _HF_MTP_LAYER),
    )
    return (
        *(replace(row, condition="mtp") for row in always),
        *(replace(row, condition="mtp_dense") for row in dense_mlp_rows(_MTP_LAYER, _HF_MTP_LAYER)),
        *(replace(row, condition="mtp_experts") for row in with_experts),
    )


def table(experts: ExpertLayout = ExpertLayout.OUTPUT_MAJOR_MTP_PER_EXPERT) -> tuple[WeightRow, ...]:
    """The whole table, for a checkpoint with the given format of experts."""
    return (
        *VISION_ROWS,
        *TEXT_ROWS,
        *dense_mlp_rows(_TEXT, _HF_TEXT, "dense_layers"),
        *moe_rows(_TEXT, _HF_TEXT, "moe_layers", experts=_LAYOUT_OF_LAYERS.get(experts, experts)),
        *_shared_expert_rows(_TEXT, _HF_TEXT, "moe_layers"),
        *_mtp_rows(_LAYOUT_OF_MTP.get(experts, experts)),
    )

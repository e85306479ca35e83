"""A family of models from outside the package: what a conversion needs of it, without torch and Megatron.

Toy-VL is a vision tower as Qwen3-VL's, without DeepStack, and a language model without norms of queries and keys, in
files with names of their own. `toy_model.py` is what training needs. `docs/add_a_family.md` follows both files, and a
test follows the page: with them in a folder of their own, where they are `toy_family` and `toy_model`.
"""

from collections.abc import Mapping
from typing import Any

from qwen3vl_bridge import Family, register_family
from qwen3vl_bridge.models.hf_config import model_dimensions
from qwen3vl_bridge.weights.rows import QKV, VISION_ROWS, Dimensions, ExpertLayout, GatedMLP, Shape, WeightRow

NAME = "toy_vl"
# Fields of the provider and of `text_config` that say the same.
SAME = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim", "rotary_base": "rope_theta",
    "mrope_section": "mrope_section",
}  # fmt: skip


def _layer(kind: type[WeightRow], megatron: str, hf: Mapping[str, Shape]) -> WeightRow:
    names = tuple(f"toy.layers.*.{name}.weight" for name in hf)
    return kind(f"language_model.decoder.layers.*.{megatron}", names, tuple(hf.values()), ("text_layers",))


def _whole(megatron: str, hf: str, *shape: str) -> WeightRow:
    return WeightRow(f"language_model.{megatron}.weight", (f"{hf}.weight",), (shape,))


TABLE = (
    *VISION_ROWS, _whole("embedding.word_embeddings", "toy.embed", "vocab", "hidden"),
    _layer(WeightRow, "self_attention.linear_qkv.layer_norm_weight", {"norm_a": ("hidden",)}),
    _layer(
        QKV, "self_attention.linear_qkv.weight", {"q": ("q", "hidden"), "k": ("kv", "hidden"), "v": ("kv", "hidden")}
    ),
    _layer(WeightRow, "self_attention.linear_proj.weight", {"o": ("hidden", "q")}),
    _layer(WeightRow, "mlp.linear_fc1.layer_norm_weight", {"norm_b": ("hidden",)}),
    _layer(GatedMLP, "mlp.linear_fc1.weight", {"gate": ("ffn", "hidden"), "up": ("ffn", "hidden")}),
    _layer(WeightRow, "mlp.linear_fc2.weight", {"down": ("hidden", "ffn")}),
    _whole("decoder.final_layernorm", "toy.norm", "hidden"), _whole("output_layer", "toy.head", "vocab", "hidden"),
)  # fmt: skip


def table(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """The weight table. There are no experts, however a checkpoint would hold them."""
    del experts
    return TABLE


def check(config: Mapping[str, Any]) -> None:
    """Refuse what the model would get wrong: a field that is missing, or one that it does not follow."""
    text = config.get("text_config", {})
    if missing := [name for name in SAME.values() if name not in text]:
        raise ValueError(f"text_config lacks {', '.join(missing)}")
    if 2 * sum(text["mrope_section"]) != text["head_dim"]:
        raise ValueError(f"mrope_section is {text['mrope_section']}, expected half of head_dim, {text['head_dim']}")
    if config.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings is True, expected False: a Toy-VL has an output layer")


def dimensions(config: Mapping[str, Any]) -> Dimensions:
    text = config["text_config"]
    return model_dimensions(NAME, config, ffn=text["intermediate_size"], head_dim=text["head_dim"])


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model_type": config["model_type"],
        **{f"text_config.{name}": config["text_config"][name] for name in SAME.values()},
        **{f"vision_config.{name}": value for name, value in config["vision_config"].items()},
    }


def fields_of_run(model: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    del found
    return {f"text_config.{hf}": model[megatron] for megatron, hf in SAME.items() if megatron in model}


FAMILY = Family(
    name=NAME, architectures={"toy_vl": "ToyVLForConditionalGeneration"}, table=table, dimensions=dimensions,
    check=check, fields=fields, fields_of_run=fields_of_run, bridge="tests.model.toy_model",
)  # fmt: skip


def register() -> None:
    register_family(FAMILY)

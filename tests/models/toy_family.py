"""Define a family outside the package: the part for conversion, which needs neither torch nor Megatron.

Toy-VL has the vision tower of Qwen3-VL without DeepStack, and a language model without q and k norms. Its files have
their own names, and the down projection is stored transposed. `toy_model.py` has the part for training.
`docs/add_a_family.md` explains both files. A test copies them to a folder outside the package, as `toy_family` and
`toy_model`.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from qwen3vl_bridge import Family, register_family
from qwen3vl_bridge.config.hf_config import model_dimensions
from qwen3vl_bridge.weights.rows import (
    QKV,
    VISION_ROWS,
    Dimensions,
    ExpertLayout,
    GatedMLP,
    Shape,
    TensorSlice,
    WeightRow,
)  # fmt: skip

NAME = "toy_vl"
# Fields of the provider, and the fields of `text_config` with the same values.
SAME = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads", "kv_channels": "head_dim", "rotary_base": "rope_theta",
    "mrope_section": "mrope_section",
}  # fmt: skip


class InputMajor(WeightRow):
    """A kind of row of this family: one tensor [in, out]; Megatron's is [out, in]."""

    mapping: ClassVar[str] = "tests.models.toy_model:InputMajorMapping"

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        shape = self.resolve_shapes(dimensions)[0]
        yield TensorSlice(self.hf[0], 0, math.prod(shape), columns=shape[0])

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        return self.resolve_shapes(dimensions)[0][::-1]


def _layer(kind: type[WeightRow], megatron: str, hf: Mapping[str, Shape]) -> WeightRow:
    names = tuple(f"toy.layers.*.{name}.weight" for name in hf)
    return kind(f"language_model.decoder.layers.*.{megatron}", names, tuple(hf.values()), ("text_layers",))


def _single(megatron: str, hf: str, *shape: str) -> WeightRow:
    return WeightRow(f"language_model.{megatron}.weight", (f"{hf}.weight",), (shape,))


TABLE = (
    *VISION_ROWS, _single("embedding.word_embeddings", "toy.embed", "vocab", "hidden"),
    _layer(WeightRow, "self_attention.linear_qkv.layer_norm_weight", {"norm_a": ("hidden",)}),
    _layer(
        QKV, "self_attention.linear_qkv.weight", {"q": ("q", "hidden"), "k": ("kv", "hidden"), "v": ("kv", "hidden")}
    ),
    _layer(WeightRow, "self_attention.linear_proj.weight", {"o": ("hidden", "q")}),
    _layer(WeightRow, "mlp.linear_fc1.layer_norm_weight", {"norm_b": ("hidden",)}),
    _layer(GatedMLP, "mlp.linear_fc1.weight", {"gate": ("ffn", "hidden"), "up": ("ffn", "hidden")}),
    _layer(InputMajor, "mlp.linear_fc2.weight", {"down": ("ffn", "hidden")}),
    _single("decoder.final_layernorm", "toy.norm", "hidden"), _single("output_layer", "toy.head", "vocab", "hidden"),
)  # fmt: skip


def table(experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Return the weight table. The model has no experts, so their layout does not matter."""
    del experts
    return TABLE


def check(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a missing field, or a setting that the model does not implement."""
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
    check=check, fields=fields, fields_of_run=fields_of_run, bridge="tests.models.toy_model",
)  # fmt: skip


def register() -> None:
    register_family(FAMILY)

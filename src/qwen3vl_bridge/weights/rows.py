"""Weight-table rows, which describe how the Hugging Face tensors of a model become Megatron parameters.

    kind of row        Hugging Face tensors                     Megatron parameter
    WeightRow          one tensor                               the same tensor
                       several tensors                          concatenated along dimension 0
    GatedMLP           gate, up                                 [gate; up]
    QKV                q, k, v                                  interleaved by query group: [q heads; k; v] ...
    ConcatenatedQKV    [q; k; v]                                interleaved by head: [q; k; v] ...
    GatedQKV           q with gates, k, v                       interleaved by query group: [q heads; gates; k; v] ...
    ZeroCentered       w                                        w - 1
    PackedExpert       [experts, ...], optionally transposed    one expert

Each kind of row defines `hf_slices`, which determines how checkpoint files and adapters are converted. It also names a
mapping class of Megatron-Bridge, which converts weights that are sharded over ranks. A package with its own family can
define further kinds.

The module also has the rows that families share: vision tower, attention, MLP and experts. Standard library only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar, NamedTuple


@dataclass(frozen=True)
class Dimensions:
    """Sizes and layer indices of one model: the values of the symbols in a weight table.

    `dimensions[name]` returns the size with this name. The names are defined by the function `dimensions` of a family
    (`registry.Family`). Most are from `vision_sizes` below and `model_dimensions` in `config/hf_config.py`; names for
    linear attention are from `config/hybrid_config.py`.
    """

    sizes: Mapping[str, int]  # by name: symbols in shapes, conditions (0 or 1) and numbers of heads
    indices: Mapping[str, Sequence[int]]  # by name: the values of a `*`, such as the numbers of the layers
    family: str  # name of the family with the table, see `registry.family`

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def with_vocab(self, rows: int) -> Dimensions:
        """Return the dimensions with vocabulary size `rows`."""
        return replace(self, sizes={**self.sizes, "vocab": rows})


def vision_sizes(vision: Mapping) -> dict[str, int]:
    """Return the sizes of a vision tower, by their symbols in the weight table. `vision` is the `vision_config`."""
    return {
        "v_hidden": vision["hidden_size"],
        "v_heads": vision["num_heads"],
        "v_qkv": 3 * vision["hidden_size"],
        "v_ffn": vision["intermediate_size"],
        "v_merged": vision["hidden_size"] * vision["spatial_merge_size"] ** 2,
        "v_positions": vision["num_position_embeddings"],
        "v_channels": vision.get("in_channels", 3),
        "v_patch": vision["patch_size"],
        "v_temporal_patch": vision["temporal_patch_size"],
    }


Shape = tuple[str | int, ...]

# Modules with mappings of Megatron-Bridge and ours.
_PARAM_MAPPING = "megatron.bridge.models.conversion.param_mapping"
_OUR_MAPPINGS = "qwen3vl_bridge.weights.bridge_mappings"


class TensorSlice(NamedTuple):
    """A slice of `length` elements of a stored tensor. A Megatron parameter is a sequence of such slices."""

    tensor: str
    start: int
    length: int
    columns: int = 0  # if not 0, the elements are a matrix with this many columns, stored transposed
    stride: int = 1  # distance between the elements in the stored tensor
    # Only in the slices of a `TensorLayout`: the stored values are larger than the parameter's by this number.
    stored_offset: int = 0
    # Only in the slices of a conversion plan: the number that is added to the stored values when they are read.
    added: int = 0

    def cut(self, start: int, length: int) -> TensorSlice:
        """Return the part of this slice that has `length` elements and begins at element `start` of the slice."""
        return self._replace(start=self.start + start, length=length)


@dataclass(frozen=True)
class WeightRow:
    """Weight-table row: a Megatron parameter and its Hugging Face tensors. The class defines how to convert them.

    Names in a weight table have a `*` for each index of a layer or expert; `expand` replaces them by numbers.
    """

    # Class of Megatron-Bridge for rows of this kind, "module:class", called as mapping(megatron name, *hf names).
    # A name, because this module must not import Megatron.
    mapping: ClassVar[str] = f"{_PARAM_MAPPING}:AutoMapping"

    megatron: str  # Megatron parameter name, with Transformer Engine's layer spec
    hf: tuple[str, ...]  # names of its Hugging Face tensors, in the order of Megatron's parameter
    shapes: tuple[Shape, ...]  # shape of each Hugging Face tensor; strings are symbols of `Dimensions.sizes`
    # For each `*` of the Megatron name, its values: a key of `Dimensions.indices`. A Hugging Face name may have fewer.
    indices: tuple[str, ...] = ()
    condition: str | None = None  # symbol of `Dimensions.sizes`: the row exists only if its size is not 0
    replicated: bool = False  # every tensor-parallel rank has the full parameter, in a plain torch module
    float32: bool = False  # the parameter and its Megatron checkpoints are in float32 also in 16-bit models
    gated: bool = False  # the parameter is [gate; up], which are separate tensors in an fsdp_dtensor checkpoint
    # Sections of the parameter that are separate tensors in both Megatron checkpoint formats: the name of each, and its
    # size along dimension 0, a symbol of `Dimensions.sizes`.
    sections: tuple[tuple[str, str], ...] = ()
    # Set only in expanded rows: the numbers that have replaced each `*`, and the Megatron name with `*`.
    position: tuple[int, ...] = ()
    pattern: str = ""

    @property
    def stored_names(self) -> tuple[str, ...]:
        """Return the names of the tensors into which fsdp_dtensor checkpoints split the parameter along dimension 0."""
        if self.gated:
            return f"{self.megatron}_w", f"{self.megatron}_v"
        return tuple(f"{self.megatron}.{name}" for name, _ in self.sections) or (self.megatron,)

    @property
    def is_vocabulary(self) -> bool:
        """Return whether the parameter has one row per token of the vocabulary, which Megatron may pad."""
        return self.shapes[0][0] == "vocab"

    @property
    def expert(self) -> int:
        """Return the index of the expert. The weight-table row must be expanded and belong to an expert."""
        return self.position[self.indices.index("experts")]

    def bridge_mapping(self) -> str:
        """Return the Megatron-Bridge mapping class of this weight-table row as "module:class"."""
        if self.sections:
            return f"{_PARAM_MAPPING}:{'GDNLinearMappingSeparate' if len(self.hf) > 1 else 'GDNConv1dMapping'}"
        if self.is_vocabulary:
            return f"{_OUR_MAPPINGS}:VocabularyMapping"
        return f"{_PARAM_MAPPING}:ReplicatedMapping" if self.replicated else self.mapping

    def with_indices(self, *numbers: int) -> WeightRow:
        """Return the weight-table row with each `*` replaced by a number, from left to right."""

        def fill(name: str) -> str:
            for number in numbers:
                name = name.replace("*", str(number), 1)
            return name

        hf = tuple(fill(name) for name in self.hf)
        return replace(self, megatron=fill(self.megatron), hf=hf, position=numbers, pattern=self.megatron)

    def resolve(self, dimensions: Dimensions) -> WeightRow:
        """Return an expanded weight-table row with the names and shapes for a model of these dimensions.

        By default, return the row itself. Override this for names or shapes that depend on the model's dimensions.
        """
        return self

    def resolve_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Return `shapes` with sizes in place of symbols. A packed tensor has the shape of one expert in `shapes`."""
        return tuple(tuple(dimensions[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes)

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the Hugging Face tensors. A packed tensor has one index per expert in dimension 0."""
        return self.resolve_shapes(dimensions)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield slices of Hugging Face tensors that, concatenated, form the Megatron parameter in row-major order.

        The weight-table row must be expanded.
        """
        for name, shape in zip(self.hf, self.resolve_shapes(dimensions), strict=True):
            yield TensorSlice(name, 0, math.prod(shape))

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        """Return the shape of the Megatron parameter of an expanded weight-table row."""
        shapes = self.resolve_shapes(dimensions)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GatedMLP(WeightRow):
    """Weight-table row of two tensors, gate and up, which Megatron concatenates: [gate; up]."""

    mapping: ClassVar[str] = f"{_PARAM_MAPPING}:GatedMLPMapping"
    gated: bool = True


class QKV(WeightRow):
    """Weight-table row of the tensors q, k, v, which Megatron interleaves by query group.

    For each group, the parameter contains the q heads of the group, the k head and the v head.
    """

    mapping: ClassVar[str] = f"{_PARAM_MAPPING}:QKVMapping"

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield slices of q, k and v for each query group, see `WeightRow.hf_slices`."""
        head = dimensions["head_dim"] * math.prod(self.resolve_shapes(dimensions)[0][1:])
        queries = dimensions["heads"] // dimensions["kv_heads"] * head
        for group in range(dimensions["kv_heads"]):
            for name, length in zip(self.hf, (queries, head, head), strict=True):
                yield TensorSlice(name, group * length, length)


class ConcatenatedQKV(WeightRow):
    """Weight-table row of one tensor [q; k; v], which Megatron interleaves by head.

    The parameter contains [q, k, v of head 0], [q, k, v of head 1], and so on.
    """

    mapping: ClassVar[str] = f"{_PARAM_MAPPING}:ConcatenatedQKVMapping"

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield slices of q, k and v for each head, see `WeightRow.hf_slices`."""
        third = math.prod(self.resolve_shapes(dimensions)[0]) // 3
        head = third // dimensions["v_heads"]
        for number in range(dimensions["v_heads"]):
            for q_k_or_v in range(3):
                yield TensorSlice(self.hf[0], q_k_or_v * third + number * head, head)


class GatedQKV(WeightRow):
    """Weight-table row of q, k and v, where q contains the queries of each head, followed by the head's gate.

    Megatron interleaves the tensors by query group: for each group, all queries, all gates, the k head and the v head.
    """

    mapping: ClassVar[str] = f"{_PARAM_MAPPING}:QKVMapping"

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield slices of queries, gates, k and v for each query group, see `WeightRow.hf_slices`."""
        query, *others = self.hf
        heads = dimensions["heads"] // dimensions["kv_heads"]  # of a group
        head = dimensions["head_dim"] * math.prod(self.resolve_shapes(dimensions)[0][1:])
        for group in range(dimensions["kv_heads"]):
            for query_or_gate in range(2):
                for number in range(group * heads, (group + 1) * heads):
                    yield TensorSlice(query, (2 * number + query_or_gate) * head, head)
            for name in others:
                yield TensorSlice(name, group * head, head)


class ZeroCentered(WeightRow):
    """Weight-table row of a norm. Megatron's weight is smaller by one, because Megatron multiplies by 1 + weight.

    In float32 the subtraction is exact for weights of at least 0.5, and for bfloat16 weights of magnitude 2^-16 or
    more. Other results are rounded by up to 6e-8.
    """

    mapping: ClassVar[str] = f"{_OUR_MAPPINGS}:ZeroCenteredMapping"

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield the full tensor as one slice, with `stored_offset=1` because Megatron's values are smaller by one."""
        yield TensorSlice(self.hf[0], 0, math.prod(self.resolve_shapes(dimensions)[0]), stored_offset=1)


@dataclass(frozen=True)
class PackedExpert(WeightRow):
    """Weight-table row of one expert from a packed tensor, which contains all experts of a layer."""

    transposed: bool = False  # the tensor is input-major, [experts, in, out], unlike Megatron's [out, in]

    def bridge_mapping(self) -> str:
        """Return the mapping class of packed experts, see `WeightRow.bridge_mapping`."""
        kind = "GatedExpertMapping" if self.gated else "ExpertMapping"
        return f"{_OUR_MAPPINGS}:InputMajor{kind}" if self.transposed else f"{_PARAM_MAPPING}:Fused{kind}"

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Return the shape of the packed tensor, [experts, ...]."""
        return ((dimensions["experts"], *self.resolve_shapes(dimensions)[0]),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[TensorSlice]:
        """Yield the slice of one expert in the packed tensor, see `WeightRow.hf_slices`."""
        shape = self.resolve_shapes(dimensions)[0]
        size = math.prod(shape)
        yield TensorSlice(self.hf[0], self.expert * size, size, columns=shape[0] if self.transposed else 0)

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        """Return the shape of one expert's Megatron parameter, [out, in]."""
        shape = self.resolve_shapes(dimensions)[0]
        return shape[::-1] if self.transposed else shape


def stored_sizes(row: WeightRow, height: int, dimensions: Dimensions) -> tuple[int, ...]:
    """Return the number of rows of each tensor in `row.stored_names`. The parameter has `height` rows."""
    if row.sections:
        return tuple(dimensions[size] for _, size in row.sections)
    return (height // len(row.stored_names),) * len(row.stored_names)


def expand(rows: tuple[WeightRow, ...], dimensions: Dimensions) -> Iterator[WeightRow]:
    """Yield one expanded weight-table row per Megatron parameter of a model.

    Layer and expert indices replace each `*`. Rows with a condition that the model does not meet are omitted.
    """
    for row in rows:
        if row.condition is None or dimensions[row.condition]:
            for numbers in itertools.product(*(dimensions.indices[name] for name in row.indices)):
                yield row.with_indices(*numbers).resolve(dimensions)


def parameter_count(rows: tuple[WeightRow, ...], dimensions: Dimensions) -> int:
    """Return the number of parameters of a model, without building it."""
    return sum(math.prod(row.megatron_shape(dimensions)) for row in expand(rows, dimensions))


class ExpertLayout(Enum):
    """Format in which a Hugging Face checkpoint stores experts."""

    INPUT_MAJOR = "packed [experts, in, out]"  # released Qwen3-VL
    OUTPUT_MAJOR = "packed [experts, out, in]"  # a model saved by transformers 5
    PER_EXPERT = "one tensor per expert"
    OUTPUT_MAJOR_MTP_PER_EXPERT = "packed [experts, out, in], one tensor per expert of multi-token prediction"


def detect_expert_layout(
    table: Callable[[ExpertLayout], Sequence[WeightRow]], shapes: Mapping[str, Sequence[int]], dimensions: Dimensions
) -> ExpertLayout:
    """Return the expert layout of a checkpoint.

    Args:
        table: function that returns the weight table for an expert layout.
        shapes: Hugging Face name -> shape, for the tensors of the first MoE layer and of multi-token prediction.

    Raises:
        ValueError: the tensors have an unknown expert layout.
    """
    layer = dimensions.indices["moe_layers"][0]
    names: list[str] = []
    for layout in ExpertLayout:
        expected: dict[str, tuple[int, ...]] = {}
        for row in table(layout):
            if "experts" not in row.indices or (row.condition is not None and not dimensions[row.condition]):
                continue
            for expert in dimensions.indices["experts"]:
                expanded = row.with_indices(*(expert if index == "experts" else layer for index in row.indices))
                expected.update(zip(expanded.hf, expanded.hf_shapes(dimensions), strict=True))
        if all(tuple(shapes.get(name, ())) == shape for name, shape in expected.items()):
            return layout
        names += expected
    prefix = names[0].rpartition(".")[0] + "."  # of a packed tensor
    given = sorted((name, list(shape)) for name, shape in shapes.items() if name.startswith(prefix))
    raise ValueError(
        f"experts of layer {layer}: found {given[:4] or 'no tensors'}, expected {dimensions['experts']} experts of "
        f"{dimensions['hidden']} x {dimensions['moe_ffn']}, as {' or '.join(layout.value for layout in ExpertLayout)}"
    )


OUTPUT_LAYER = "language_model.output_layer"
# Megatron-Bridge names the parameters of an adapter by the layer, ADAPTER_MARK, and one of the three suffixes.
ADAPTER_MARK = ".adapter."
LINEAR_IN, LINEAR_OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"

# If a layer spec has no fused norm-and-linear module, norms are separate modules. If it has no grouped experts, each
# expert is a separate module.
_LOCAL_NAMES = (
    (r"self_attention\.(linear_qkv|in_proj)\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+|\*)", r"mlp.experts.local_experts.\2.\1.weight"),
)


def local_name(name: str) -> str:
    """Convert a parameter name from Transformer Engine's layer spec to megatron-core's local layer spec."""
    for pattern, instead in _LOCAL_NAMES:
        name = re.sub(pattern, instead, name)
    return name


_ONE_EXPERT = re.compile(r"(?<=\.mlp\.experts)\.local_experts\.\d+(?=\.)")


def is_expert_layer(layer: str) -> bool:
    """Return whether a linear layer belongs to experts, by its name in either layer spec."""
    return ".mlp.experts." in layer


def is_mtp(name: str) -> bool:
    """Return whether a Megatron module or parameter belongs to multi-token prediction."""
    return ".mtp." in name


def shared_name(layer: str) -> str:
    """Return the name of a linear layer without ".local_experts.N", which is the same name for all experts."""
    return _ONE_EXPERT.sub("", layer)


# torch_dist checkpoints stack the tensors of layers and experts, so that an index becomes a dimension of a tensor.
_KINDS_OF_TEXT_LAYERS = ("dense_layers", "moe_layers", "linear_layers", "full_layers")
_STACKED: Mapping[str, str] = dict.fromkeys(_KINDS_OF_TEXT_LAYERS, "text_layers")
# These indices stay in the name if layers of one stack differ, as in a model with dense and MoE layers.
NAMED_IF_MIXED = ("text_layers", *_KINDS_OF_TEXT_LAYERS, "ple_layers", "ngram_heads")


def with_former_mtp_name(name: str) -> str:
    """Return a parameter's name with `transformer_layer` (its former name) in place of `mtp_model_layer`.

    megatron-core stores the former name: in `torch_dist`, and since 0.20 in `fsdp_dtensor` too
    (`fsdp_dtensor_checkpoint.handle_mtp_in_state_dict`).
    """
    return name.replace(".mtp_model_layer.", ".transformer_layer.")


def without_former_mtp_name(name: str) -> str:
    """Return a stored name with `mtp_model_layer` in place of `transformer_layer`; inverts `with_former_mtp_name`."""
    return re.sub(r"(\bmtp\.layers\.\d+)\.transformer_layer\.", r"\1.mtp_model_layer.", name)


def stacked_name(
    row: WeightRow, dimensions: Dimensions, named: Collection[str] = (), *, local: bool = False
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the name of the `torch_dist` tensor that contains the parameter of an expanded weight-table row.

    Source: megatron-core 0.19, `sharded_state_dict` of TransformerBlock, SequentialMLP and TEGroupedMLP.

    Args:
        row: the weight-table row.
        dimensions: dimensions of the model.
        named: keys of `Dimensions.indices` for the indices that stay in the name instead of being stacked.
        local: whether the checkpoint was saved with megatron-core's own local layer spec. That spec renames all norms
            as if they were fused. Our spec does not rename the norm before experts, because no spec fuses that norm.

    Returns:
        The name, and for each stacked dimension a pair: the index of the parameter, and the size of the dimension.
    """
    name = re.sub(r"mlp\.experts\.(local_experts\.)?", "mlp.experts.experts.", row.pattern)
    name = with_former_mtp_name(name)
    if local:
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    stacked = []
    for index, number in zip(row.indices, row.position, strict=True):
        if index in named:
            name = name.replace("*", str(number), 1)
        else:
            name = re.sub(r"\.?\*", "", name, count=1)
            stacked.append((number, len(dimensions.indices[_STACKED.get(index, index)])))
    return name, tuple(stacked)


class Component(Enum):
    """A component of the model that can be frozen by a flag `freeze_<component>`."""

    LANGUAGE_MODEL = "language_model"
    VISION_MODEL = "vision_model"  # without the patch mergers
    VISION_PROJECTION = "vision_projection"  # the patch mergers: the main merger and DeepStack's


_WRAPPERS = ("module.", "_teacher_model.")
# `_loss_modules` are ModelOpt's distillation losses, which have parameters that fit hidden states to the teacher's.
_OF_LANGUAGE = ("language_model.", "embedding.", "decoder.", "output_layer.", "mtp.", "_loss_modules.")


def component_of(name: str) -> Component:
    """Return the component of a parameter or linear layer.

    Args:
        name: name in the model or in the language model alone, also with the prefixes of wrappers such as DDP or
            ModelOpt's distillation.

    Raises:
        ValueError: the name does not belong to this model.
    """
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    if name.startswith(_OF_LANGUAGE):
        return Component.LANGUAGE_MODEL
    if not name.startswith("vision_model."):
        raise ValueError(f"found the parameter {name}, expected a name in language_model or vision_model")
    is_merger = name.startswith(("vision_model.merger.", "vision_model.decoder.deepstack_merger_list."))
    return Component.VISION_PROJECTION if is_merger else Component.VISION_MODEL


def single_row(megatron: str, hf: str, *shape: str | int, indices: tuple[str, ...] = (), **more: Any) -> WeightRow:
    """Return the weight-table row for a Hugging Face tensor of shape `shape` that Megatron stores unchanged.

    `more` contains further fields of `WeightRow`.
    """
    return WeightRow(megatron, (hf,), (shape,), indices, **more)


def weight_and_bias_rows(
    megatron: str, hf: str, weight: Shape, *, indices: tuple[str, ...] = (), replicated: bool = False
) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of a module's weight, with shape `weight`, and bias, with shape `weight[:1]`."""
    return tuple(
        single_row(f"{megatron}.{suffix}", f"{hf}.{suffix}", *shape, indices=indices, replicated=replicated)
        for suffix, shape in (("weight", weight), ("bias", weight[:1]))
    )


def merger_rows(megatron: str, hf: str, norm: str, indices: tuple[str, ...] = ()) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of a patch merger: a norm of size `norm` (a symbol) and two linear layers."""
    return (
        *weight_and_bias_rows(f"{megatron}.patch_norm", f"{hf}.norm", (norm,), indices=indices),
        *weight_and_bias_rows(f"{megatron}.linear_fc1", f"{hf}.linear_fc1", ("v_merged", "v_merged"), indices=indices),
        *weight_and_bias_rows(f"{megatron}.linear_fc2", f"{hf}.linear_fc2", ("hidden", "v_merged"), indices=indices),
    )


_PATCH = ("v_hidden", "v_channels", "v_temporal_patch", "v_patch", "v_patch")
_TOWER, _HF_TOWER = "vision_model.decoder.layers.*.", "model.visual.blocks.*."
VISION_ROWS: tuple[WeightRow, ...] = (
    *weight_and_bias_rows("vision_model.patch_embed.proj", "model.visual.patch_embed.proj", _PATCH, replicated=True),
    single_row(
        "vision_model.pos_embed.weight", "model.visual.pos_embed.weight", "v_positions", "v_hidden", replicated=True
    ),
    *(
        kind(f"{_TOWER}{megatron}{part}", (f"{_HF_TOWER}{hf}.{part}",), (shape,), ("vision_layers",))
        for kind, megatron, hf, weight in (
            (WeightRow, "self_attention.linear_qkv.layer_norm_", "norm1", ("v_hidden",)),
            (ConcatenatedQKV, "self_attention.linear_qkv.", "attn.qkv", ("v_qkv", "v_hidden")),
            (WeightRow, "self_attention.linear_proj.", "attn.proj", ("v_hidden", "v_hidden")),
            (WeightRow, "mlp.linear_fc1.layer_norm_", "norm2", ("v_hidden",)),
            (WeightRow, "mlp.linear_fc1.", "mlp.linear_fc1", ("v_ffn", "v_hidden")),
            (WeightRow, "mlp.linear_fc2.", "mlp.linear_fc2", ("v_hidden", "v_ffn")),
        )
        for part, shape in (("weight", weight), ("bias", weight[:1]))
    ),
    *merger_rows("vision_model.merger", "model.visual.merger", "v_hidden"),
)


def text_rows(*layers: WeightRow) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of a text model: embedding, `layers`, final norm and output layer."""
    embedding = "language_model.embedding.word_embeddings.weight"
    return (
        single_row(embedding, "model.language_model.embed_tokens.weight", "vocab", "hidden"),
        *layers,
        single_row("language_model.decoder.final_layernorm.weight", "model.language_model.norm.weight", "hidden"),
        single_row(f"{OUTPUT_LAYER}.weight", "lm_head.weight", "vocab", "hidden", condition="untied"),
    )


def attention_rows(
    megatron: str, hf: str, *indices: str, kind: type[WeightRow] = QKV, queries: str = "q"
) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of attention: the norm before it, q, k and v, their norms and the output.

    Args:
        megatron, hf: prefixes of the parameter names of a layer, with a `*` for each index and a dot at the end.
        indices: for each `*`, the key of `Dimensions.indices` with its values.
        kind: the class of the weight-table row of q, k and v.
        queries: symbol of the output size of `q_proj`, such as "q".
    """

    def copy(name: str, other: str, *shape: str) -> WeightRow:
        return single_row(f"{megatron}self_attention.{name}", f"{hf}{other}.weight", *shape, indices=indices)

    return (
        copy("linear_qkv.layer_norm_weight", "input_layernorm", "hidden"),
        kind(
            f"{megatron}self_attention.linear_qkv.weight",
            tuple(f"{hf}self_attn.{name}_proj.weight" for name in "qkv"),
            ((queries, "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            indices,
        ),
        copy("q_layernorm.weight", "self_attn.q_norm", "head_dim"),
        copy("k_layernorm.weight", "self_attn.k_norm", "head_dim"),
        copy("linear_proj.weight", "self_attn.o_proj", "hidden", "q"),
    )


def dense_mlp_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of an MLP and the norm before it. See `attention_rows` for the arguments."""
    fc1, norm, half = f"{megatron}mlp.linear_fc1.", f"{hf}post_attention_layernorm.weight", ("ffn", "hidden")
    gate_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    return (
        single_row(f"{fc1}layer_norm_weight", norm, "hidden", indices=indices),
        GatedMLP(f"{fc1}weight", gate_up, (half, half), indices),
        single_row(f"{megatron}mlp.linear_fc2.weight", f"{hf}mlp.down_proj.weight", "hidden", "ffn", indices=indices),
    )


def moe_rows(megatron: str, hf: str, *indices: str, experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Return the weight-table rows of a MoE layer: the norm before it, the router and the experts.

    `experts` is the expert layout of the Hugging Face model. The other arguments are as in `attention_rows`.
    """
    norm = f"{hf}post_attention_layernorm.weight"
    before = (
        single_row(f"{megatron}pre_mlp_layernorm.weight", norm, "hidden", indices=indices),
        single_row(f"{megatron}mlp.router.weight", f"{hf}mlp.gate.weight", "experts", "hidden", indices=indices),
    )
    fc1, fc2 = (f"{megatron}mlp.experts.linear_{name}.weight*" for name in ("fc1", "fc2"))
    hf, each = f"{hf}mlp.experts.", (*indices, "experts")
    gate_up, down = ("moe_gate_up", "hidden"), ("hidden", "moe_ffn")
    if experts is ExpertLayout.PER_EXPERT:
        half = ("moe_ffn", "hidden")
        return (
            *before,
            GatedMLP(fc1, (f"{hf}*.gate_proj.weight", f"{hf}*.up_proj.weight"), (half, half), each),
            WeightRow(fc2, (f"{hf}*.down_proj.weight",), (down,), each),
        )
    transposed = experts is ExpertLayout.INPUT_MAJOR
    if transposed:
        gate_up, down = gate_up[::-1], down[::-1]
    return (
        *before,
        PackedExpert(fc1, (f"{hf}gate_up_proj",), (gate_up,), each, transposed=transposed, gated=True),
        PackedExpert(fc2, (f"{hf}down_proj",), (down,), each, transposed=transposed),
    )

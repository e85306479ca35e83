"""The weight table's rows: which Hugging Face tensors a Megatron parameter is made of, their names and shapes; and the
rows that families share: the vision tower's, a text layer's MLP, the experts of a layer.

Standard library only.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Dimensions:
    """Values of the weight table's symbols for one model; `dimensions[name]` is one of the sizes."""

    sizes: Mapping[str, int]  # by name, those in the rows' shapes, conditions (0 or 1) and counts of heads
    indices: Mapping[str, Sequence[int]]  # by name, the values of a `*`
    family: str  # whose table it is, a name that `registry.family` knows

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def with_vocab(self, rows: int) -> Dimensions:
        """The same with a vocabulary of this many rows."""
        return replace(self, sizes={**self.sizes, "vocab": rows})


def vision_sizes(vision: Mapping) -> dict[str, int]:
    """Sizes of the vision tower, from only its configuration."""
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


class ParamSlice(NamedTuple):
    """Position of consecutive elements of a Megatron parameter: elements [start, start + length) of a tensor.

    If `columns` is not 0 they are a matrix with this many columns, stored transposed. If `stride` is not 1, they are
    that far apart. The stored values are `plus` more than the elements.
    """

    tensor: str
    start: int
    length: int
    columns: int = 0
    stride: int = 1
    plus: int = 0


@dataclass(frozen=True)
class WeightRow:
    """One Megatron parameter and its Hugging Face tensors.

    The class of a row is its transformation, which `hf_slices` defines for files and adapters, and for weights that
    ranks share a class of Megatron-Bridge (`weights/bridge_mappings.py`). A row of this class itself is one tensor that
    is the same on both sides, or several that Megatron concatenates.
    """

    megatron: str  # Megatron parameter name, with Transformer Engine's layer spec
    hf: tuple[str, ...]  # names of its Hugging Face tensors, in the order of Megatron's parameter
    shapes: tuple[Shape, ...]  # shape of each Hugging Face tensor; a string names a size of `Dimensions`
    # What each `*` counts, entries of `Dimensions.indices`. A Hugging Face name may have fewer of them.
    indices: tuple[str, ...] = ()
    condition: str | None = None  # key of `dimensions` that must be true for the row to exist, or None
    replicated: bool = False  # the parameter is a plain torch one, whole on every tensor-parallel rank
    float32: bool = False  # the parameter is in float32 in models of 16 bits too, and in Megatron's checkpoints of them
    gated: bool = False  # it is the gate and the up projection, concatenated; separate in an fsdp_dtensor checkpoint
    # Sections of the parameter that are separate in a checkpoint of either Megatron format: the name of each, and its
    # size along dimension 0, an entry of `Dimensions`.
    sections: tuple[tuple[str, str], ...] = ()
    position: tuple[int, ...] = ()  # the numbers that replace the `*`, in an expanded row
    pattern: str = ""  # the Megatron parameter name as in the table, in an expanded row

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the tensors as which an fsdp_dtensor checkpoint stores the parameter, in parts of dimension 0."""
        if self.gated:
            return f"{self.megatron}_w", f"{self.megatron}_v"
        return tuple(f"{self.megatron}.{name}" for name, _ in self.sections) or (self.megatron,)

    @property
    def of_vocabulary(self) -> bool:
        """Whether the parameter has a row for each token, so that Megatron may pad it."""
        return self.shapes[0][0] == "vocab"

    @property
    def expert(self) -> int:
        """Index of an expanded row's expert, for rows of experts."""
        return self.position[self.indices.index("experts")]

    def at(self, *numbers: int) -> WeightRow:
        """This row with its `*` replaced by `numbers`, from left to right, on both sides."""
        hf = tuple(_fill(name, numbers) for name in self.hf)
        return replace(self, megatron=_fill(self.megatron, numbers), hf=hf, position=numbers, pattern=self.megatron)

    def numbers(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Shapes of the Hugging Face tensors as numbers; for a packed tensor, those of the row's expert."""
        return tuple(tuple(dimensions[d] if isinstance(d, str) else d for d in shape) for shape in self.shapes)

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """Shapes of the whole Hugging Face tensors: some have all experts, where `numbers` gives one's part."""
        return self.numbers(dimensions)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """Positions in the Hugging Face tensors of an expanded row's parameter, in the parameter's row-major order."""
        for name, shape in zip(self.hf, self.numbers(dimensions), strict=True):
            yield ParamSlice(name, 0, math.prod(shape))

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        """Shape of an expanded row's Megatron parameter."""
        shapes = self.numbers(dimensions)
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])


@dataclass(frozen=True)
class GatedMLP(WeightRow):
    """Two tensors gate, up; Megatron concatenates them [gate; up]."""

    gated: bool = True


class QKV(WeightRow):
    """Three tensors q, k, v; Megatron interleaves them by query group: [q heads of the group, its k, its v] ..."""

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """See `WeightRow`."""
        head = dimensions["head_dim"] * math.prod(self.numbers(dimensions)[0][1:])
        queries = dimensions["heads"] // dimensions["kv_heads"] * head
        for group in range(dimensions["kv_heads"]):
            for name, length in zip(self.hf, (queries, head, head), strict=True):
                yield ParamSlice(name, group * length, length)


class ConcatenatedQKV(WeightRow):
    """One tensor [q; k; v]; Megatron interleaves it by head: [q, k, v of head 0], [q, k, v of head 1] ..."""

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """See `WeightRow`."""
        third = math.prod(self.numbers(dimensions)[0]) // 3
        head = third // dimensions["v_heads"]
        for number in range(dimensions["v_heads"]):
            for part in range(3):
                yield ParamSlice(self.hf[0], part * third + number * head, head)


class GatedQKV(WeightRow):
    """Three tensors q, k, v, where q has each head's queries and then its output gate.

    Megatron interleaves them by query group: [queries of its heads, their gates, its k, its v] ...
    """

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """See `WeightRow`."""
        query, *others = self.hf
        heads = dimensions["heads"] // dimensions["kv_heads"]  # of a group
        head = dimensions["head_dim"] * math.prod(self.numbers(dimensions)[0][1:])
        for group in range(dimensions["kv_heads"]):
            for part in range(2):  # queries, gates
                for number in range(group * heads, (group + 1) * heads):
                    yield ParamSlice(query, (2 * number + part) * head, head)
            for name in others:
                yield ParamSlice(name, group * head, head)


class ZeroCentered(WeightRow):
    """One tensor; Megatron's is less by one, because its norms multiply by 1 + weight.

    In float32 that is exact for weights of at least 0.5, and for those of bfloat16 from 2^-16 in magnitude; others are
    rounded by up to 6e-8.
    """

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """See `WeightRow`."""
        yield ParamSlice(self.hf[0], 0, math.prod(self.numbers(dimensions)[0]), plus=1)


@dataclass(frozen=True)
class PackedExpert(WeightRow):
    """One expert of a tensor that has all experts of a layer, [experts, ...]."""

    transposed: bool = False  # the tensor is input-major, [experts, in, out], unlike Megatron's [out, in]

    def hf_shapes(self, dimensions: Dimensions) -> tuple[tuple[int, ...], ...]:
        """See `WeightRow`."""
        return ((dimensions["experts"], *self.numbers(dimensions)[0]),)

    def hf_slices(self, dimensions: Dimensions) -> Iterator[ParamSlice]:
        """See `WeightRow`."""
        shape = self.numbers(dimensions)[0]
        size = math.prod(shape)
        yield ParamSlice(self.hf[0], self.expert * size, size, columns=shape[0] if self.transposed else 0)

    def megatron_shape(self, dimensions: Dimensions) -> tuple[int, ...]:
        """See `WeightRow`."""
        shape = self.numbers(dimensions)[0]
        return shape[::-1] if self.transposed else shape


def stored_rows(row: WeightRow, rows: int, dimensions: Dimensions) -> tuple[int, ...]:
    """Number of a parameter's rows in each of `WeightRow.stored`: its section's, or equal parts."""
    return tuple(dimensions[size] for _, size in row.sections) or (rows // len(row.stored),) * len(row.stored)


def _fill(name: str, numbers: Sequence[int]) -> str:
    for number in numbers:
        name = name.replace("*", str(number), 1)
    return name


def expand(rows: tuple[WeightRow, ...], dimensions: Dimensions) -> Iterator[WeightRow]:
    """The rows of a model of these dimensions, one per Megatron parameter, without any `*`."""
    for row in rows:
        if row.condition is None or dimensions[row.condition]:
            for numbers in itertools.product(*(dimensions.indices[name] for name in row.indices)):
                yield row.at(*numbers)


def parameter_count(rows: tuple[WeightRow, ...], dimensions: Dimensions) -> int:
    """Number of parameters of a model of these dimensions, without building it."""
    return sum(math.prod(shape) for row in expand(rows, dimensions) for shape in row.numbers(dimensions))


class ExpertLayout(Enum):
    """Format of the experts of a layer in a Hugging Face checkpoint."""

    INPUT_MAJOR = "packed [experts, in, out]"  # released Qwen3-VL
    OUTPUT_MAJOR = "packed [experts, out, in]"  # a model saved by transformers 5
    PER_EXPERT = "one tensor per expert"
    OUTPUT_MAJOR_MTP_PER_EXPERT = "packed [experts, out, in], one tensor per expert of multi-token prediction"


def expert_layout_of(
    table: Callable[[ExpertLayout], Sequence[WeightRow]], shapes: Mapping[str, Sequence[int]], dimensions: Dimensions
) -> ExpertLayout:
    """The format of a checkpoint's experts, from the shapes of the tensors of its first MoE layer and of multi-token
    prediction, by Hugging Face name; `table` gives the rows of a checkpoint in a format.

    No model is ambiguous: if one tensor's two orientations have the same shape, the other's have not.

    Raises:
        ValueError: an unknown format.
    """
    layer = dimensions.indices["moe_layers"][0]
    names: list[str] = []
    for layout in ExpertLayout:
        expected: dict[str, tuple[int, ...]] = {}
        for row in table(layout):
            if "experts" not in row.indices or (row.condition is not None and not dimensions[row.condition]):
                continue
            for expert in dimensions.indices["experts"]:
                expanded = row.at(*(expert if index == "experts" else layer for index in row.indices))
                expected.update(zip(expanded.hf, expanded.hf_shapes(dimensions), strict=True))
        if all(tuple(shapes.get(name, ())) == shape for name, shape in expected.items()):
            return layout
        names += expected
    prefix = names[0].rpartition(".")[0] + "."  # of a packed tensor
    given = sorted((name, list(shape)) for name, shape in shapes.items() if name.startswith(prefix))
    raise ValueError(
        f"experts of layer {layer}: found {given[:4] or 'no tensors'}, expected {dimensions['experts']} experts of "
        f"{dimensions['hidden']} x {dimensions['moe_ffn']}, {' or '.join(layout.value for layout in ExpertLayout)}"
    )


OUTPUT_LAYER = "language_model.output_layer"
# Megatron-Bridge's names of an adapter's parameters: `layer`, MARK, and one of the three.
MARK = ".adapter."
IN, OUT, MAGNITUDE = "linear_in.weight", "linear_out.weight", "weight_magnitude"

# If a layer spec has no fused norm-and-linear module, its norms are separate modules; if it has no grouped experts,
# each expert is.
_LOCAL_NAMES = (
    (r"self_attention\.(linear_qkv|in_proj)\.layer_norm_", "input_layernorm."),
    (r"mlp\.linear_fc1\.layer_norm_", "pre_mlp_layernorm."),
    (r"mlp\.experts\.(linear_fc[12])\.weight(\d+|\*)", r"mlp.experts.local_experts.\2.\1.weight"),
)


def local_name(name: str) -> str:
    """The local layer spec's name of a parameter given with Transformer Engine's name."""
    for pattern, instead in _LOCAL_NAMES:
        name = re.sub(pattern, instead, name)
    return name


_ONE_EXPERT = re.compile(r"(?<=\.mlp\.experts)\.local_experts\.\d+(?=\.)")


def is_of_experts(layer: str) -> bool:
    """Whether a linear layer, by its name in either layer spec, is of experts."""
    return ".mlp.experts." in layer


def is_of_mtp(name: str) -> bool:
    """Whether a Megatron module or parameter is of multi-token prediction."""
    return ".mtp." in name


def shared_name(layer: str) -> str:
    """A linear layer's name as shared by all experts of its layer; any other layer's own name."""
    return _ONE_EXPERT.sub("", layer)


# Indices that megatron-core's own format turns into dimensions of a tensor.
_KINDS_OF_TEXT_LAYERS = ("dense_layers", "moe_layers", "linear_layers", "full_layers")
_STACKED: Mapping[str, str] = dict.fromkeys(_KINDS_OF_TEXT_LAYERS, "text_layers")
# They stay in the name if layers of one stack differ, like the layers of a model with dense and MoE layers.
NAMED_IF_MIXED = ("text_layers", *_KINDS_OF_TEXT_LAYERS)


def stacked_name(
    row: WeightRow, dimensions: Dimensions, named: Collection[str] = (), *, local: bool = False
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Name in megatron-core's own format, `torch_dist`, of the tensor that an expanded row is a part of.

    Source: megatron-core 0.19, `sharded_state_dict` of TransformerBlock, SequentialMLP and TEGroupedMLP.

    Indices in `named` stay in the name. `local` is whether it was saved with megatron-core's own local layer spec. That
    renames norms as if they were all fused, because the norm before experts is in no spec; ours does not rename that
    one. Returns the name, and for each dimension in front of the parameter's own: the row's index in it, and its size.
    """
    name = re.sub(r"mlp\.experts\.(local_experts\.)?", "mlp.experts.experts.", row.pattern)
    name = name.replace(".mtp_model_layer.", ".transformer_layer.")  # its earlier name in megatron-core
    name = name.replace("weight*", "weight.*")
    if local:
        name = name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    stacked = []
    for index, number in zip(row.indices, row.position, strict=True):
        if index in named:
            name = name.replace("*", str(number), 1)
        else:
            name = name.replace(".*", "", 1)
            stacked.append((number, len(dimensions.indices[_STACKED.get(index, index)])))
    return name, tuple(stacked)


class Part(Enum):
    """As in the names of the freeze flags."""

    LANGUAGE_MODEL = "language_model"
    VISION_MODEL = "vision_model"  # without the mergers
    VISION_PROJECTION = "vision_projection"  # the mergers, main and DeepStack


_WRAPPERS = ("module.", "_teacher_model.")
# Of a student, ModelOpt's losses have parameters too: they fit its hidden states to its teacher's.
_OF_LANGUAGE = ("language_model.", "embedding.", "decoder.", "output_layer.", "mtp.", "_loss_modules.")


def part_of(name: str) -> Part:
    """The part of a parameter or a linear layer, by its name in the model, its language model alone or a wrapper, such
    as a student's of its teacher; a ValueError if it is not of this model.
    """
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    if name.startswith(_OF_LANGUAGE):
        return Part.LANGUAGE_MODEL
    if not name.startswith("vision_model."):
        raise ValueError(f"found the parameter {name}, expected one of language_model or vision_model")
    is_merger = name.startswith(("vision_model.merger.", "vision_model.decoder.deepstack_merger_list."))
    return Part.VISION_PROJECTION if is_merger else Part.VISION_MODEL


def copied(megatron: str, hf: str, *shape: str | int, indices: tuple[str, ...] = (), **more: Any) -> WeightRow:
    """The row of one tensor of this shape."""
    return WeightRow(megatron, (hf,), (shape,), indices, **more)


def affine(
    megatron: str, hf: str, weight: Shape, *, indices: tuple[str, ...] = (), replicated: bool = False
) -> tuple[WeightRow, ...]:
    """Rows of a module with a weight and a bias as long as the weight's first dimension."""
    return tuple(
        copied(f"{megatron}.{suffix}", f"{hf}.{suffix}", *shape, indices=indices, replicated=replicated)
        for suffix, shape in (("weight", weight), ("bias", weight[:1]))
    )


def merger_rows(megatron: str, hf: str, norm: str, indices: tuple[str, ...] = ()) -> tuple[WeightRow, ...]:
    """Rows of a patch merger: a norm, and two linear layers with a GELU between."""
    return (
        *affine(f"{megatron}.patch_norm", f"{hf}.norm", (norm,), indices=indices),
        *affine(f"{megatron}.linear_fc1", f"{hf}.linear_fc1", ("v_merged", "v_merged"), indices=indices),
        *affine(f"{megatron}.linear_fc2", f"{hf}.linear_fc2", ("hidden", "v_merged"), indices=indices),
    )


_PATCH = ("v_hidden", "v_channels", "v_temporal_patch", "v_patch", "v_patch")
_TOWER, _HF_TOWER = "vision_model.decoder.layers.*.", "model.visual.blocks.*."
VISION_ROWS: tuple[WeightRow, ...] = (
    *affine("vision_model.patch_embed.proj", "model.visual.patch_embed.proj", _PATCH, replicated=True),
    copied(
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
    """Rows of a text model with these layers: the embedding before them, the final norm and the output layer after."""
    embedding = "language_model.embedding.word_embeddings.weight"
    return (
        copied(embedding, "model.language_model.embed_tokens.weight", "vocab", "hidden"),
        *layers,
        copied("language_model.decoder.final_layernorm.weight", "model.language_model.norm.weight", "hidden"),
        copied(f"{OUTPUT_LAYER}.weight", "lm_head.weight", "vocab", "hidden", condition="untied"),
    )


def attention_rows(
    megatron: str, hf: str, *indices: str, kind: type[WeightRow] = QKV, queries: str = "q"
) -> tuple[WeightRow, ...]:
    """Rows of attention with normalized heads and of the norm before it, named as in `dense_mlp_rows`.

    `kind` is the row of q, k and v, and `queries` the size of its first tensor.
    """

    def copy(name: str, other: str, *shape: str) -> WeightRow:
        return copied(f"{megatron}self_attention.{name}", f"{hf}{other}.weight", *shape, indices=indices)

    return (
        copy("linear_qkv.layer_norm_weight", "input_layernorm", "hidden"),
        kind(
            f"{megatron}self_attention.linear_qkv.weight",
            tuple(f"{hf}self_attn.{part}_proj.weight" for part in "qkv"),
            ((queries, "hidden"), ("kv", "hidden"), ("kv", "hidden")),
            indices,
        ),
        copy("q_layernorm.weight", "self_attn.q_norm", "head_dim"),
        copy("k_layernorm.weight", "self_attn.k_norm", "head_dim"),
        copy("linear_proj.weight", "self_attn.o_proj", "hidden", "q"),
    )


def dense_mlp_rows(megatron: str, hf: str, *indices: str) -> tuple[WeightRow, ...]:
    """Rows of an MLP and the norm before it, of layers with these names: a `*` for each index, a point at the end."""
    fc1, norm, half = f"{megatron}mlp.linear_fc1.", f"{hf}post_attention_layernorm.weight", ("ffn", "hidden")
    gate_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
    return (
        copied(f"{fc1}layer_norm_weight", norm, "hidden", indices=indices),
        GatedMLP(f"{fc1}weight", gate_up, (half, half), indices),
        copied(f"{megatron}mlp.linear_fc2.weight", f"{hf}mlp.down_proj.weight", "hidden", "ffn", indices=indices),
    )


def moe_rows(megatron: str, hf: str, *indices: str, experts: ExpertLayout) -> tuple[WeightRow, ...]:
    """Rows of a router, its experts in this format, and the norm before them; otherwise as `dense_mlp_rows`."""
    norm = f"{hf}post_attention_layernorm.weight"
    return (
        copied(f"{megatron}pre_mlp_layernorm.weight", norm, "hidden", indices=indices),
        copied(f"{megatron}mlp.router.weight", f"{hf}mlp.gate.weight", "experts", "hidden", indices=indices),
        *_expert_rows(megatron, hf, indices, experts),
    )


def _expert_rows(megatron: str, hf: str, indices: tuple[str, ...], experts: ExpertLayout) -> tuple[WeightRow, ...]:
    fc1, fc2 = (f"{megatron}mlp.experts.linear_{part}.weight*" for part in ("fc1", "fc2"))
    hf, each = f"{hf}mlp.experts.", (*indices, "experts")
    gate_up, down = ("moe_gate_up", "hidden"), ("hidden", "moe_ffn")
    if experts is ExpertLayout.PER_EXPERT:
        half = ("moe_ffn", "hidden")
        return (
            GatedMLP(fc1, (f"{hf}*.gate_proj.weight", f"{hf}*.up_proj.weight"), (half, half), each),
            WeightRow(fc2, (f"{hf}*.down_proj.weight",), (down,), each),
        )
    turned = experts is ExpertLayout.INPUT_MAJOR
    if turned:
        gate_up, down = gate_up[::-1], down[::-1]
    return (
        PackedExpert(fc1, (f"{hf}gate_up_proj",), (gate_up,), each, transposed=turned, gated=True),
        PackedExpert(fc2, (f"{hf}down_proj",), (down,), each, transposed=turned),
    )

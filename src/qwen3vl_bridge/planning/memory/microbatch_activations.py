"""Bytes that one microbatch stores in one part of the pipeline, and temporary memory while a layer is computed.

What lives here: counts of layers, tokens and patches, recomputation of whole layers. Standard library only. What may
not: activations of a layer (`language_activations.py`, `vision_activations.py`), the number of microbatches
(`in_flight_microbatches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from qwen3vl_bridge.planning.memory import language_activations as kept
from qwen3vl_bridge.planning.memory import vision_activations
from qwen3vl_bridge.planning.memory.language_activations import SavedTensor
from qwen3vl_bridge.planning.memory.linear_attention_activations import linear_attention, linear_attention_passing
from qwen3vl_bridge.planning.memory.parameters import kinds_of_layers
from qwen3vl_bridge.planning.settings import Recompute, Training
from qwen3vl_bridge.planning.split import Chunk, Split
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part


@dataclass(frozen=True)
class Work:
    """One microbatch on one rank.

    Attributes:
        tokens: of its context-parallel part.
        patches: number that it encodes.
        vision_tokens: vision tokens among `tokens`.
        slots: of linear attention's chunks, for each token, if torch computes it; kernels leave none empty.
    """

    tokens: float
    patches: float
    vision_tokens: float
    slots: float = 1.0

    @classmethod
    def of(cls, n: Dimensions, split: Split, training: Training) -> Work:
        """The maximum for full rows; images are assumed to be divided evenly over context-parallel ranks.

        A row without images has a blank one of a single vision token, and so has a rank without images.
        """
        joined = n["v_merged"] // n["v_hidden"]
        most = joined * training.seq_length
        patches = most if training.max_patches is None else min(training.max_patches, most)
        tokens, patches = (training.micro_batch_size * size / split.cp for size in (training.seq_length, patches))
        return cls(tokens, max(patches, joined), patches / joined)


@dataclass(frozen=True)
class Activations:
    """Bytes of one microbatch in one chunk.

    Attributes:
        kept: until its backward pass, by module.
        passing: maximum of temporary memory: recomputed activations, gradients of a layer, logits.
    """

    kept: dict[str, float]
    passing: float

    @property
    def total(self) -> float:
        """Total of `kept`."""
        return sum(self.kept.values())


@dataclass(frozen=True)
class Layer:
    """A layer for recomputation, in bytes for each token or patch.

    Attributes:
        rows: tensors that it saves.
        entry: its input, the only saved tensor if the whole layer is recomputed.
        gradients: of its widest tensors, while its backward pass runs.
    """

    rows: tuple[SavedTensor, ...]
    entry: float
    gradients: float

    @property
    def whole(self) -> float:
        """Without recomputation."""
        return sum(row.nbytes for row in self.rows)

    def freed(self, modules: frozenset[str]) -> float:
        """What recomputing these modules frees."""
        return sum(row.nbytes for row in self.rows if row.freed_by & modules)


def chunk_activations(
    n: Dimensions, split: Split, training: Training, chunk: Chunk, *, chosen: int = 0, work: Work | None = None
) -> Activations:
    """Activations that one microbatch stores in a chunk.

    Args:
        n: the model's dimensions.
        split: parallel sizes.
        training: rows, precision, recomputation.
        chunk: of the pipeline.
        chosen: experts per token.
        work: tokens and patches; None for full rows.
    """
    work = work or Work.of(n, split, training)
    found: dict[str, float] = {}
    layers = _text_layers(n, split, training, chunk, chosen, work.slots)
    text, passing = _recomputed(layers, training.recompute)
    found["language model"] = text * work.tokens
    passing *= work.tokens
    found["language model"] += _sum(kept.embedding(n, training, first=chunk.first)) * work.tokens
    if training.trains_mtp:
        found["multi-token prediction"], again = _multi_token_prediction(n, split, training, chunk, chosen, work.tokens)
        passing = max(passing, again)
    trained = not training.frozen_weights >= {Part.VISION_MODEL, Part.VISION_PROJECTION}
    received = len(n.indices["deepstack_mergers"]) - chunk.layers.start
    if chunk.layers and received > 0:
        found["DeepStack"] = _sum(vision_activations.deepstack(n, split, training, received)) * work.vision_tokens
    if chunk.tower:
        tower, mergers, at_work = _tower(n, split, training)
        found["vision model"], found["vision projection"] = tower * work.patches, mergers * work.patches
        passing = max(passing, at_work * work.patches)
    if chunk.first and trained:
        fused = _sum(vision_activations.fused(n, training)) * work.vision_tokens * (1 + training.trains_mtp)
        found["vision projection"] = found.get("vision projection", 0.0) + fused
    if chunk.last:
        in_chunks = training.loss_in_chunks(work.tokens)
        rows = [*kept.final_norm(n, split, training), *kept.head(n, split, training, in_chunks=in_chunks)]
        found["loss"] = _sum(rows) * work.tokens
        passing = max(passing, _loss_passing(n, split, training, work.tokens, in_chunks=in_chunks))
    if chunk.first != chunk.tower:  # the other module is on other ranks; every rank has the whole replica's
        found["sent between towers"] = _sum(vision_activations.payload(n, training)) * work.vision_tokens * split.cp
        passing += found["sent between towers"] * trained  # its gradient
    return Activations({name: value for name, value in found.items() if value}, passing)


def _loss_passing(n: Dimensions, split: Split, training: Training, tokens: float, *, in_chunks: bool) -> float:
    """Logits, and then their gradient, in the model's precision in addition to the softmax; float32 models have both in
    one.

    In chunks the softmax is temporary too, and the sum of the output layer's gradients in float32 is in memory with a
    chunk's. The chunk's gradient of the tokens' own loss waits for that of multi-token prediction.
    """
    e, rows = training.precision.weight, n["vocab"] / split.tp
    copies = rows * (e if e < 4 else 0)
    weight = rows * n["hidden"] * (Part.LANGUAGE_MODEL not in training.frozen_weights)
    waiting = weight * e * training.trains_mtp
    if not in_chunks:
        return copies * tokens + waiting
    in_chunk = copies + kept.softmax(n, split, training).nbytes
    return in_chunk * training.loss_chunk_tokens + weight * (4 + e) + waiting


def _text_layers(
    n: Dimensions, split: Split, training: Training, chunk: Chunk, chosen: int, slots: float
) -> list[Layer]:
    linear, moe = n.indices.get("linear_layers", ()), n.indices["moe_layers"]
    made: dict[int, Layer] = {}
    for alike in kinds_of_layers(n, chunk.layers):
        one = alike[0]
        layer = _layer(n, split, training, chosen, moe=one in moe, slots=slots if one in linear else None)
        layer = replace(layer, rows=(*layer.rows, *kept.adapters(n, training, one)))
        made |= dict.fromkeys(alike, layer)
    return [made[number] for number in chunk.layers]


def _layer(n: Dimensions, split: Split, training: Training, chosen: int, *, moe: bool, slots: float | None) -> Layer:
    """A text layer without adapters; `slots` is None with full attention."""
    w = kept.Widths.of(n, split, training)
    wide, mlp = w.ffn, kept.dense_mlp(n, split, training)
    if moe:
        seen = chosen * training.expert_load / split.sequence_ranks
        wide = seen * (n["moe_ffn"] + 2 * n["hidden"] * split.expert_tp / 3)
        mlp = kept.experts(n, split, training, chosen)
    gradients = 3 * wide * w.weight
    if slots is None:
        attention = kept.attention(n, split, training)
    else:
        attention = linear_attention(n, split, training, slots)
        gradients = max(gradients, linear_attention_passing(n, split, training))
    return Layer((*attention, *mlp), w.hidden * w.weight, gradients + 2 * w.hidden * w.weight)


def _multi_token_prediction(
    n: Dimensions, split: Split, training: Training, chunk: Chunk, chosen: int, tokens: float
) -> tuple[float, float]:
    """Its stored activations in a chunk, and temporary memory.

    Later stages receive embedded next tokens together with hidden states; the last one has the layer, and the output
    layer once more.
    """
    arrived = 0.0 if chunk.first else kept.Widths.of(n, split, training).hidden * training.precision.weight
    if not chunk.last:
        return arrived * tokens, 0.0
    layer = _layer(n, split, training, chosen, moe=bool(n["mtp_experts"]), slots=None)
    around = kept.next_tokens(n, split, training, arrived=not chunk.first)
    # Recomputation starts from next tokens and hidden states; the first have been received, and the output layer saves
    # the second.
    layer = replace(layer, rows=(*layer.rows, *around), entry=layer.entry * chunk.first)
    inside, passing = _recomputed([layer], training.recompute)
    head = kept.head(n, split, training, in_chunks=training.loss_in_chunks(tokens))
    return (arrived + inside + _sum([*head, *kept.weighed_losses()])) * tokens, passing * tokens


def _tower(n: Dimensions, split: Split, training: Training) -> tuple[float, float, float]:
    """For each patch: activations stored by the tower, by the mergers, and temporary memory."""
    tower_frozen, projection = (part in training.frozen_weights for part in (Part.VISION_MODEL, Part.VISION_PROJECTION))
    e, v, taps = training.precision.weight, n["v_hidden"], len(n.indices["deepstack_mergers"])
    mergers = taps * _sum(vision_activations.merger(n, split, training, after_shuffle=True))
    mergers += _sum(vision_activations.merger(n, split, training, after_shuffle=False))
    if tower_frozen:  # then a merger's input is saved only for the merger
        return 0.0, 0.0 if projection else mergers + taps * v * e, 0.0
    rows = tuple(vision_activations.vision_layer(n, split, training))
    layer = Layer(rows, v * e, (2 * n["v_ffn"] / split.tp + 2 * v) * e)
    tower, passing = _recomputed([layer] * len(n.indices["vision_layers"]), training.vision_recompute)
    return tower + _sum(vision_activations.patches(n, training)), mergers, passing


def _recomputed(layers: Sequence[Layer], recompute: Recompute) -> tuple[float, float]:
    """Stored activations of layers with a recomputation setting, and temporary memory while one is computed."""
    if not layers:
        return 0.0, 0.0
    gradients = max(layer.gradients for layer in layers)
    if recompute.granularity is None:
        return sum(layer.whole for layer in layers), gradients
    if recompute.granularity == "selective":
        freed: Callable[[Layer], float] = lambda layer: layer.freed(recompute.modules)  # noqa: E731
        return sum(layer.whole - freed(layer) for layer in layers), gradients + max(map(freed, layers))
    number = recompute.num_layers or 1
    if recompute.method == "block":
        again, rest = layers[:number], layers[number:]
        return (
            sum(layer.entry for layer in again) + sum(layer.whole for layer in rest),
            gradients + max(layer.whole for layer in again),
        )
    groups = [layers[begin : begin + number] for begin in range(0, len(layers), number)]
    most = max(sum(layer.whole for layer in group) for group in groups)
    return math.fsum(group[0].entry for group in groups), gradients + most


def _sum(rows: Sequence[SavedTensor]) -> float:
    return math.fsum(row.nbytes for row in rows)

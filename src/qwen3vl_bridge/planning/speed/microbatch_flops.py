"""FLOPs of a microbatch: of each pipeline stage's text layers, and of the vision tower.

What lives here: forward passes, backward passes, and recomputation. Standard library only. What may not: costs of a
token or a patch (`models/common/flops.py`), seconds (`stage_times.py`, `step_time.py`).

A stage has FLOPs for each token in proportion to its text layers; the last one has the output layer too, and if
multi-token prediction is trained, one more layer and the output layer once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwen3vl_bridge.models.common.flops import TowerCosts, Trained
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.registry import dimensions_of, family
from qwen3vl_bridge.weights.dimensions import Dimensions
from qwen3vl_bridge.weights.model_parts import Part


@dataclass(frozen=True)
class Line:
    """Cost of tokens or patches that attend to each other within their sample or frame: each * number + square *
    squares.

    Attributes:
        each: for a token or a patch.
        square: for the square of a sample's tokens, or of a frame's patches.
    """

    each: float = 0.0
    square: float = 0.0

    def of(self, number: float, squares: float) -> float:
        """The cost of a number of tokens, whose squares sum to `squares`."""
        return self.each * number + self.square * squares

    def __add__(self, other: Line) -> Line:
        return Line(self.each + other.each, self.square + other.square)

    def __sub__(self, other: Line) -> Line:
        return self + other * -1

    def __mul__(self, factor: float) -> Line:
        return Line(self.each * factor, self.square * factor)


@dataclass(frozen=True)
class Costs:
    """A model's costs from `models/common/flops.py`.

    Attributes:
        forward: a training step's forward pass.
        step: a training step without recomputation.
        chosen: experts per token.
    """

    forward: TowerCosts
    step: TowerCosts
    chosen: int

    @classmethod
    def of(cls, config: Mapping, training: Training) -> Costs:
        """Costs of a configuration.

        Args:
            config: a `config.json` as a mapping.
            training: what is trained.
        """
        n = dimensions_of(config)
        costs, trained = family(n.family).costs, _trained(training)
        return cls(costs(n, trained.nothing), costs(n, trained), n["chosen_experts"])


@dataclass(frozen=True)
class Operations:
    """FLOPs, for each token or patch and for each pair.

    Attributes:
        forward, backward: of the model.
        again: recomputation in the backward pass.
    """

    forward: Line
    backward: Line
    again: Line


def language_operations(costs: Costs, n: Dimensions, split: Split, training: Training) -> list[Operations]:
    """Of each pipeline stage, without the tower; for the tokens of all context-parallel ranks.

    Args:
        costs: the model's.
        n: its dimensions.
        split: its stages.
        training: what is trained, and recomputed.
    """
    layers, mtp, forward, step = len(n.indices["text_layers"]), training.trains_mtp, costs.forward, costs.step
    head = Line(2 * n["hidden"] * n["vocab"]) * (1 + mtp)
    # Something before the output layer is trained, so a gradient always goes through it.
    head_step = head * (2 + (Part.LANGUAGE_MODEL not in training.frozen_weights))
    layer = (Line(forward.token, forward.token_pair) - head) * (1 / (layers + mtp))
    layer_step = (Line(step.token, step.token_pair) - head_step) * (1 / (layers + mtp))
    again = _again(costs.chosen, n, training, layer)
    in_chunks = training.loss_in_chunks(training.seq_length * training.micro_batch_size / split.cp)
    found = []
    for chunks in split.chunks(layers):
        last = chunks[-1].last
        count = sum(len(chunk.layers) for chunk in chunks) + (last and mtp)
        backward = (layer_step - layer) * count + (head_step - head) * last
        found.append(Operations(layer * count + head * last, backward, again * count + head * (last and in_chunks)))
    return found


def tower_operations(costs: Costs, training: Training) -> Operations:
    """Of the vision tower and its mergers, for each patch."""
    once, step = Line(costs.forward.patch, costs.forward.patch_pair), Line(costs.step.patch, costs.step.patch_pair)
    whole = training.vision_recompute.granularity == "full" and Part.VISION_MODEL not in training.frozen_weights
    return Operations(once, step - once, once * whole)


def _again(chosen: int, n: Dimensions, training: Training, layer: Line) -> Line:
    """Recomputation in the mean text layer."""
    if training.recompute.granularity == "full":
        return layer
    layers, mlp = len(n.indices["text_layers"]), 6 * n["hidden"]
    recomputed = {
        "mlp": Line(mlp * n["ffn"] * len(n.indices["dense_layers"]) / layers),
        "moe": Line(
            mlp * (n["moe_ffn"] * chosen + n.sizes.get("shared_ffn", 0)) * len(n.indices["moe_layers"]) / layers
        ),
        "core_attn": Line(0.0, layer.square),
    }
    return sum((recomputed.get(name, Line()) for name in training.recompute.modules), Line())


def _trained(training: Training) -> Trained:
    frozen, lora = training.frozen_weights, training.lora
    whole = Trained(
        language_model=Part.LANGUAGE_MODEL not in frozen,
        vision_model=Part.VISION_MODEL not in frozen,
        vision_projection=Part.VISION_PROJECTION not in frozen,
        mtp=training.trains_mtp,
    )
    if lora is None:
        return whole

    def rank(layer: str) -> int:
        part, _, name = layer.rpartition(".")
        adapted = part.startswith("language_model.") and not part.endswith(".experts") and name in lora.targets
        return lora.rank if adapted else 0

    return replace(whole, rank=rank)

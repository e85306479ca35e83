"""Stages of both ways to train two towers, with the seconds of each microbatch: for a simulated step.

What lives here: the tower on the language model's first stage, and on ranks of its own; what goes over which boundary.
What may not: the order of a step (`one_f_one_b.py`), rows and figures (`dist_train.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from qwen3vl_bridge.batch.vision_sharding import deal_frames
from qwen3vl_bridge.data.loading.balance import deal
from qwen3vl_bridge.models.common.flops import TowerCosts, tower_costs
from qwen3vl_bridge.models.qwen3_vl.presets import config_dict
from qwen3vl_bridge.planning.communication import Passes, boundary_seconds, payload_seconds
from qwen3vl_bridge.planning.encoder_ranks import DistSplit
from qwen3vl_bridge.planning.hardware import GPUS
from qwen3vl_bridge.planning.settings import Training
from qwen3vl_bridge.planning.speed.data_parallel import data_seconds
from qwen3vl_bridge.planning.speed.microbatch_flops import Costs
from qwen3vl_bridge.planning.speed.stage_times import Contents, language_paces, tower_pace
from qwen3vl_bridge.planning.split import Split
from qwen3vl_bridge.weights.dimensions import Dimensions

import numpy as np
from one_f_one_b import Hop, Stage, step_seconds

GPU = GPUS["H100"]
_PER_TOKEN = 4


class Row(NamedTuple):
    """The squares of its samples' tokens, added up, and the patches of its frames."""

    token_pairs: int
    frames: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A model and how it is trained."""

    name: str
    n: Dimensions
    costs: Costs
    training: Training

    def contents(self, row: Row, frames: Sequence[int] | None = None) -> Contents:
        """Of a row; with some of its frames."""
        frames = row.frames if frames is None else frames
        return Contents(self.training.seq_length, row.token_pairs, sum(frames), sum(one**2 for one in frames))


@dataclass(frozen=True)
class Simulated:
    """A way to train, and a step of it.

    Attributes:
        seconds: of a step, in the mean over global batches.
        vision, language: the share of it that the tower's ranks, and those of the busiest stage, work.
    """

    split: Split | DistSplit
    training: Training
    seconds: float
    vision: float
    language: float


def replicas_of(model: Model, rows: Sequence[Row], replicas: int) -> list[list[Row]]:
    """The microbatches of each replica, dealt out by cost."""
    forward = model.costs.forward
    order = deal([_cost(forward, model.contents(row)) for row in rows], replicas)
    return [[rows[order[turn + one]] for turn in range(0, len(rows), replicas)] for one in range(replicas)]


def _cost(costs: TowerCosts, one: Contents) -> float:
    language = costs.token * one.tokens + costs.token_pair * one.token_pairs
    return language + costs.patch * one.patches + costs.patch_pair * one.patch_pairs


def language_stages(model: Model, split: Split, batches: list[list[Row]]) -> list[Stage]:
    """Of all replicas, without the tower. Ranks that share experts take as long as the slowest of them."""
    paces = language_paces(model.costs, model.n, split, model.training, GPU)
    members = max(split.ep * split.expert_tp // (split.tp * split.cp), 1) if split.ep > 1 else 1
    found = []
    for first in range(0, split.dp, members):
        together = batches[first : first + members]
        slowest = [max(row.token_pairs for row in rows) for rows in zip(*together, strict=True)]
        for replica in range(first, first + len(together)):
            for number, pace in enumerate(paces):
                passes = ([line.of(model.training.seq_length, pairs) for pairs in slowest]
                          for line in (pace.forward, pace.backward))  # fmt: skip
                found.append(Stage(
                    ("language", replica, number),
                    (("language", replica, number - 1),) if number else (),
                    (("language", replica, number + 1),) if number + 1 < split.pp else (),
                    split.pp - number - 1,
                    *passes,
                    group=(first, number) if members > 1 else None,
                ))  # fmt: skip
    return found


def colocated(model: Model, split: Split, rows: Sequence[Row]) -> Simulated:
    """A step with the tower on the first stage; context-parallel ranks share its frames."""
    batches = replicas_of(model, rows, split.dp)
    stages = language_stages(model, split, batches)
    forward, backward = _tower(model, split)
    for place, stage in enumerate(stages):
        _, replica, number = stage.name
        if number == 0:
            shares = [_shares(model, row, split.cp) for row in batches[replica]]
            alone = [tuple(max(map(line, share)) for line in (forward, backward)) for share in shares]
            stages[place] = replace(stage, alone=alone)
    seconds = step_seconds(stages, len(batches[0]), _hops(model, split, batches))
    seconds += data_seconds(model.n, split, model.training, 1, GPU, _mean_passes(stages))
    busiest = max(sum(s.forward) + sum(s.backward) + sum(map(sum, s.alone)) for s in stages)
    return Simulated(split, model.training, seconds, 0.0, busiest / seconds)


def _mean_passes(stages: Sequence[Stage]) -> Passes:
    """Of a microbatch in the mean of stages."""
    return Passes(*(float(np.mean([np.mean(way(stage)) for stage in stages]))
                    for way in (lambda stage: stage.forward, lambda stage: stage.backward)))  # fmt: skip


def dist_train(model: Model, split: DistSplit, data: float, rows: Sequence[Row]) -> Simulated:
    """A step with the tower on its own ranks; `data` seconds are between replicas."""
    language, replicas = split.language, split.replicas
    batches = replicas_of(model, rows, language.dp)
    stages = language_stages(model, language, batches)
    forward, backward = _tower(model, split.vision)
    for place, stage in enumerate(stages):
        _, replica, number = stage.name
        if number == 0:
            stages[place] = replace(stage, before=tuple(("vision", one) for one in replicas.encoders_of(replica)))
    shares = [[_shares(model, row, replicas.encoders) for row in rows] for rows in batches]
    towers = []
    for encoder in range(replicas.vision):
        served, share = replicas.served_by(encoder), replicas.share_of(encoder)
        turns = list(zip(*(shares[one] for one in served), strict=True))
        passes = ([sum(line(parts[share]) for parts in turn) for turn in turns] for line in (forward, backward))
        after = tuple(("language", one, 0) for one in served)
        towers.append(Stage(("vision", encoder), (), after, language.pp, *passes))
    hop = _hops(model, language, batches, split)
    seconds = step_seconds([*towers, *stages], len(batches[0]), hop) + data
    busy = [np.mean([sum(s.forward) + sum(s.backward) for s in towers]) / seconds]
    busy.append(max(sum(s.forward) + sum(s.backward) for s in stages) / seconds)
    return Simulated(split, model.training, seconds, *busy)


def _tower(model: Model, split: Split) -> list[Callable[[Contents], float]]:
    pace = tower_pace(model.costs, model.n, split, model.training, GPU)
    return [lambda one, line=line: line.of(one.patches, one.patch_pairs) for line in (pace.forward, pace.backward)]


def _shares(model: Model, row: Row, ranks: int) -> list[Contents]:
    """What each of several ranks encodes."""
    if ranks == 1:
        return [model.contents(row)]
    return [model.contents(row, [row.frames[i] for i in one]) for one in _dealt(model.name, row.frames, ranks)]


@functools.cache
def _dealt(name: str, frames: tuple[int, ...], ranks: int) -> list[list[int]]:
    costs = tower_costs(config_dict(name))
    return deal_frames([costs.patch * n + costs.patch_pair * n**2 for n in frames], ranks)


def _hops(model: Model, split: Split, batches: list[list[Row]], dist: DistSplit | None = None) -> Hop:
    n, training, begins = model.n, model.training, [0]
    for chunks in split.chunks(len(n.indices["text_layers"])):
        begins.append(chunks[-1].layers.stop)
    back = model.costs.step.patch > model.costs.forward.patch

    def hop(sender, receiver, way, number):
        if sender[0] == receiver[0]:
            tokens, vision = training.seq_length / split.cp, sum(batches[sender[1]][number].frames) / _PER_TOKEN
            begin = begins[max(sender[2], receiver[2])]
            return boundary_seconds(n, split, training, GPU, begin, tokens, vision / split.cp)
        # Parts for one receiver come one after the other, and so do those that one sends to several.
        vision = sender if sender[0] == "vision" else receiver
        patches = sum(sum(batches[one][number].frames) for one in dist.replicas.served_by(vision[1]))
        sent = payload_seconds(n, split, training, GPU, patches / _PER_TOKEN)
        return sent.forward if way == "forward" else sent.backward * back

    return hop

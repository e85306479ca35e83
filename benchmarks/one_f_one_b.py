"""A step of megatron-core's pipeline schedule without interleaving (1F1B), played through: simulated, not run.

What lives here: the order in which a stage works, sends and receives, and a clock for each. Standard library only. What
may not: how long anything takes (`two_towers.py`).

A stage works on one thing at a time. What it sends and receives between two pieces of work it starts together, and it
goes on when all of it is there; a transfer begins when both sides are ready for it, and takes its seconds. So a stage
that is fast waits with what it has made until the next one asks for it, as in megatron-core without overlap
(`forward_backward_pipelining_without_interleaving`): there are no queues. Stages of one group, whose experts are
shared, begin each pass of the language model together.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

Pass = Literal["forward", "backward"]
Hop = Callable[[Hashable, Hashable, Pass, int], float]


@dataclass(frozen=True)
class Stage:
    """One stage of one replica.

    Attributes:
        name: no other has it.
        before, after: stages that it receives activations from, and sends them to.
        behind: stages between it and the end of the pipeline.
        forward, backward: seconds of each microbatch, of what begins with the others of its group.
        alone: seconds of each microbatch, forwards and backwards, before and after that: of a tower in the same stage.
        group: stages of one group begin together; None for by itself.
    """

    name: Hashable
    before: tuple[Hashable, ...]
    after: tuple[Hashable, ...]
    behind: int
    forward: Sequence[float]
    backward: Sequence[float]
    alone: Sequence[tuple[float, float]] = ()
    group: Hashable = None


@dataclass(frozen=True)
class Meeting:
    """Stages that come together, and how long it takes from when all are there."""

    key: Hashable
    parties: int
    seconds: float


# A piece of work in seconds, or meetings that begin as the stage gets there and have to end before it goes on.
Action = float | tuple[Meeting, ...]


def play(programs: Sequence[Sequence[Action]]) -> list[float]:
    """When each program ends.

    Raises:
        RuntimeError: some wait for each other for ever.
    """
    clocks, places = [0.0] * len(programs), [0] * len(programs)
    arrived: dict[Hashable, dict[int, float]] = {}
    moved = True
    while moved:
        moved = False
        for number, program in enumerate(programs):
            while places[number] < len(program):
                action = program[places[number]]
                if isinstance(action, tuple):
                    for one in action:
                        arrived.setdefault(one.key, {}).setdefault(number, clocks[number])
                    if any(len(arrived[one.key]) < one.parties for one in action):
                        break
                    ends = (max(arrived[one.key].values()) + one.seconds for one in action)
                    clocks[number] = max(clocks[number], *ends)
                else:
                    clocks[number] += action
                places[number], moved = places[number] + 1, True
    stuck = [number for number, program in enumerate(programs) if places[number] < len(program)]
    if stuck:
        raise RuntimeError(f"programs {stuck} of {len(programs)} wait for ever, expected all to end")
    return clocks


def step_seconds(stages: Sequence[Stage], microbatches: int, hop: Hop) -> float:
    """When the last stage is done.

    Args:
        stages: of all replicas.
        microbatches: of each.
        hop: seconds of a transfer: who sends to whom, in which pass, of which microbatch.
    """
    members: dict[Hashable, int] = {}
    for stage in stages:
        if stage.group is not None:
            members[stage.group] = members.get(stage.group, 0) + 1
    return max(play([program(stage, microbatches, hop, members) for stage in stages]))


def program(stage: Stage, microbatches: int, hop: Hop, members: dict[Hashable, int]) -> list[Action]:
    """What a stage does, in megatron-core's order.

    Args:
        stage: the stage.
        microbatches: of a step.
        hop: as for `step_seconds`.
        members: stages of each group.
    """
    found: list[Action] = []
    warmup = min(stage.behind, microbatches)

    def transfer(sender: Hashable, receiver: Hashable, way: Pass, number: int) -> Meeting:
        return Meeting((sender, receiver, way, number), 2, hop(sender, receiver, way, number))

    def exchange(*meetings: list[Meeting]) -> None:
        if together := tuple(one for some in meetings for one in some):
            found.append(together)

    def receive_forward(number: int) -> list[Meeting]:
        return [transfer(one, stage.name, "forward", number) for one in stage.before]

    def send_forward(number: int) -> list[Meeting]:
        return [transfer(stage.name, one, "forward", number) for one in stage.after]

    def receive_backward(number: int) -> list[Meeting]:
        return [transfer(one, stage.name, "backward", number) for one in stage.after]

    def send_backward(number: int) -> list[Meeting]:
        return [transfer(stage.name, one, "backward", number) for one in stage.before]

    def work(way: Pass, number: int) -> None:
        alone = stage.alone[number][way == "backward"] if stage.alone else 0.0
        start: list[Action] = []
        if members.get(stage.group, 1) > 1:
            start = [(Meeting((stage.group, way, number), members[stage.group], 0.0),)]
        found.extend([alone, *start, stage.forward[number]] if way == "forward" else
                     [*start, stage.backward[number], alone])  # fmt: skip

    for number in range(warmup):
        exchange(receive_forward(number))
        work("forward", number)
        exchange(send_forward(number))
    if warmup < microbatches:
        exchange(receive_forward(warmup))
    for number in range(warmup, microbatches):
        work("forward", number)
        exchange(send_forward(number), receive_backward(number - warmup))
        work("backward", number - warmup)
        following = receive_forward(number + 1) if number + 1 < microbatches else []
        exchange(send_backward(number - warmup), following)
    for number in range(microbatches - warmup, microbatches):
        exchange(receive_backward(number))
        work("backward", number)
        exchange(send_backward(number))
    return found

"""The steps of the check: which there are, in which order, and how long each may take; less than eight minutes in all.

What lives here: the table. Standard library only. What may not: a step's work, which is a module each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Part:
    """One of the checks that a process makes.

    Attributes:
        program: module and function, which are given `Place` and `settings`.
        label: what the findings begin with; empty where a step has one part.
        settings: of this part.
    """

    program: str
    label: str = ""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One process. It imports Megatron once, which takes some ten seconds; so what is short shares one.

    Attributes:
        name: of the step.
        group: what `--only` names.
        seconds: that it may take on a GPU.
        parts: in order; one that raises does not stop the next.
    """

    name: str
    group: str
    seconds: int
    parts: tuple[Part, ...]


UNPACKING = 15  # seconds that the packages may take before the first step
KINDS = ("dense", "moe", "qwen3_5")  # of models
STEPS = (
    Step("machine", "machine", 25, (Part("machine:look"),)),
    Step("parity", "parity", 95, tuple(Part("parity:check", kind, {"kind": kind}) for kind in KINDS)),
    Step(
        "train, ten steps and resumed",
        "train",
        80,
        (
            Part("training:ten_steps", "distributed optimizer", {"recipe": "2B"}),
            Part("training:ten_steps", "Megatron-FSDP", {"recipe": "digits"}),
        ),
    ),
    Step("train, 2B", "train", 70, (Part("training:fine_tune"),)),
    Step("speed", "speed", 75, (Part("speed:compare"),)),
    Step(
        "kernels and host waits",
        "speed",
        60,
        (Part("kernels:look", "kernels"), *(Part("waits:look", f"waits, {kind}", {"kind": kind}) for kind in KINDS)),
    ),
    Step("conversion", "convert", 55, (Part("conversion:compare"),)),
)
GROUPS = ("machine", "parity", "train", "speed", "convert")

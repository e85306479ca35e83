"""The steps of the check: which there are, in which order, and how long each may take; eight minutes in all.

What lives here: the table. Standard library only. What may not: a step's work, which is a module each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        name: of the step.
        group: what `--only` names.
        seconds: that it may take on a GPU.
        program: module and function, which are given `Place` and `settings`.
        settings: of this step.
    """

    name: str
    group: str
    seconds: int
    program: str
    settings: dict[str, Any] = field(default_factory=dict)


STEPS = (
    Step("machine", "machine", 20, "machine:look"),
    *(Step(f"parity, {kind}", "parity", 40, "parity:check", {"kind": kind}) for kind in ("dense", "moe", "qwen3_5")),
    Step("train, ten steps and resumed", "train", 50, "training:ten_steps", {"recipe": "2B"}),
    Step("train, the same under Megatron-FSDP", "train", 50, "training:ten_steps", {"recipe": "digits"}),
    Step("train, 2B", "train", 70, "training:fine_tune"),
    Step("speed", "speed", 70, "speed:compare"),
    Step("host waits", "speed", 25, "waits:look"),
    Step("kernels", "speed", 25, "kernels:look"),
    Step("conversion", "convert", 50, "conversion:compare"),
)
GROUPS = ("machine", "parity", "train", "speed", "convert")

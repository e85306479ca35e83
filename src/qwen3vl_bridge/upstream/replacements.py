"""Record of the names of other packages that this package replaces for the whole process.

`qwen3vl doctor` lists them, and a test limits their number. All replacements call `replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any


class When(StrEnum):
    """Condition under which a name is replaced."""

    ALWAYS = "always"
    NO_CUDA = "without CUDA"
    NO_TRANSFORMER_ENGINE = "without Transformer Engine"
    LINEAR_ATTENTION = "with linear attention"
    NO_FLA = "with linear attention, without flash-linear-attention or CUDA"
    DIST_TRAIN = "with a vision tower on separate ranks"
    SIMULATION = "on a simulated GPU"


@dataclass(frozen=True)
class Replacement:
    """A replaced name, such as `megatron.bridge.training.eval.evaluate`."""

    name: str
    when: When


_done: dict[str, Replacement] = {}


def replace(owner: ModuleType | type, name: str, new: Any, when: When) -> None:
    """Set an attribute of another package's module or class for the whole process, and record it.

    Raises:
        AttributeError: `owner` has no attribute `name`, so that setting it would have no effect.
    """
    getattr(owner, name)
    path = owner.__name__ if isinstance(owner, ModuleType) else f"{owner.__module__}.{owner.__qualname__}"
    setattr(owner, name, new)
    _done[f"{path}.{name}"] = Replacement(f"{path}.{name}", when)


def replaced() -> tuple[Replacement, ...]:
    """Return a `Replacement` for each name of another package that was replaced in this process so far."""
    return tuple(_done.values())

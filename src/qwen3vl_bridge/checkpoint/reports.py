"""What the commands hand back.

What lives here: plain data. What may not: work, printing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.plan import Plan


@dataclass(frozen=True)
class ConversionReport:
    """A conversion that was done, or with `dry_run` one that would be.

    Attributes:
        source: what was read.
        target: what was written.
        tensors: number of tensors written.
        parameters: number of their elements.
        nbytes: number of their bytes.
        dtypes: dtypes among them.
        computed: number of tensors that were cast; the others were copied.
        naming: layer spec whose names the Megatron side has.
        notes: what the user should know.
        seconds: how long writing took; 0 where nothing was written.
        dry_run: nothing was written.
    """

    source: str
    target: Path
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    computed: int
    naming: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    dry_run: bool = False

    @classmethod
    def of(
        cls, source: str | Path, target: Path, plan: Plan, notes: Sequence[str], seconds: float, *, dry_run: bool
    ) -> ConversionReport:
        """The report on a plan that was carried out, or would be."""
        return cls(
            str(source),
            target,
            len(plan.tasks),
            plan.numel,
            plan.nbytes,
            tuple(plan.dtypes),
            len(plan.computed),
            plan.naming,
            tuple(notes),
            seconds,
            dry_run,
        )

    def as_dict(self) -> dict[str, Any]:
        """The same, fit for JSON."""
        return asdict(self) | {"target": str(self.target)}


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on both sides.

    Attributes:
        name: its Hugging Face name.
        elements: how many of its elements differ.
        first: the first one that does, counted row-major.
        numel: how many elements it has.
    """

    name: str
    elements: int
    first: int
    numel: int

    def __str__(self) -> str:
        return f"{self.name}: {self.elements} of {self.numel} elements differ, the first is number {self.first}"


@dataclass(frozen=True)
class VerifyReport:
    """A comparison of a Megatron checkpoint with a Hugging Face model.

    Attributes:
        tensors: number of Hugging Face tensors compared.
        nbytes: number of their bytes, as the checkpoint stores them.
        differences: the tensors that differ; empty if none does.
        notes: what the user should know.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return not self.differences

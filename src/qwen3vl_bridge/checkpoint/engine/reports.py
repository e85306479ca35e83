"""Return values of the commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen3vl_bridge.checkpoint.engine.planned_conversion import Conversion


@dataclass(frozen=True)
class ConversionReport:
    """A finished conversion, or with `dry_run` a planned one.

    Attributes:
        name: import, export or reformat.
        source: what was read.
        target: what was written.
        format: of the target: "huggingface", "fsdp_dtensor" or "torch_dist".
        layer_spec: layer spec of the target; None for Hugging Face.
        tensors: number of tensors written.
        parameters: number of their elements.
        nbytes: number of their bytes.
        dtypes: their dtypes.
        cast: number of tensors whose dtype was changed.
        transposed: number of tensors made of transposed matrices. All others were copied.
        files: number of files with tensors.
        disk_needed: bytes of the disk that the target takes.
        disk_free: free bytes there.
        estimate: estimated seconds; 0 unless requested.
        processes: number of processes that shared the work.
        notes: information for the user.
        seconds: time of writing; 0 if nothing was written.
        resumed: bytes that an earlier run had written.
        written: bytes that this one has written, of files with tensors.
        dry_run: nothing was written.
    """

    name: str
    source: str
    target: Path
    format: str
    layer_spec: str | None
    tensors: int
    parameters: int
    nbytes: int
    dtypes: tuple[str, ...]
    cast: int
    transposed: int
    files: int
    disk_needed: int
    disk_free: int
    estimate: float = 0.0
    processes: int = 1
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    resumed: int = 0
    written: int = 0
    dry_run: bool = True

    @classmethod
    def of(cls, conversion: Conversion, disk_needed: int, disk_free: int, processes: int) -> ConversionReport:
        """The report on a conversion before it begins."""
        plan = conversion.plan
        return cls(
            name=conversion.name,
            source=conversion.origin,
            target=conversion.target,
            format=conversion.output.settings["format"],
            layer_spec=conversion.output.settings.get("layer_spec"),
            tensors=len(plan.tasks),
            parameters=plan.numel,
            nbytes=plan.nbytes,
            dtypes=tuple(plan.dtypes),
            cast=len(plan.cast),
            transposed=len(plan.transposed),
            files=len(conversion.output.files),
            disk_needed=disk_needed,
            disk_free=disk_free,
            processes=processes,
            notes=tuple(conversion.notes),
        )

    def done(self, notes: Sequence[str], seconds: float, resumed: int, written: int) -> ConversionReport:
        """The report on a finished conversion."""
        return replace(self, notes=tuple(notes), seconds=seconds, resumed=resumed, written=written, dry_run=False)

    def as_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        return asdict(self) | {"target": str(self.target)}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between both sides.

    Attributes:
        name: its name; for a Megatron checkpoint and a Hugging Face model, the latter's.
        elements: number of elements that differ; None if only checksums were compared.
        first: index of the first one that differs, row-major.
        numel: number of its elements.
    """

    name: str
    elements: int | None
    first: int | None
    numel: int

    def __str__(self) -> str:
        if self.elements is None:
            return f"{self.name}: its {self.numel} elements have another checksum"
        return f"{self.name}: {self.elements} of {self.numel} elements differ, the first is number {self.first}"


@dataclass(frozen=True)
class VerifyReport:
    """A comparison of a Megatron checkpoint with another one, with a Hugging Face model or with its checksums.

    Attributes:
        tensors: number of tensors compared.
        nbytes: number of their bytes, as the checkpoint stores them.
        differences: the tensors that differ; empty if none does.
        notes: information for the user.
    """

    tensors: int
    nbytes: int
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def same(self) -> bool:
        """Whether no tensor differs."""
        return not self.differences

    def as_dict(self) -> dict[str, Any]:
        """The report as values for JSON."""
        return {"same": self.same, **asdict(self)}

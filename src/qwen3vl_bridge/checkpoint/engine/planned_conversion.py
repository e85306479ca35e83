"""A planned conversion: what is read, what is written where, and what identifies both."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from qwen3vl_bridge.checkpoint.engine import journal
from qwen3vl_bridge.checkpoint.engine.manifest import MANIFEST, Parts, files_of, tool
from qwen3vl_bridge.checkpoint.formats.planned_files import OutputFile, units
from qwen3vl_bridge.checkpoint.formats.tensor_specs import TensorSource
from qwen3vl_bridge.checkpoint.planning.plan import Plan
from qwen3vl_bridge.io.json_files import write_object


class Output(Protocol):
    """A plan's result in one format.

    Attributes:
        files: the files with tensors.
        inner: the folder in the result that contains them.
        settings: values other than the plan on which the result depends, as JSON; stored in the manifest.
    """

    @property
    def files(self) -> list[OutputFile]: ...  # noqa: D102
    @property
    def inner(self) -> str: ...  # noqa: D102
    @property
    def settings(self) -> dict[str, Any]: ...  # noqa: D102

    def finish(self, root: Path, digest: str) -> None:
        """Write all files except those with tensors and the manifest, given a digest of the plan."""

    def open(self, root: Path) -> TensorSource:
        """Open a result's tensors.

        Raises:
            CheckpointError: one of its files differs from the plan.
        """
        ...


@dataclass(frozen=True)
class Conversion:
    """A planned conversion.

    Attributes:
        name: name of the command.
        origin: the source, in the user's words.
        target: the result's folder, to be created.
        plan: tensor by tensor.
        source: what the plan reads.
        folders: folders that are read meanwhile.
        output: what the plan writes.
        notes: information for the user.
        threads: number of threads of a process that read the source.
    """

    name: str
    origin: str
    target: Path
    plan: Plan
    source: TensorSource
    folders: tuple[Path, ...]
    output: Output
    notes: list[str]
    threads: int = 2

    def digest(self, *, sync: bool) -> str:
        """Identifies a plan: source files, where every element comes from, where every byte goes.

        Files other than tensors are not included: a resumed run writes them again.

        Args:
            sync: whether the run waits for the disk; a run cannot be resumed from data that may not be on disk.
        """
        digest = hashlib.sha256(repr((tool(), self.name, sync)).encode())
        for path in self.source.files:
            found = path.stat()
            digest.update(repr((str(path.resolve()), found.st_size, found.st_mtime_ns)).encode())
        for task in self.plan.tasks:
            digest.update(repr((task.target, tuple(task.segments))).encode())
        for file in self.output.files:
            parts = (content if isinstance(content, bytes) else len(content) for content in file.contents)
            digest.update(repr((file.name, list(parts))).encode())
        return digest.hexdigest()

    def write_manifest(self, result: Path, digest: str, sums: dict[str, str]) -> None:
        """Write the result's manifest; its journal has the digests of the files with tensors."""
        plan = self.plan
        made = {"tensors": len(plan.tasks), "parameters": plan.numel, "bytes": plan.nbytes, "dtypes": plan.dtypes}
        made |= {"cast": len(plan.cast), "transposed": len(plan.transposed), "digest": digest}
        written: dict[str, Parts] = {}
        for unit, part in journal.noted(result, self.output.files, units(self.output.files)).items():
            name = Path(self.output.inner, self.output.files[unit.file].name).as_posix()
            parts = written.setdefault(name, [])
            if unit.start == (parts[-1][0] if parts else 0):  # otherwise a line is missing, and the file is read
                parts.append((unit.end, part))
        made["files"] = files_of(result, self.output.inner, written)
        manifest = tool() | {"source": self.origin} | self.output.settings | made
        write_object(result / self.output.inner / MANIFEST, manifest | ({"sha256": sums} if sums else {}))

"""The manifest written with every result: its source, the tool and the options."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from qwen3vl_bridge.checkpoint.formats.megatron import FORMATS
from qwen3vl_bridge.checkpoint.formats.planned_files import digest_of
from qwen3vl_bridge.checkpoint.processes import Progress
from qwen3vl_bridge.io.atomic import PRIVATE, Snapshot, leaves, refuse_loss, refuse_others, snapshot
from qwen3vl_bridge.io.files import CheckpointError, read_object

# A file's contents: the end of each part, and a digest of it.
Parts = list[tuple[int, str]]

MANIFEST = "qwen3vl_bridge.json"
_TOOL = "qwen3vl_bridge"


def tool() -> dict[str, str]:
    """Name and version of the tool that wrote a result, for its manifest."""
    versions = {}
    for name in ("qwen3vl-bridge", "torch"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return {"tool": _TOOL, "version": versions["qwen3vl-bridge"], "torch": versions["torch"]}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a result; empty if it does not exist."""
    path = folder / MANIFEST
    return read_object(path) if path.is_file() else {}


def files_of(root: Path, inner: str, written: Mapping[str, Parts]) -> dict[str, Parts]:
    """The files of a result that is complete except for the manifest in its folder `inner`, with digests.

    Digests that are known already, in `written`, are not computed again.
    """
    found: dict[str, Parts] = {}
    for path in sorted(path.relative_to(root) for path in leaves(root)):
        if path != Path(inner, MANIFEST) and path.parts[0] != PRIVATE:
            name, size = path.as_posix(), (root / path).stat().st_size
            parts = written.get(name)
            if parts is None or _size(parts) != size:
                parts = [(size, digest_of(root / path, 0, size, Progress("", size, shown=False)) or "")]
            found[name] = parts
    return found


class Replaceable:
    """Checks that a folder is exactly the unchanged result of an earlier conversion."""

    def __init__(self, inner: str, kind: str, *, contents: bool = True, progress: bool = False) -> None:
        """Create a check.

        Args:
            inner: the folder in it that contains the manifest.
            kind: format of the replacement: a Megatron checkpoint replaces one of either format, anything else only the
                same format.
            contents: whether files are compared with their digests; otherwise only by size.
            progress: whether to show progress on standard error.
        """
        self._manifest = Path(inner, MANIFEST).as_posix()
        self._kinds = FORMATS if kind in FORMATS else (kind,)
        self._contents, self._progress = contents, progress
        self._checked: Snapshot | None = None

    def __call__(self, root: Path) -> None:
        """Check a folder. Its files are read once, and again only if they have changed since.

        Raises:
            CheckpointError: it is something else, or contains files that would be lost.
        """
        found = snapshot(root)
        if found == self._checked:
            return
        written = self._written(root)
        refuse_others(root, {self._manifest, *written}, "checkpoint")
        present = {name: written[name] for name in found if name in written}
        with Progress("earlier result", sum(map(_size, present.values())), shown=self._progress) as meter:
            changed = [name for name, parts in present.items() if not self._is_as_written(root / name, parts, meter)]
        refuse_loss(root, changed, "files changed since a conversion wrote them")
        self._checked = found

    def _is_as_written(self, path: Path, parts: Parts, meter: Progress) -> bool:
        if not path.is_file() or path.stat().st_size != _size(parts):
            return False
        starts = (0, *(end for end, _ in parts))
        return not self._contents or all(
            digest_of(path, start, end, meter) == digest for start, (end, digest) in zip(starts, parts, strict=False)
        )

    def _written(self, root: Path) -> dict[str, Parts]:
        """The files of a result from its manifest."""
        manifest = read_manifest((root / self._manifest).parent)
        # Our training writes a manifest too, which has no format.
        if manifest.get("tool") != _TOOL or manifest.get("format") not in self._kinds:
            raise CheckpointError(
                f"{root} was not written by a conversion of this kind: it has no such {self._manifest}, so it is not "
                "replaced; remove it yourself"
            )
        files = manifest.get("files")
        try:
            return {name: [(int(end), str(digest)) for end, digest in parts] for name, parts in files.items()}  # pyright: ignore[reportOptionalMemberAccess]
        except (AttributeError, TypeError, ValueError):
            raise CheckpointError(
                f"{root / self._manifest} has no digests of the files, so {root} is not replaced; remove it yourself"
            ) from None


def _size(parts: Parts) -> int:
    return parts[-1][0] if parts else 0

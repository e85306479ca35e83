"""Paths that a checkpoint's own files name.

What lives here: the check that such a path stays inside the checkpoint's folder. What may not: reading files.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from qwen3vl_bridge.checkpoint.errors import CheckpointError


def inside(folder: Path, relative: object, named_by: str) -> Path:
    """The file of `folder` that an index or a metadata file names.

    The check is of the spelling alone: a download cache keeps its files as links to elsewhere, rightly so.

    Args:
        folder: the checkpoint's folder.
        relative: the path as it was read.
        named_by: who names it, for the error.

    Raises:
        CheckpointError: the path is empty, absolute or leads out of the folder.
    """
    if not isinstance(relative, str) or not relative or "\0" in relative:
        raise CheckpointError(f"{named_by} names the file {relative!r}, expected a path inside {folder}")
    path = PurePosixPath(relative)
    if path.is_absolute() or ".." in path.parts or "\\" in relative or path == PurePosixPath("."):
        raise CheckpointError(f"{named_by} names the file {relative!r}, which is outside {folder}")
    return folder / path


def file_size(path: Path, named_by: str) -> int:
    """Size of a file that must be there.

    Raises:
        CheckpointError: it is missing, unreadable, or not a file.
    """
    try:
        if not path.is_file():
            found = "something that is not a file" if path.exists() else "nothing"
            raise CheckpointError(f"{path}: found {found}, expected a file, which {named_by} names")
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; {named_by} names it") from error

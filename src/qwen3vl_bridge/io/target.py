"""The target path of a result: whether it may be written there, and what would be lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from qwen3vl_bridge.io.atomic import leaves
from qwen3vl_bridge.io.errors import CheckpointError

_SPARE = 16 << 20
# Number of files in the way that a message names.
_SHOWN = 20


def check_target(
    target: Path,
    *,
    overwrite: bool,
    replaceable: Callable[[Path], None],
    sources: tuple[Path, ...] = (),
) -> None:
    """Check that a result may be written to a path.

    Args:
        target: the path.
        overwrite: whether an earlier result may be replaced.
        replaceable: raises a CheckpointError for a folder that is not exactly an earlier result.
        sources: folders that are read meanwhile.

    Raises:
        CheckpointError: it may not.
    """
    for source in sources:
        one, other = target.resolve(), source.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise CheckpointError(f"{target} and the source {source} overlap, expected separate folders")
    if target.is_symlink() or os.path.ismount(target):
        kind = "a link" if target.is_symlink() else "a mount point"
        raise CheckpointError(f"{target} is {kind}, expected a path that a folder can be renamed to")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already, expected a new or empty folder; --overwrite replaces it")
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, so --overwrite does not replace it; remove it yourself")
    replaceable(target)


def refuse_others(folder: Path, own: Collection[str], kind: str) -> None:
    """Check that a folder, which is to be replaced, contains only certain files.

    Args:
        folder: the folder.
        own: those files, relative to it.
        kind: name of such a result, for the message.

    Raises:
        CheckpointError: it contains others, which would be lost.
    """
    names = (path.relative_to(folder).as_posix() for path in leaves(folder))
    refuse_loss(folder, [name for name in names if name not in own], f"files that are not part of our {kind}")


def refuse_loss(folder: Path, names: Collection[str], what: str) -> None:
    """Raise a CheckpointError that lists files of a folder which would be lost, if there are any.

    Args:
        folder: the folder, which is to be replaced.
        names: the files, relative to it.
        what: what they are.
    """
    if not names:
        return
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise CheckpointError(
        f"{folder} holds {len(names)} {what}, which would be deleted: "
        f"{', '.join(sorted(names)[:_SHOWN])}{more}; move them elsewhere, or remove {folder} yourself"
    )


def disk_of(target: Path) -> Path:
    """The nearest existing folder of a target's path, which is on the same disk."""
    return next(path for path in target.absolute().parents if path.exists())


def free_space(target: Path) -> int:
    """Free bytes on the target's disk."""
    return shutil.disk_usage(disk_of(target)).free


def space_of(folder: Path) -> int:
    """Bytes of the disk that a folder's files take."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def check_space(target: Path, nbytes: int) -> None:
    """Check that a result fits on the disk.

    Raises:
        CheckpointError: it does not.
    """
    free = free_space(target)
    if free < nbytes + _SPARE:
        raise CheckpointError(
            f"{disk_of(target)} has {free:,} bytes free, expected {nbytes + _SPARE:,} for {target.name}"
        )

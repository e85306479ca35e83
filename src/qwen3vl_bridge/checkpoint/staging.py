"""Results that are there wholly or not at all.

What lives here: the hidden folder beside the target in which a result grows, its way into place, what becomes of one
whose process died, and the space on the disk. What may not: what the result is.

Whatever kills the process, the target is either as it was before or complete: it comes into being by one rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from qwen3vl_bridge.checkpoint import journal
from qwen3vl_bridge.checkpoint.errors import CheckpointError

_SPARE = 16 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def check_target(
    target: Path,
    *,
    overwrite: bool,
    is_ours: Callable[[Path], bool],
    sources: tuple[Path, ...] = (),
    kind: str = "checkpoint",
) -> None:
    """Check that a result may be put at a place.

    Args:
        target: the place.
        overwrite: whether an earlier result may be replaced.
        is_ours: whether a folder looks like an earlier result; nothing else is ever replaced.
        sources: folders that are read meanwhile.
        kind: what a result is called.

    Raises:
        CheckpointError: it may not.
    """
    for source in sources:
        one, other = target.resolve(), source.resolve()
        if one == other or one in other.parents or other in one.parents:
            raise CheckpointError(f"{target} and the source {source} overlap, expected folders apart from each other")
    if target.is_symlink() or os.path.ismount(target):
        kind = "a link" if target.is_symlink() else "where a file system is mounted"
        raise CheckpointError(f"{target} is {kind}, expected a place that a folder can be moved to")
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already, expected a new or empty folder; --overwrite replaces it")
    if not target.is_dir() or not is_ours(target):
        raise CheckpointError(f"{target} is no {kind}, so --overwrite does not replace it; remove it yourself")


def _disk(target: Path) -> Path:
    return next(path for path in target.absolute().parents if path.exists())


def free_space(target: Path) -> int:
    """Bytes free on the disk where a result is to be."""
    return shutil.disk_usage(_disk(target)).free


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
            f"{_disk(target)} has {free:,} bytes free, expected {nbytes + _SPARE:,} for {target.name}"
        )


@contextlib.contextmanager
def staged(
    target: Path,
    say: Callable[[str], None],
    *,
    replace: Callable[[Path], bool] | None = None,
    sync: bool = True,
    claim: Callable[[Path], bool] = lambda _: False,
    keep: bool = False,
) -> Iterator[Path]:
    """A hidden folder beside the target, which becomes the target when the body ends without an exception.

    Args:
        target: where the result is to be.
        say: called with a line of text when something was cleaned up.
        replace: whether what is at the target in the end may be replaced; None if only an empty folder may.
        sync: whether to wait until everything is on disk before the result is put into place.
        claim: whether to go on in a folder that a process left when it died; any other such folder is removed.
        keep: whether the hidden folder stays when the body fails, for a later run to claim.

    Yields:
        The hidden folder.

    Raises:
        CheckpointError: another process is writing this target, or the file system refuses.
    """
    parent, made = target.absolute().parent, []
    try:
        made = _make_parents(parent)
        _restore(target, say)
        folder, lock = _claimed(target, say, claim) or _new_folder(target)
    except OSError as error:
        _remove_empty(made)
        raise CheckpointError(f"{target}: cannot be written beside: {error.strerror or error}") from error
    except CheckpointError:
        _remove_empty(made)
        raise
    left = f"what was written so far stays in {folder}" if keep else "nothing was left behind"
    try:
        yield folder
        if sync:
            sync_tree(folder)
        left = f"the whole result stays in {folder}" if keep else left
        shutil.rmtree(folder / journal.FOLDER)
        _move_into_place(folder, target, replace)
        if sync:
            _sync(parent)
    except BaseException as error:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
            _remove_empty(made)
        if isinstance(error, OSError):
            raise CheckpointError(f"{target}: {error.strerror or error}; {left}") from error
        raise
    finally:
        os.close(lock)


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _make_parents(parent: Path) -> list[Path]:
    missing = [path for path in (parent, *parent.parents) if not path.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def _lock(folder: Path) -> int:
    """Mark a folder as being worked on; the mark goes with the process, however that ends.

    It is a file, open for writing: some network file systems lock nothing else.

    Raises:
        BlockingIOError: another process works on it.
    """
    (folder / journal.FOLDER).mkdir(exist_ok=True)
    file = os.open(folder / journal.FOLDER / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise
    return file


def _new_folder(target: Path) -> tuple[Path, int]:
    folder = target.absolute().parent / f"{_prefix(target)}{uuid.uuid4().hex[:12]}"
    folder.mkdir()
    try:
        return folder, _lock(folder)
    except OSError:
        shutil.rmtree(folder)
        raise


def _restore(target: Path, say: Callable[[str], None]) -> None:
    """Bring back what a process had moved away when it died; where its place is taken again, it may go."""
    for old in sorted(target.absolute().parent.glob(f"{_glob_safe(_replaced(target))}*")):
        if os.path.lexists(target):
            shutil.rmtree(old)
        else:
            os.rename(old, target)
            say(f"brought back {target}, which a run that did not end had moved away")


def _claimed(target: Path, say: Callable[[str], None], claim: Callable[[Path], bool]) -> tuple[Path, int] | None:
    """A folder to go on in, with its lock. What else earlier processes left when they died is removed."""
    with contextlib.ExitStack() as locks:
        found = []
        for stale in sorted(target.absolute().parent.glob(f"{_glob_safe(_prefix(target))}*")):
            with contextlib.suppress(FileNotFoundError):
                try:
                    found.append((stale, _lock(stale)))
                except BlockingIOError:
                    raise CheckpointError(f"{target} is being written by another process, in {stale}") from None
                locks.callback(os.close, found[-1][1])
                if journal.is_written_by_another(stale):
                    raise CheckpointError(f"{target} is being written by another process, in {stale}")
        claimed = next(((folder, lock) for folder, lock in found if claim(folder)), None)
        for folder, lock in found:
            if (folder, lock) != claimed:
                shutil.rmtree(folder)
                say(f"removed {folder}, left behind by a run that did not end")
        # The copy keeps the lock when the first one is closed here.
        return claimed and (claimed[0], os.dup(claimed[1]))


def _glob_safe(text: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in text)


def replace_file(path: Path, content: bytes) -> None:
    """Give a small file new contents, wholly or not at all."""
    aside = path.with_name(f".{path.name}.unfinished")
    with aside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def sync_tree(folder: Path) -> None:
    """Wait until all files and folders below are on disk."""
    for root, _, names in os.walk(folder):
        for path in [*(Path(root, name) for name in names), Path(root)]:
            _sync(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _move_into_place(folder: Path, target: Path, replace: Callable[[Path], bool] | None) -> None:
    if replace is not None and target.is_dir() and any(target.iterdir()):
        if not replace(target):  # it is not what was there in the beginning
            raise CheckpointError(f"{target} is no checkpoint, so it is not replaced")
        _exchange(folder, target)
        shutil.rmtree(folder)
    else:
        os.rename(folder, target)  # an empty folder is replaced


def _exchange(one: Path, other: Path) -> None:
    """Swap two folders in one step, so that at every moment there is one in either place."""
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(one), os.fsencode(other)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(other))
    # A file system without the swap: for a moment there is none in the target's place, never half of one.
    old = one.with_name(f"{_replaced(other)}{uuid.uuid4().hex[:12]}")
    os.rename(other, old)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(old, other)
        raise
    os.rename(old, one)


def _replaced(target: Path) -> str:
    return f".{target.name}.replaced-"

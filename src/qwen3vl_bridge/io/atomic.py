"""Results that are either complete or absent: the target path, and the staged folder that becomes it.

Whenever the process is killed, the target is either as it was before or complete: it is created by one rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from qwen3vl_bridge.io.files import CheckpointError

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Random letters at the end of a hidden folder's name. Folders with the same prefix but another ending belong to users.
_MARK = 12
_SPARE = 16 << 20
# Number of files in the way that a message names.
_SHOWN = 20

# A folder's files, by path relative to it: size, modification time, inode number.
Snapshot = dict[str, tuple[int, int, int]]


@contextlib.contextmanager
def atomic_directory(
    target: Path,
    say: Callable[[str], None],
    *,
    replace: Callable[[Path], object] | None = None,
    claim: Callable[[Path], bool] = lambda _: False,
    keep: bool = False,
) -> Iterator[Path]:
    """A hidden folder next to the target, which becomes the target when the body ends without an exception.

    Args:
        target: final path of the result.
        say: called with a line of text when something was cleaned up, or could not be.
        replace: whether an earlier result at the target may be replaced. If one is there when the body has ended, it is
            called with the target, and raises to keep that folder; otherwise the new result takes its place. None: only
            an empty folder may be replaced.
        claim: whether to continue in a folder that a process left when it died; any other such folder is removed. It
            raises a CheckpointError if neither is right, as when some of several processes are still alive.
        keep: whether the hidden folder is kept when the body fails, for a later run to claim.

    Raises:
        CheckpointError: another process is writing this target, or the file system refuses. The target is unchanged.
    """
    parent = target.absolute().parent
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_remove_empty, [path for path in (parent, *parent.parents) if not path.exists()])
            parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(target))
            if _restore(target, say) and replace is None:
                raise CheckpointError(f"{target} exists, restored just now; --overwrite replaces it")
            folder = _claimed(target, say, claim)
            if folder is None:
                folder = _marked(target, "partial")
                folder.mkdir()
            own = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, own)
            _take_after(target, folder, at_least=stat.S_IRWXU)
        except OSError as error:
            raise CheckpointError(
                f"{target}: its parent folder cannot be written to: {error.strerror or error}"
            ) from error
        replaced: Snapshot | None = None
        left = f"the partial result stays in {folder}" if keep else "nothing was left"
        try:
            yield folder
            for path in (*folder.rglob("*"), folder):
                if not path.is_symlink():
                    _sync(path)
            left = f"the whole result stays in {folder}" if keep else left
            if replace is not None and target.is_dir() and any(target.iterdir()):
                replaced = snapshot(target)
                replace(target)  # it may have changed since the beginning
            _take_after(target, folder)
            _move_into_place(folder, target, swap=replaced is not None)
        except BaseException as error:
            if not _is_at(own, target):
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.rmtree(scratch_of(folder), ignore_errors=True)
                if isinstance(error, OSError):
                    raise CheckpointError(f"{target}: {error.strerror or error}; {left}") from error
                raise
            if not isinstance(error, KeyboardInterrupt):  # which came when there was nothing left to stop
                raise
        _settle(target, folder, replaced, say)


def _is_at(folder: int, path: Path) -> bool:
    """Whether an open folder is at a path."""
    try:
        return os.path.samestat(os.fstat(folder), path.stat())
    except OSError:
        return False


def scratch_of(folder: Path) -> Path:
    """A folder next to a hidden folder, for what is no part of the result; it goes when that does."""
    return folder.with_name(f"{folder.name}.scratch")


def _take_after(target: Path, folder: Path, at_least: int = 0) -> None:
    """Give a folder the group and the mode of the one that it replaces, so that the same users have access."""
    if not target.is_dir():
        return
    found = target.stat()
    with contextlib.suppress(OSError):  # a group that this process is not in
        os.chown(folder, -1, found.st_gid)
    with contextlib.suppress(OSError):  # a file system that does not store modes
        os.chmod(folder, stat.S_IMODE(found.st_mode) | at_least)


def _settle(target: Path, folder: Path, replaced: Snapshot | None, say: Callable[[str], None]) -> None:
    """Clean up after the result is in place. A failure here does not affect the result."""
    whole = f"{target} is complete and in place"
    with contextlib.suppress(OSError):
        _sync(target.absolute().parent)
    shutil.rmtree(scratch_of(folder), ignore_errors=True)
    if replaced is None:
        return
    if not folder.is_dir():  # there was no swap, and the last of three renames failed
        folder = next(iter(_all_marked(target, "replaced")), folder)
    try:
        if snapshot(folder) == replaced:
            shutil.rmtree(folder)
            return
        kept = folder.with_name(_marked(target, "replaced").name[1:])
        os.rename(folder, kept)
        say(
            f"{whole}, but the folder it replaced was written to meanwhile; that folder stays in {kept}: remove it "
            "yourself"
        )
    except OSError as error:
        said = f"what it replaced stays in {folder} ({error.strerror or error})"
        say(f"{whole}, but {said}: remove that yourself")


def _marked(target: Path, kind: str) -> Path:
    """A new path of a hidden folder of ours next to a target."""
    return target.absolute().parent / f".{target.name}.{kind}-{uuid.uuid4().hex[:_MARK]}"


def _all_marked(target: Path, kind: str, ending: str = "") -> list[Path]:
    """Those hidden folders of ours that are next to a target."""
    pattern = f"{glob.escape(f'.{target.name}.{kind}-')}{'[0-9a-f]' * _MARK}{ending}"
    return sorted(target.absolute().parent.glob(pattern))


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keep other processes from writing a target; the lock is released when the process ends, however that happens.

    It is on a file next to the target, so that it outlives the move into place, and on one open for writing: some
    network file systems lock nothing else.
    """
    path = target.absolute().parent / f".{target.name}.partial-lock"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise CheckpointError(f"{target} is being written by another process") from None
        except OSError:
            os.close(file)
            raise
        if _is_at(file, path):
            break
        os.close(file)  # of a process that ended, and removed it, since it was opened here
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _restore(target: Path, say: Callable[[str], None]) -> bool:
    """Bring back what a process had moved away when it died; returns whether anything was.

    If its path is taken again it is kept, under a visible name.
    """
    restored = False
    for old in _all_marked(target, "replaced"):
        if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
            os.rename(old, target)
            restored = True
            say(f"restored {target}, which an interrupted run had moved away")
        else:
            kept = old.with_name(old.name[1:])
            os.rename(old, kept)
            say(f"the earlier {target}, which an interrupted run had moved away, stays in {kept}: remove it yourself")
    return restored


def _claimed(target: Path, say: Callable[[str], None], claim: Callable[[Path], bool]) -> Path | None:
    """A folder to continue in. Other folders of processes that died are removed."""
    found = _all_marked(target, "partial")
    # All are checked before one is removed: one that must not be lost stops the run.
    wanted = next(iter([folder for folder in found if claim(folder)]), None)
    for folder in found:
        if folder != wanted:
            shutil.rmtree(folder)
            say(f"removed {folder}, left by an interrupted run")
    for scratch in _all_marked(target, "partial", ".scratch"):
        if wanted is None or scratch != scratch_of(wanted):  # also one whose folder is in place already
            shutil.rmtree(scratch)
    return wanted


def _move_into_place(folder: Path, target: Path, *, swap: bool) -> None:
    """Make the folder the target; what it replaces, if anything, is then where the folder was."""
    if not swap:
        os.rename(folder, target)  # an empty folder is replaced
        return
    # Both in one step, so that each path always has one of them.
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(folder), os.fsencode(target)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(target))
    # A file system without the swap: for a moment the target does not exist, but it is never incomplete.
    old = _marked(target, "replaced")
    try:
        os.rename(target, old)
        os.rename(folder, target)
    except BaseException:
        if old.is_dir() and not os.path.lexists(target):
            os.rename(old, target)
        raise
    with contextlib.suppress(OSError):  # otherwise it is removed under its present name
        os.rename(old, folder)


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file's contents atomically."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def snapshot(folder: Path) -> Snapshot:
    """State of a folder's contents, to detect changes by comparing two snapshots; an OSError if it cannot be read."""
    found = ((path, path.lstat()) for path in leaves(folder))
    return {path.relative_to(folder).as_posix(): (it.st_size, it.st_mtime_ns, it.st_ino) for path, it in found}


def leaves(folder: Path) -> Iterator[Path]:
    """All files and symbolic links below; links are not followed; an OSError if a folder cannot be read."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in (*names, *links))


def check_target(
    target: Path, *, overwrite: bool, replaceable: Callable[[Path], None], sources: tuple[Path, ...] = ()
) -> None:
    """Raise a CheckpointError if a result may not be written to a path.

    With `overwrite` an earlier result may be replaced; `replaceable` raises a CheckpointError for a folder that is not
    exactly one. `sources` are folders that are read meanwhile.
    """
    for source in sources:
        ours, theirs = target.resolve(), source.resolve()
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
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
    """Raise a CheckpointError if a folder to be replaced has files other than `own`, those of our result of a kind."""
    names = (path.relative_to(folder).as_posix() for path in leaves(folder))
    refuse_loss(folder, [name for name in names if name not in own], f"files that are not part of our {kind}")


def refuse_loss(folder: Path, names: Collection[str], what: str) -> None:
    """Raise a CheckpointError that lists files which would be lost when a folder is replaced, if there are any."""
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
    """Raise a CheckpointError if a result does not fit on the disk."""
    free = free_space(target)
    if free < nbytes + _SPARE:
        raise CheckpointError(
            f"{disk_of(target)} has {free:,} bytes free, expected {nbytes + _SPARE:,} for {target.name}"
        )

"""Write a folder so that it is either complete or absent: write a hidden folder, then rename it to the target.

Whenever the process is killed, the target is either unchanged or complete. There is one exception: if the file system
cannot swap two folders, a replaced target is absent for a moment. If the process is killed then, the next call of
`atomic_directory` restores it.
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

from qwen3vl_bridge.core.files import CheckpointError, is_open_at

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# Number of random letters at the end of a hidden folder's name. A folder with any other ending belongs to the user.
_RANDOM_LETTERS = 12
_SPARE_BYTES = 16 << 20
# Number of files that a message lists.
_MAX_LISTED = 20

# State of a folder, to detect changes: size, modification time and inode number of each file, by relative path.
Snapshot = dict[str, tuple[int, int, int]]


@contextlib.contextmanager
def atomic_directory(
    target: Path,
    notify: Callable[[str], None],
    *,
    check_replaceable: Callable[[Path], object] | None = None,
    can_resume: Callable[[Path], bool] = lambda _: False,
    keep: bool = False,
) -> Iterator[Path]:
    """Context manager: yield a hidden folder, which is renamed to `target` if the `with` block raises no exception.

    Args:
        target: final path of the result.
        notify: called with a line of text for the user when something was cleaned up, or could not be.
        check_replaceable: called with the target if it exists at the end of the block. It raises an exception to keep
            the target; otherwise the new result replaces it. None: only an empty folder may be replaced.
        can_resume: called with each hidden folder that a dead process left. It returns True to continue in this
            folder; the others are removed. It may raise CheckpointError, such as if some processes are still alive.
        keep: whether to keep the hidden folder if the block raises, so that a later run can resume.

    Raises:
        CheckpointError: another process is writing this target, or the file system reports an error. The target is
            unchanged.
    """
    parent = target.absolute().parent
    with contextlib.ExitStack() as stack:
        try:
            stack.callback(_remove_empty, [path for path in (parent, *parent.parents) if not path.exists()])
            parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(target))
            if _restore(target, notify) and check_replaceable is None:
                raise CheckpointError(
                    f"{target} exists: it was just restored after an interrupted run; --overwrite replaces it"
                )
            folder = _find_resumable(target, notify, can_resume)
            if folder is None:
                folder = _new_hidden(target, "partial")
                folder.mkdir()
            descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            stack.callback(os.close, descriptor)
            _copy_permissions(target, folder, at_least=stat.S_IRWXU)
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
            left = f"the complete result stays in {folder}" if keep else left
            if check_replaceable is not None and target.is_dir() and any(target.iterdir()):
                replaced = snapshot(target)
                check_replaceable(target)  # it may have changed since the beginning
            _copy_permissions(target, folder)
            _move_into_place(folder, target, swap=replaced is not None)
        except BaseException as error:
            if not is_open_at(descriptor, target):
                if not keep:
                    shutil.rmtree(folder, ignore_errors=True)
                    shutil.rmtree(scratch_folder(folder), ignore_errors=True)
                if isinstance(error, OSError):
                    raise CheckpointError(f"{target}: {error.strerror or error}; {left}") from error
                raise
            # The result is in place. An interrupt that came after the rename has nothing left to stop.
            if not isinstance(error, KeyboardInterrupt):
                raise
        _clean_up(target, folder, replaced, notify)


def scratch_folder(folder: Path) -> Path:
    """Return the path for temporary files next to a hidden folder, which the caller may create.

    `atomic_directory` removes it with the hidden folder if the `with` block raises, and after the rename otherwise.
    """
    return folder.with_name(f"{folder.name}.scratch")


def _copy_permissions(target: Path, folder: Path, at_least: int = 0) -> None:
    """Give a folder the group and mode of the target that it replaces, and at least the mode bits `at_least`."""
    if not target.is_dir():
        return
    found = target.stat()
    with contextlib.suppress(OSError):  # the process may not be in the group
        os.chown(folder, -1, found.st_gid)
    with contextlib.suppress(OSError):  # the file system may not store modes
        os.chmod(folder, stat.S_IMODE(found.st_mode) | at_least)


def _clean_up(target: Path, folder: Path, replaced: Snapshot | None, notify: Callable[[str], None]) -> None:
    """Remove the folder that the result has replaced. Failures do not raise an error, they are passed to `notify`.

    If the folder has changed since its snapshot, rename it to a visible name instead.

    Args:
        target: path of the result.
        folder: path to which the replaced folder was renamed.
        replaced: snapshot of the replaced folder; None if nothing was replaced.
        notify: called with a line of text for the user.
    """
    in_place = f"{target} is complete and in place"
    with contextlib.suppress(OSError):
        _sync(target.absolute().parent)
    shutil.rmtree(scratch_folder(folder), ignore_errors=True)
    if replaced is None:
        return
    if not folder.is_dir():  # the file system cannot swap folders, and the last of three renames failed
        folder = next(iter(_find_hidden(target, "replaced")), folder)
    try:
        if snapshot(folder) == replaced:
            shutil.rmtree(folder)
            return
        kept = folder.with_name(_new_hidden(target, "replaced").name[1:])
        os.rename(folder, kept)
        notify(
            f"{in_place}, but the folder it replaced was written to meanwhile; that folder stays in {kept}: remove it "
            "yourself"
        )
    except OSError as error:
        reason = f"the folder that it replaced stays in {folder} ({error.strerror or error})"
        notify(f"{in_place}, but {reason}: remove it yourself")


def _new_hidden(target: Path, kind: str) -> Path:
    """Return an unused path for a hidden folder next to a target. `kind`, "partial" or "replaced", is in its name."""
    return target.absolute().parent / f".{target.name}.{kind}-{uuid.uuid4().hex[:_RANDOM_LETTERS]}"


def _find_hidden(target: Path, kind: str, ending: str = "") -> list[Path]:
    """Return existing paths next to a target with a name from `_new_hidden(target, kind)`, followed by `ending`."""
    pattern = f"{glob.escape(f'.{target.name}.{kind}-')}{'[0-9a-f]' * _RANDOM_LETTERS}{ending}"
    return sorted(target.absolute().parent.glob(pattern))


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Context manager that holds a target's lock. The lock is released when the process ends, even if it is killed.

    Raises:
        CheckpointError: another process holds the lock.
    """
    path = target.absolute().parent / f".{target.name}.partial-lock"
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise CheckpointError(f"{target} is being written by another process: wait until it ends") from None
        except OSError:
            os.close(file)
            raise
        if is_open_at(file, path):
            break
        os.close(file)  # the process that created it has ended and removed it since it was opened here
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(file)


def _restore(target: Path, notify: Callable[[str], None]) -> bool:
    """Move an earlier target back if a process died after moving it away. Return True if the target was restored.

    If the path of the target is in use again, rename the earlier target to a visible name instead.
    """
    restored = False
    for old in _find_hidden(target, "replaced"):
        if not os.path.lexists(target) or (target.is_dir() and not target.is_symlink() and not any(target.iterdir())):
            os.rename(old, target)
            restored = True
            notify(f"restored {target}, which an interrupted run had moved away")
        else:
            kept = old.with_name(old.name[1:])
            os.rename(old, kept)
            notify(
                f"the earlier {target}, which an interrupted run had moved away, stays in {kept}: remove it yourself"
            )
    return restored


def _find_resumable(target: Path, notify: Callable[[str], None], can_resume: Callable[[Path], bool]) -> Path | None:
    """Return the hidden folder that `can_resume` accepts, or None. Remove the other folders of dead processes."""
    found = _find_hidden(target, "partial")
    # Check all folders before removing one: a folder that must not be lost stops the run.
    resumable = next(iter([folder for folder in found if can_resume(folder)]), None)
    for folder in found:
        if folder != resumable:
            shutil.rmtree(folder)
            notify(f"removed {folder}, left by an interrupted run")
    for scratch in _find_hidden(target, "partial", ".scratch"):
        # A scratch folder also stays if the process died just after the rename.
        if resumable is None or scratch != scratch_folder(resumable):
            shutil.rmtree(scratch)
    return resumable


def _move_into_place(folder: Path, target: Path, *, swap: bool) -> None:
    """Rename `folder` to `target`. With `swap`, exchange both: the old target is at the path `folder` afterwards."""
    if not swap:
        os.rename(folder, target)  # replaces an empty folder
        return
    # Swap in one step, so that both paths exist at any time.
    libc = ctypes.CDLL(None, use_errno=True)
    paths = os.fsencode(folder), os.fsencode(target)
    if libc.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(target))
    # The file system cannot swap: for a moment the target does not exist, but it is never incomplete.
    old = _new_hidden(target, "replaced")
    try:
        os.rename(target, old)
        os.rename(folder, target)
    except BaseException:
        if old.is_dir() and not os.path.lexists(target):
            os.rename(old, target)
        raise
    with contextlib.suppress(OSError):  # if this fails, `_clean_up` removes it under its present name
        os.rename(old, folder)


def replace_file(path: Path, content: bytes) -> None:
    """Replace the contents of a file atomically: readers see the old contents or the new ones."""
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
    """Return the state of all files in a folder, to detect changes: relative path -> (size, modification time, inode).

    Raise OSError on failure.
    """
    found = ((path, path.lstat()) for path in list_files(folder))
    return {path.relative_to(folder).as_posix(): (it.st_size, it.st_mtime_ns, it.st_ino) for path, it in found}


def list_files(folder: Path) -> Iterator[Path]:
    """Yield all files and symbolic links below a folder, without following links. Raise OSError on failure."""

    def fail(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=fail):
        links = [name for name in folders if os.path.islink(os.path.join(root, name))]
        yield from (Path(root, name) for name in (*names, *links))


def check_target(
    target: Path, *, overwrite: bool, check_replaceable: Callable[[Path], None], sources: tuple[Path, ...] = ()
) -> None:
    """Check that a result may be written to a path.

    Args:
        target: the path.
        overwrite: whether an earlier result may be replaced.
        check_replaceable: raises CheckpointError if a folder is not exactly an earlier result.
        sources: folders that are read to make the result.

    Raises:
        CheckpointError: the target exists and may not be replaced, overlaps a source, or is a link or mount point.
    """
    for source in sources:
        ours, theirs = target.resolve(), source.resolve()
        if ours == theirs or ours in theirs.parents or theirs in ours.parents:
            raise CheckpointError(
                f"{target} and the source {source} are the same folder, or one contains the other; use separate folders"
            )
    if target.is_symlink() or os.path.ismount(target):
        kind = "a link" if target.is_symlink() else "a mount point"
        raise CheckpointError(
            f"{target} is {kind}, which a renamed folder cannot replace: use another path, such as {target / 'new'}"
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{target} exists already, expected a new or empty folder; --overwrite replaces it")
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file, so --overwrite does not replace it; remove it yourself")
    check_replaceable(target)


def check_only_own_files(folder: Path, own: Collection[str], kind: str) -> None:
    """Raise CheckpointError if a folder that will be replaced contains files other than `own`.

    Args:
        folder: the folder.
        own: relative paths of the files that this package has written.
        kind: kind of result in the folder, for the message.
    """
    names = (path.relative_to(folder).as_posix() for path in list_files(folder))
    check_nothing_lost(folder, [name for name in names if name not in own], f"files that are not part of our {kind}")


def check_nothing_lost(folder: Path, names: Collection[str], what: str) -> None:
    """Raise CheckpointError if `names`, the files that replacing a folder would delete, is not empty.

    `what` describes the files in the message.
    """
    if not names:
        return
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    raise CheckpointError(
        f"{folder} holds {len(names)} {what}, which would be deleted: "
        f"{', '.join(sorted(names)[:_MAX_LISTED])}{more}; move them elsewhere, or remove {folder} yourself"
    )


def disk_of(target: Path) -> Path:
    """Return the nearest existing parent folder of `target`, which will be on the same disk."""
    return next(path for path in target.absolute().parents if path.exists())


def free_space(target: Path) -> int:
    """Return the number of free bytes on the disk of a target."""
    return shutil.disk_usage(disk_of(target)).free


def used_space(folder: Path) -> int:
    """Return the number of bytes on disk that the files below a folder use."""
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def check_space(target: Path, nbytes: int) -> None:
    """Raise CheckpointError if a result of `nbytes` bytes does not fit on the disk of a target."""
    free = free_space(target)
    if free < nbytes + _SPARE_BYTES:
        raise CheckpointError(
            f"{disk_of(target)} has {free:,} bytes free, expected {nbytes + _SPARE_BYTES:,} for {target.name}: free "
            "some space"
        )

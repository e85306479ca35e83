"""Lock the folder of a run by creating a file that names the training process.

The file is created with O_EXCL, which is atomic on NFS and Lustre too. File locks (flock) are not used: depending on
mount options, they fail or exclude only processes of the same node.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import logging
import os
import socket
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from qwen3vl_bridge.core.files import CheckpointError, is_open_at, parse_json

logger = logging.getLogger(__name__)

FILE = "run.lock"
# Seconds between renewals of a lock, and seconds to wait for a renewal if the holder cannot be seen from here.
# Modification times are compared with each other, never with this node's clock.
RENEWAL_INTERVAL, RENEWAL_TIMEOUT = 10.0, 90.0
_POLL_INTERVAL = 1.0
# Environment variable that identifies the job -> its name in messages.
_JOB_VARIABLES = {"SLURM_JOB_ID": "Slurm job", "TORCHELASTIC_RUN_ID": "torchrun id"}


class FolderInUseError(CheckpointError):
    """Raised if another run that is still alive has locked the folder."""


class RunLock:
    """Lock on a run's folder, held by one process until this object is deleted or the process ends.

    A killed process leaves the lock file. If the process can be seen from here (same boot of the same kernel, same
    process namespace), its lock is taken over at once. Otherwise (another node or container) the lock is taken over
    when it has not been renewed for `RENEWAL_TIMEOUT` seconds. Use `lock_folder`, which returns the same lock to all
    callers in a process.

    Raises:
        FolderInUseError: Another run has locked the folder; the message names its process.
        OSError: The folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        while True:
            try:
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                break
            except FileExistsError:
                self._take_over()
        ended = threading.Event()
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(json.dumps(_this_process()).encode())
            os.fsync(descriptor)  # makes it visible to other nodes, and detects a full disk on network file systems
            threading.Thread(
                target=_keep_renewing, args=(self.path, descriptor, ended), name="run.lock", daemon=True
            ).start()
        except BaseException:
            self.path.unlink(missing_ok=True)  # otherwise the next start waits for an unnamed holder
            os.close(descriptor)
            raise
        self.descriptor = descriptor
        self.release = weakref.finalize(self, _release, self.path, descriptor, ended, os.getpid())

    def _take_over(self) -> None:
        """Remove an existing lock file if the process that holds the lock has ended, or is this process.

        If the process cannot be seen from here, wait for a renewal. Raise FolderInUseError if the process is alive.
        """
        first, deadline = _read_lock(self.path), None
        while first is not None and (found := _read_lock(self.path)) is not None:
            holder, alive = found.holder, _is_alive(found.holder)
            if holder.get("id") != first.holder.get("id", holder.get("id")):  # another process was faster
                return
            if alive is False or _is_this_process(holder):
                if alive is False:
                    logger.warning(
                        "%s: %s has ended without releasing the lock; taking it over", self.path, _describe(holder)
                    )
                _remove(self.path, found)
                return
            if alive or found.renewed != first.renewed:
                raise _in_use(self.path, holder, "its process is running" if alive else "it renewed its lock just now")
            if deadline is None:
                deadline = time.monotonic() + RENEWAL_TIMEOUT
                logger.warning(
                    "%s is locked by %s, which cannot be seen from this node: waiting up to %.0f s for it to renew the "
                    "lock. If the lock is not renewed, the other run has ended, and this run continues",
                    *(self.path.parent, _describe(holder), RENEWAL_TIMEOUT),
                )
            if time.monotonic() > deadline:
                logger.warning("%s: %s did not renew the lock; taking it over", self.path, _describe(holder))
                _remove(self.path, found)
                return
            time.sleep(_POLL_INTERVAL)


_locks: weakref.WeakValueDictionary[tuple[int, Path], RunLock] = weakref.WeakValueDictionary()


def lock_folder(folder: Path) -> RunLock:
    """Lock a run's folder and return the lock, which is released with the last reference to it.

    Raises:
        FolderInUseError, OSError: See `RunLock`.
    """
    key = os.getpid(), folder.resolve()  # a forked process has copies of these objects, but no locks
    lock = _locks.get(key)
    if lock is None or not lock.release.alive or not is_open_at(lock.descriptor, lock.path):
        lock = _locks[key] = RunLock(folder)
    return lock


class _LockState(NamedTuple):
    """The contents of a lock file, and the time when its lock was last renewed."""

    renewed: int  # modification time in nanoseconds
    holder: dict[str, Any]  # describes the process that holds the lock; see `_this_process`


def check_not_locked(folder: Path) -> None:
    """Raise FolderInUseError if a running process on this node has locked a folder. Nothing is changed."""
    found = _read_lock(folder / FILE)
    if found is not None and _is_alive(found.holder):
        raise _in_use(folder / FILE, found.holder, "its process is running")


def _in_use(path: Path, holder: dict[str, Any], proof: str) -> FolderInUseError:
    return FolderInUseError(
        f"{path.parent} is in use by another run, {_describe(holder)}: {proof}. Use another folder for this run "
        "(--save, checkpoint.save), or end the other run first"
    )


def _this_process() -> dict[str, Any]:
    """Return a dict that describes this process, to be written to the lock file."""
    pid = os.getpid()
    # The id distinguishes locks: a new file may have the inode number of a removed one.
    holder = _process_scope() | {"pid": pid, "started": _start_time(pid), "id": uuid.uuid4().hex}
    holder["since"] = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    # torchrun's id is "none" unless one is given.
    holder |= {
        title: os.environ[name] for name, title in _JOB_VARIABLES.items() if os.environ.get(name, "none") != "none"
    }
    with contextlib.suppress(OSError, KeyError):  # a user without a name, as in some containers
        holder["user"] = getpass.getuser()
    return holder


def _process_scope() -> dict[str, str]:
    """Return the host, boot id and process namespace. Process ids can be compared only if all three are equal."""
    place = {"host": socket.gethostname(), "boot": "", "namespace": ""}
    with contextlib.suppress(OSError):
        place["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place["namespace"] = os.readlink("/proc/self/ns/pid")
    return place


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, in clock ticks since the boot of the machine.

    Return "" if the time cannot be read, and None if the process has ended.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:  # the process belongs to another user
        pass
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # hidden from this user
        return ""
    return None if state in "ZX" else fields[18]


def _is_alive(holder: dict[str, Any]) -> bool | None:
    """Return whether the process that holds a lock is running; None if it cannot be seen from this process."""
    place = _process_scope()
    if not place["boot"] or any(holder.get(name) != value for name, value in place.items() if name != "host"):
        return None
    started = _start_time(int(holder["pid"]))
    return started is not None and (started == "" or started == holder["started"])  # process ids are reused


def _is_this_process(holder: dict[str, Any]) -> bool:
    return holder.items() >= (_process_scope() | {"pid": os.getpid(), "started": _start_time(os.getpid())}).items()


def _read_lock(path: Path) -> _LockState | None:
    """Return the state of a lock file, or None if the file does not exist."""
    try:
        with path.open() as file:
            status, text = os.fstat(file.fileno()), file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    try:
        holder = parse_json(text)
    except ValueError:  # created, but not written yet
        holder = {}
    return _LockState(status.st_mtime_ns, holder)


def _describe(holder: dict[str, Any]) -> str:
    """Return a text for messages that describes the process that holds the lock."""
    if "pid" not in holder:
        return "a process that has not written its name"
    more = [
        f"started {holder.get('since')}",
        *(f"{title} {holder[title]}" for title in _JOB_VARIABLES.values() if title in holder),
    ]
    if "user" in holder:
        more.append(f"user {holder['user']}")
    return f"process {holder['pid']} on {holder['host']} ({', '.join(more)})"


def _remove(path: Path, seen: _LockState) -> None:
    """Remove a lock file if it still has the state `seen`."""
    moved = path.with_name(f".{FILE}.{uuid.uuid4().hex[:12]}")
    try:
        path.rename(moved)
    except FileNotFoundError:
        return
    if _read_lock(moved) != seen:
        with contextlib.suppress(FileExistsError):
            os.link(moved, path)
    moved.unlink()


def _keep_renewing(path: Path, descriptor: int, ended: threading.Event) -> None:
    """Renew the modification time of this process's lock file until the lock is released."""
    failed = False
    while not ended.wait(RENEWAL_INTERVAL):
        try:
            os.utime(descriptor)
            removed = not os.fstat(descriptor).st_nlink
        except OSError as error:  # may be temporary, for example a failover of a network file system
            if not failed:
                logger.warning(
                    "%s could not be renewed (%s): trying again every %g s. If this fails for %g s, another run may "
                    "take the folder over",
                    *(path, error.strerror, RENEWAL_INTERVAL, RENEWAL_TIMEOUT),
                )
            failed = True
            continue
        failed = False
        if removed:
            logger.warning("%s was removed and is no longer renewed: make sure that no other run uses the folder", path)
            ended.wait()
    # Closed in this thread: elsewhere it would race with `os.utime`, which could then get another file's descriptor.
    os.close(descriptor)


def _release(path: Path, descriptor: int, ended: threading.Event, pid: int) -> None:
    """Remove the lock file if it still exists, and stop renewing it. Do nothing in a forked process."""
    if os.getpid() != pid:
        return
    if is_open_at(descriptor, path):
        with contextlib.suppress(OSError):
            path.unlink()
    ended.set()

"""Lock of a run's folder between processes."""

import errno
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

from qwen3vl_bridge.training import run_lock
from qwen3vl_bridge.training.checkpoint_manager import MANAGER
from qwen3vl_bridge.training.run_lock import FILE, FolderInUseError, lock_folder

import pytest
from megatron.bridge.training.callbacks import Callback

from tests.training.running import replicated, run_bridges_loop

HOLD = """
import sys, time
from pathlib import Path
from qwen3vl_bridge.training.run_lock import FolderInUseError, lock_folder
try:
    lock = lock_folder(Path(sys.argv[1]))
except FolderInUseError as error:
    print(error, flush=True)
    sys.exit(1)
print("held", flush=True)
sys.stdin.read()
"""


def start(folder, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | variables,
    )  # fmt: skip


def owner(folder):
    return json.loads((folder / FILE).read_text())["pid"]


def wait_until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def holder(tmp_path):
    process = start(tmp_path, SLURM_JOB_ID="77")
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_run_lock_raises_if_held_by_running_process(holder, tmp_path):
    before = (tmp_path / FILE).read_text()
    with pytest.raises(FolderInUseError, match=rf"process {holder.pid} on \S+ \(started 2.*Slurm job 77.*is running"):
        lock_folder(tmp_path)
    assert (tmp_path / FILE).read_text() == before and os.listdir(tmp_path) == [FILE]


def test_run_lock_of_killed_process_is_taken_over(holder, tmp_path, caplog):
    holder.send_signal(signal.SIGKILL)
    while not os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT):  # stays a zombie, because nobody reaps it
        time.sleep(0.01)
    lock = lock_folder(tmp_path)
    assert f"process {holder.pid} on" in caplog.text and owner(tmp_path) == os.getpid()
    lock.release()
    assert not os.listdir(tmp_path)


def test_run_lock_file_is_removed_when_process_ends(holder, tmp_path):
    holder.communicate()
    assert holder.returncode == 0 and not os.listdir(tmp_path)


def test_run_lock_can_be_taken_again_by_same_process(tmp_path):
    """Also by another path, and after the folder was removed and created again."""
    folder, link = tmp_path / "run", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    first, file = lock_folder(folder), (folder / FILE).read_text()
    second = lock_folder(link)
    del first
    assert (folder / FILE).read_text() == file
    shutil.rmtree(folder)
    folder.mkdir()
    third = lock_folder(folder)
    assert owner(folder) == os.getpid()
    del second
    assert owner(folder) == os.getpid()
    del third
    assert not os.listdir(folder)


def test_run_lock_in_forked_process_raises(tmp_path):
    lock, answers = lock_folder(tmp_path), multiprocessing.get_context("fork").SimpleQueue()

    def second():
        try:
            answers.put(str(lock_folder(tmp_path)))
        except FolderInUseError as error:
            answers.put(str(error))

    process = multiprocessing.get_context("fork").Process(target=second)
    process.start()
    process.join()
    assert f"in use by another run, process {os.getpid()} on" in answers.get() and owner(tmp_path) == os.getpid()
    lock.release()


def test_run_lock_with_reused_process_id_is_taken_over(tmp_path):
    lock = lock_folder(tmp_path)
    holder = json.loads((tmp_path / FILE).read_text())
    lock.release()
    (tmp_path / FILE).write_text(json.dumps(holder | {"started": "1"}))
    lock_folder(tmp_path).release()


@pytest.fixture
def on_another_node(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "RENEWAL_TIMEOUT", 2.0)
    monkeypatch.setattr(run_lock, "_POLL_INTERVAL", 0.05)
    here = run_lock._this_process()
    (tmp_path / FILE).write_text(json.dumps(here | {"boot": "another", "host": "node7"}))
    return tmp_path


def test_run_lock_renewed_by_process_on_different_node_raises(on_another_node):
    timer = threading.Timer(0.5, os.utime, [on_another_node / FILE])
    timer.start()
    with pytest.raises(FolderInUseError, match=r"on node7 .*: it renewed its lock just now"):
        lock_folder(on_another_node)
    timer.join()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("content", [None, ""])
def test_run_lock_not_renewed_by_different_node_is_taken_over(content, on_another_node, caplog):
    if content is not None:  # the node failed before the holder was written
        (on_another_node / FILE).write_text(content)
    begun = time.monotonic()
    lock_folder(on_another_node).release()
    assert 2 <= time.monotonic() - begun < 5
    assert "waiting up to 2 s" in caplog.text and "did not renew the lock; taking it over" in caplog.text


def test_run_lock_renewal_leaves_lock_file_of_different_run_unchanged(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "RENEWAL_INTERVAL", 0.05)
    lock, file = lock_folder(tmp_path), tmp_path / FILE
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns != before)
    file.unlink()
    file.write_text("of another run")
    os.utime(file, (1, 1))
    wait_until(lambda: "was removed and is no longer renewed" in caplog.text)
    time.sleep(0.1)
    with file.open():  # gets the lowest free descriptor: the lock's, if it was closed
        lock.release()
    assert file.read_text() == "of another run" and file.stat().st_mtime == 1
    wait_until(lambda: not is_open(lock.descriptor))


def is_open(descriptor):
    return os.path.exists(f"/proc/self/fd/{descriptor}")


def test_run_lock_renewal_is_retried_after_failure(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(run_lock, "RENEWAL_INTERVAL", 0.05)
    failures = iter([errno.EIO, errno.ESTALE, errno.EIO])
    utime = os.utime

    def failing(*args):
        if (number := next(failures, None)) is not None:
            raise OSError(number, os.strerror(number))
        utime(*args)

    monkeypatch.setattr(os, "utime", failing)
    lock, file = lock_folder(tmp_path), tmp_path / FILE
    before = file.stat().st_mtime_ns
    wait_until(lambda: file.stat().st_mtime_ns != before)
    assert caplog.text.count("could not be renewed (Input/output error): trying again every 0.05 s") == 1
    lock.release()
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("room", [0, 10])
def test_run_lock_on_full_disk_leaves_no_file(room, tmp_path):
    """A limit on file sizes acts like a full disk: only the first bytes are written."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            lock_folder(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not os.listdir(tmp_path)
    lock_folder(tmp_path).release()


class Witness(Callback):
    """Record the owner of the lock at each evaluation."""

    def __init__(self, folder):
        self.folder, self.owners = folder, []

    def on_eval_end(self, context):
        self.owners.append(owner(self.folder))

    on_test_end = on_eval_end


@pytest.mark.parametrize("manager", [MANAGER, "megatron.bridge.training.checkpointing.DefaultCheckpointManager"])
def test_run_holds_folder_lock_during_final_evaluation(manager, inputs, tmp_path):
    """The checkpoint manager locks the folder, or the log if the manager is Megatron-Bridge's."""
    cfg = replicated(
        inputs, tmp_path, train__train_iters=1, scheduler__lr_warmup_iters=0, validation__eval_iters=1,
        validation__eval_interval=2,
        checkpoint__save_interval=0, checkpoint__pretrained_checkpoint=None, checkpoint__custom_manager_class=manager,
        dataset__test_path=str(inputs.data / "test.jsonl"),
    )  # fmt: skip
    witness = Witness(tmp_path)
    run_bridges_loop(cfg, witness)
    assert witness.owners == [os.getpid()] * 2 and not (tmp_path / FILE).exists()


def test_only_one_of_six_processes_takes_over_stale_run_lock(tmp_path):
    lock = lock_folder(tmp_path)
    stale = json.loads((tmp_path / FILE).read_text()) | {"started": "1"}
    lock.release()
    (tmp_path / FILE).write_text(json.dumps(stale))
    processes = [start(tmp_path) for _ in range(6)]
    said = [process.stdout.readline() for process in processes]
    assert said.count("held\n") == 1 and sum("is in use by another run" in line for line in said) == 5
    for process in processes:
        process.communicate()
    assert not os.listdir(tmp_path)

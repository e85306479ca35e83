"""Processes that read ahead outlive the signal that asks a run to save and leave: torchrun sends it to them too."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

from qwen3vl_bridge.data import BatchStream
from qwen3vl_bridge.data.loading.batch_stream import ignoring

import pytest
from torch.utils.data import DataLoader, Dataset

from ..conftest import picture
from ..energon.test_energon import asked
from ..energon.webdatasets import provider_of, write_checkpoint, write_folder

AHEAD = 8  # more batches than workers have read ahead


def signalled(batches: Iterator) -> int:
    """Send the signal to all processes that read ahead, and ask for more; returns how many are still there."""
    others = multiprocessing.active_children()
    list(islice(batches, 2))  # two processes at most take turns: each has begun, and knows what to ignore
    workers = [process for process in multiprocessing.active_children() if process not in others]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert len(list(islice(batches, AHEAD))) == AHEAD
    return sum(worker.is_alive() for worker in workers)


@pytest.fixture(scope="module")
def energon(processor, tmp_path_factory):
    """A provider of conversations about a picture each."""
    folder = tmp_path_factory.mktemp("workers")
    content = picture(folder / "picture.png", 32, 32).read_bytes()
    parts = asked({"type": "image", "image": "png"}, {"type": "text", "text": "which"})
    samples = [(f"s{n}", {"json": {"messages": parts}, "png": content}) for n in range(8)]
    data = write_folder(folder / "wds", train=[samples[:4], samples[4:6]], val=[samples[6:7]], test=[samples[7:]])
    hf = write_checkpoint(tmp_path_factory.mktemp("hf"), processor)
    return lambda **settings: provider_of(hf, data, pack=False, num_workers=1, **settings)


def test_rows_by_number(make_rows):
    assert signalled(BatchStream(make_rows()(), num_workers=2, ignored_signal=signal.SIGTERM)) == 2


def test_webdatasets(energon):
    assert signalled(energon(ignored_signal=signal.SIGTERM).stream("train")) == 1


def test_they_end_where_nothing_is_said(make_rows):
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        signalled(BatchStream(make_rows()(), num_workers=1))


@pytest.mark.parametrize("cycle", [False, True])
def test_they_end_with_their_stream(make_rows, monkeypatch, cycle):
    """At once, where the collector would destroy what tells them to end, and wait five seconds for each."""
    terminated = []
    monkeypatch.setattr(BaseProcess, "terminate", terminated.append)
    others = set(multiprocessing.active_children())
    gc.disable()
    try:
        stream = BatchStream(make_rows()(), num_workers=2, ignored_signal=signal.SIGTERM)
        next(stream)
        workers = set(multiprocessing.active_children()) - others
        assert len(workers) == 2
        if cycle:
            stream.cycle = stream
        del stream
        if cycle:
            gc.collect()
        assert not terminated and not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


class Collects(Dataset):
    """Collects garbage, as may happen anywhere."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        gc.collect()
        return number


class Owner:
    """Says by whom it is collected, such as a video decoder that waits for its threads, which a fork has not."""

    def __init__(self, said: Path) -> None:
        self.said, self.circle = said, self

    def __del__(self) -> None:
        self.said.write_text(f"{os.getpid()}")


@pytest.mark.slow
def test_they_leave_the_other_processs_garbage_alone(tmp_path):
    said = tmp_path / "said"
    gc.disable()
    try:
        Owner(said)
        loader = DataLoader(Collects(), num_workers=1, worker_init_fn=ignoring(None))
        assert [int(number) for number in loader] == [0] and not said.exists()
    finally:
        gc.enable()
    gc.collect()
    assert said.read_text() == f"{os.getpid()}"


# Megatron-Bridge's loaders have a handler of Python's, ours ignore the signal.
FAILS = """
import signal, sys
from qwen3vl_bridge.data.loading.batch_stream import end_workers_at_exit, ignoring
from torch.utils.data import DataLoader

end_workers_at_exit()
begin = ignoring(signal.SIGTERM)
if sys.argv[1:]:
    begin = lambda _: signal.signal(signal.SIGTERM, lambda *_: None)
batches = iter(DataLoader(range(99), num_workers=2, worker_init_fn=begin))
next(batches)
raise ValueError("as in a step")
"""


@pytest.mark.parametrize("whose", [[], ["theirs"]], ids=["ours", "theirs"])
def test_a_run_that_fails_does_not_wait_for_them(whose):
    done = subprocess.run([sys.executable, "-c", FAILS, *whose], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "as in a step" in done.stderr and "killed" not in done.stderr

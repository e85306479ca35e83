"""Test that the processes of a machine measure each sample once and plan the same rows."""

import errno
import gc
import logging
import multiprocessing
import os
import time

from qwen3vl_bridge import Qwen3VLConversationProvider
from qwen3vl_bridge.data import samples as samples_module
from qwen3vl_bridge.data.packing import NOTHING, Size
from qwen3vl_bridge.data.samples import SampleFilter, Samples, SharedSizes, Sizes, open_shared_sizes
from qwen3vl_bridge.data.sources import JsonLines
from qwen3vl_bridge.training.process_groups import shutdown

import pytest
import torch
import torch.distributed as dist

from tests.data.conftest import groups

FORK = multiprocessing.get_context("fork")  # as data-loading processes are started


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Return a function that lists the conversations measured by all processes from here on."""
    path, measure = tmp_path / "measured", SampleFilter.measure

    def collected(self, read, place):
        time.sleep(0.002)  # long enough for others to come by
        size = measure(self, read, place)
        with path.open("a") as file:  # what it had not ended with, a worker that is stopped leaves to others
            file.write(f"{place}\n")
        return size

    monkeypatch.setattr(SampleFilter, "measure", collected)
    return lambda: path.read_text().splitlines()


def run(*functions):
    """Run each function in its own process; return the results."""
    queue = FORK.Queue()

    def answer(number, function):
        gc.freeze()  # a fork has none of the threads that this process's garbage may own
        torch.set_num_threads(1)  # nor those of OpenMP, for which it would wait
        try:
            queue.put((number, function()))
        except BaseException as error:
            queue.put((number, error))
            raise

    processes = [FORK.Process(target=answer, args=item) for item in enumerate(functions)]
    for process in processes:
        process.start()
    found = dict(queue.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    for error in found.values():
        if isinstance(error, BaseException):
            raise error
    return [found[number] for number in range(len(functions))]


def test_shared_sizes_measure_each_sample_once_per_machine(train_file, checkpoint, measured, tmp_path):
    def rows_of(rank: int) -> list:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=4)
        provider = Qwen3VLConversationProvider(
            train_path=str(train_file), hf_processor_path=str(checkpoint), seq_length=256, window_size=8, num_workers=2
        )
        stream = provider.stream("train")
        rows = [next(stream).sample_ids for _ in range(6)]
        dist.barrier()  # nobody's workers are stopped while others measure
        return rows

    shutdown()  # groups of other tests, of which each rank would have a copy
    samples_module._job.cache_clear()
    found = run(*(lambda rank=rank: rows_of(rank) for rank in range(4)))
    assert found.count(found[0]) == 4
    names = measured()
    assert len(names) == len(set(names)) <= len(train_file.read_text().splitlines())


@pytest.fixture
def sizes(tmp_path):
    return SharedSizes(tmp_path / "sizes")


def test_shared_sizes_wait_for_size_of_sample_locked_by_other_process(sizes, train_file, encoder, tmp_path):
    def hold():
        with sizes.lock(3, wait=True) as is_mine:
            (tmp_path / "held").touch()
            time.sleep(0.5)
            sizes.store(3, Size(5, 0, 0))
        return is_mine

    process = FORK.Process(target=hold)
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    with sizes.lock(3, wait=False) as is_mine:
        assert not is_mine
    with sizes.lock(4, wait=False) as is_mine:
        assert is_mine
    assert Samples(JsonLines(train_file), SampleFilter(encoder, limit=256), sizes).size(3) == Size(5, 0, 0)
    process.join()


def test_shared_sizes_release_lock_of_killed_process(sizes):
    def die():
        with sizes.lock(3, wait=True):
            os._exit(1)

    process = FORK.Process(target=die)
    process.start()
    process.join()
    with sizes.lock(3, wait=True) as is_mine:
        assert is_mine and sizes.get(3) is None


def test_shared_sizes_read_stored_values_and_ignore_damaged_ones(sizes, tmp_path):
    large = Size(1 << 40, 7, 1 << 60)
    sizes.store(5, large)
    sizes.store(2, NOTHING)
    assert [sizes.get(n) for n in (0, 2, 4, 5, 6)] == [None, NOTHING, None, large, None]
    with (tmp_path / "sizes").open("r+b") as file:
        file.seek((1 + 5) * 32 + 8)
        file.write(b"\x08")
    assert sizes.get(5) is None


def test_shared_sizes_count_dropped_samples_once_over_all_processes(sizes, train_file, encoder, tmp_path):
    def measures():
        logger, said = logging.getLogger("qwen3vl_bridge.data.samples"), []
        logger.handlers, logger.propagate = [logging.Handler()], False
        logger.handlers[0].emit = lambda record: said.append(record.getMessage())
        samples = Samples(JsonLines(train_file), SampleFilter(encoder, limit=64, on_long="drop"), sizes)
        samples.measure(range(40))
        dropped = [sample for sample in range(40) if not samples.size(sample).tokens]
        ready.wait()  # the file goes with the process that has made it
        return dropped, [text for text in said if "dropped" in text]

    ready = FORK.Barrier(4)
    found = run(*[measures] * 4)
    (dropped,) = {tuple(numbers) for numbers, _ in found}
    said = sorted(int(text.split("dropped, ")[1].split()[0]) for _, texts in found for text in texts)
    assert len(dropped) > 8
    assert said == [number for number in range(1, len(dropped) + 1) if number <= 4 or number.bit_count() == 1]


def test_count_drop_keeps_a_separate_count_for_each_reason(sizes):
    assert [sizes.count_drop(kind) for kind in ("dropped", "cut", "dropped", "unreadable")] == [1, 1, 2, 1]
    assert sizes.get(0) is None


def test_drop_counter_counts_drops_of_first_tp_rank_only():
    samples_module._job.cache_clear()
    first, second = (
        samples_module.make_drop_counter({"a": 1}),
        samples_module.make_drop_counter({"a": 1}, groups(dp=2, dp_rank=1)),
    )
    follower = samples_module.make_drop_counter({"a": 1}, groups(tp_rank=1))
    assert [note("dropped") for note in (first, follower, second, follower, first)] == [1, 0, 2, 0, 3]
    assert samples_module.make_drop_counter({"a": 2})("dropped") == 1


def test_open_shared_sizes_removes_abandoned_files_and_keeps_used_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_module.tempfile, "gettempdir", lambda: str(tmp_path))
    name = f"qwen3vl_sizes_{os.getuid()}_"
    left, used, done = tmp_path / f"{name}left", tmp_path / f"{name}used", tmp_path / "done"

    def uses():
        samples_module._open_file(used)
        os.utime(used, (0, 0))
        (tmp_path / "ready").touch()
        while not done.exists():
            time.sleep(0.01)

    def begins():
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        left.touch()
        os.utime(left, (0, 0))
        open_shared_sizes(3, {"data": "x"}).store(0, NOTHING)
        files = set(tmp_path.glob(f"{name}*"))
        done.touch()
        return files

    _, files = run(uses, begins)
    assert len(files) == 2 and used in files and left not in files
    assert not list(tmp_path.glob(f"{name}*"))


def test_shared_sizes_stay_in_process_memory_if_disk_is_full(sizes, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    for sample in (1, 2):
        sizes.store(sample, Size(sample, 0, 0))
    assert [sizes.get(n) for n in (0, 1, 2)] == [None, Size(1, 0, 0), Size(2, 0, 0)]
    assert caplog.text.count("No space left on device; cannot store the size of a sample") == 1


def test_open_shared_sizes_uses_process_memory_without_temporary_folder(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(samples_module.tempfile, "gettempdir", lambda: str(tmp_path / "nowhere"))
    assert type(open_shared_sizes(3, {})) is Sizes
    assert "each process measures every sample" in caplog.text

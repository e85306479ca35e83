"""Test that BatchStream yields the same rows for any ranks and workers and after a resume, and how its workers end."""

import gc
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path

from qwen3vl_bridge.data import BatchStream, DataError, Window, one_pass
from qwen3vl_bridge.data.errors import describe_lost_worker
from qwen3vl_bridge.data.loading import make_worker_init
from qwen3vl_bridge.upstream import library_logs

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.data.conftest import ids, picture, reloaded, same, segments, take, write
from tests.data.energon.conftest import provider_of, write_folder
from tests.data.test_videos import ask

NUMBER = 26  # rows, more than two epochs


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("settings", [{}, {"pack": False}, {"seed": None}, {"window_size": 100}])
def test_batch_stream_resumed_yields_batches_of_uninterrupted_stream(make_rows, settings):
    rows = make_rows(**settings)
    whole = take(BatchStream(rows()), NUMBER)
    assert len(set(ids(whole))) >= 10
    for stop in (0, 1, 5, 12, NUMBER - 4):
        stream = BatchStream(rows())
        assert all(map(same, take(stream, stop), whole))
        resumed = BatchStream(rows())
        take(resumed, 3)
        resumed.load_state_dict(reloaded(stream.state_dict()))
        assert all(map(same, take(resumed, 4), whole[stop : stop + 4]))


def test_batch_stream_resumed_does_not_measure_samples_of_earlier_windows(make_rows):
    rows = make_rows(seed=None)
    stream = BatchStream(rows())
    take(stream, 7)
    resumed, state = BatchStream(rows()), stream.state_dict()
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    next(resumed)
    window = Window(**state["window"])
    measured = {sample for sample in range(40) if resumed._rows.samples._sizes.get(sample) is not None}
    assert window.start >= 16
    assert {*window.carried, *range(window.start, 40)} >= measured >= set(range(window.start, window.start + 8))


def test_batch_stream_state_dict_is_json_and_independent_of_num_workers(make_rows):
    rows = make_rows()
    here, ahead = BatchStream(rows()), BatchStream(rows(), num_workers=2)
    assert all(map(same, take(here, 12), take(ahead, 12)))
    # The other workers are ahead, but the position is that of the batches given out.
    assert json.loads(json.dumps(here.state_dict())) == json.loads(json.dumps(ahead.state_dict()))
    ahead.load_state_dict(here.state_dict())
    assert all(map(same, take(here, 4), take(ahead, 4)))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(2, 1), (3, 1), (1, 2), (2, 3)])
def test_batch_stream_dp_ranks_together_read_rows_of_single_rank_in_order(make_rows, dp_size, micro_batch_size):
    rows = make_rows(pack=micro_batch_size == 1)
    single = ids(take(BatchStream(rows()), NUMBER))
    share = {"dp_size": dp_size, "micro_batch_size": micro_batch_size}
    ranks = [BatchStream(rows(), dp_rank=rank, **share) for rank in range(dp_size)]
    group = dp_size * micro_batch_size
    for step in range(NUMBER // group):
        together = [batch.sample_ids for rank in ranks for batch in take(rank, 1)]
        expected = single[step * group : (step + 1) * group]
        assert sum(together, ()) == sum(expected, ())
        assert all(len(sample_ids) == micro_batch_size for sample_ids in together) or micro_batch_size == 1
    assert len({rank.state_dict()["row"] for rank in ranks}) == 1


def test_batch_stream_saved_by_three_dp_ranks_continues_same_rows_on_two(make_rows):
    rows = make_rows()
    whole = ids(take(BatchStream(rows()), NUMBER))
    ranks = [BatchStream(rows(), dp_rank=rank, dp_size=3) for rank in range(3)]
    for rank in ranks:
        take(rank, 5)
    for state in (rank.state_dict() for rank in ranks):
        resumed = [BatchStream(rows(), dp_rank=rank, dp_size=2) for rank in range(2)]
        for rank in resumed:
            rank.load_state_dict(state)
        assert ids([next(resumed[step % 2]) for step in range(10)]) == whole[15:25]


def test_batch_stream_keeps_global_rng_state(make_rows):
    before = torch.get_rng_state()
    take(BatchStream(make_rows()()), 2)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("other", "message"), [
    ({"seq_length": 512}, "found seq_length 512, expected 256. Con"), ({"seed": 1}, "found seed 1, expected 0. Con"),
    ({"seed": None, "pack": False}, "found pack 0, expected 1; seed None, expected 0. Con"),
    ({"window_size": 9}, "found window_size 9, expected 8. Con"),
])  # fmt: skip
def test_batch_stream_load_state_dict_raises_if_row_settings_differ(make_rows, other, message):
    state = BatchStream(make_rows()()).state_dict()
    with pytest.raises(ValueError, match=message):
        BatchStream(make_rows(**other)()).load_state_dict(state)


@pytest.mark.parametrize("share", [{}, {"dp_size": 3}, {"dp_size": 2, "micro_batch_size": 3, "pack": False}])
def test_one_pass_over_all_dp_ranks_reads_each_sample_once(make_rows, share):
    pack = share.pop("pack", True)
    rows = make_rows(seed=None, pack=pack)
    total = rows().plan.end_of_epoch()
    passes = [list(one_pass(rows(), dp_rank=rank, **share)) for rank in range(share.get("dp_size", 1))]
    group = share.get("dp_size", 1) * share.get("micro_batch_size", 1)
    assert {len(batches) for batches in passes} == {-(-total // group)}
    seen = []
    for batch in (batch for batches in passes for batch in batches):
        for sample_id, tokens in segments(batch):
            if batch.loss_mask.flatten()[tokens].any():
                seen.append(sample_id)
    assert sorted(seen) == sorted(f"train.jsonl:{line}" for line in range(1, 41))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batch_stream_error_names_record_line_of_missing_image(make_rows, tmp_path, num_workers):
    message = {"role": "user", "content": [{"type": "image", "image": "gone.png"}]}
    path = write(tmp_path / "bad.jsonl", [{"messages": [message]}])
    with pytest.raises(DataError, match=r"bad.jsonl:1: message 1, part 1: 'gone.png' is .*does not exist"):
        next(BatchStream(make_rows(path=path)(), num_workers=num_workers))


@pytest.mark.parametrize(
    ("share", "found"), [((2, 2, 1), "rank 2 of 2"), ((-1, 2, 1), "rank -1"), ((0, 1, 0), "0 rows")]
)
def test_batch_stream_raises_if_dp_rank_or_micro_batch_size_is_invalid(make_rows, share, found):
    rank, size, rows = share
    for use in (lambda **kw: BatchStream(make_rows()(), **kw), lambda **kw: next(one_pass(make_rows()(), **kw))):
        with pytest.raises(ValueError, match=found):
            use(dp_rank=rank, dp_size=size, micro_batch_size=rows)


@pytest.mark.parametrize("settings", [{}, pytest.param({"pack": False}, marks=pytest.mark.slow)])
def test_batch_stream_drop_counts_do_not_depend_on_ranks_workers_or_resume(make_rows, settings):
    rows = make_rows(seq_length=64, on_long="drop", **settings)
    whole = take(BatchStream(rows()), NUMBER)
    counts = [sum(batch.dropped) for batch in whole]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    ranks = [BatchStream(rows(), dp_rank=rank, dp_size=2, num_workers=1) for rank in range(2)]
    assert [sum(next(ranks[place % 2]).dropped) for place in range(NUMBER)] == counts
    stream = BatchStream(rows())
    take(stream, 12)
    resumed = BatchStream(rows())
    resumed.load_state_dict(json.loads(json.dumps(stream.state_dict())))
    assert [sum(batch.dropped) for batch in take(resumed, 6)] == counts[12:18]


AHEAD = 8  # more batches than workers have read ahead


def signalled(batches: Iterator) -> int:
    """Send the signal to all workers, and read on; return how many workers are still alive."""
    others = multiprocessing.active_children()
    list(islice(batches, 2))  # two processes at most take turns: each has begun, and knows what to ignore
    workers = [process for process in multiprocessing.active_children() if process not in others]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    time.sleep(0.2)
    assert len(list(islice(batches, AHEAD))) == AHEAD
    return sum(worker.is_alive() for worker in workers)


@pytest.fixture(scope="module")
def energon(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    content = picture(folder / "picture.png", 32, 32).read_bytes()
    parts = ask({"type": "image", "image": "png"}, {"type": "text", "text": "which"})
    samples = [(f"s{n}", {"json": {"messages": parts}, "png": content}) for n in range(8)]
    data = write_folder(folder / "wds", train=[samples[:4], samples[4:6]], val=[samples[6:7]], test=[samples[7:]])
    return lambda **settings: provider_of(checkpoint, data, pack=False, num_workers=1, **settings)


def test_batch_stream_workers_survive_ignored_signal(make_rows):
    assert signalled(BatchStream(make_rows()(), num_workers=2, ignored_signal=signal.SIGTERM)) == 2


def test_energon_stream_worker_survives_ignored_signal(energon):
    assert signalled(energon(ignored_signal=signal.SIGTERM).stream("train")) == 1


@pytest.mark.slow
def test_batch_stream_raises_if_worker_gets_sigterm_that_is_not_ignored(make_rows):
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        signalled(BatchStream(make_rows()(), num_workers=1))


@pytest.mark.slow
@pytest.mark.parametrize("cycle", [False, True])
def test_batch_stream_deletion_ends_workers_without_terminating_them(make_rows, monkeypatch, cycle):
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


def collect(rows: list[int]) -> list[int]:
    gc.collect()
    return rows


class Owner:
    """An object that reports which process collects it, like a video decoder with threads."""

    def __init__(self, said: Path) -> None:
        self.said, self.circle = said, self

    def __del__(self) -> None:
        self.said.write_text(f"{os.getpid()}")


@pytest.mark.slow
def test_worker_init_prevents_worker_from_finalizing_garbage_of_parent(tmp_path):
    said = tmp_path / "said"
    gc.disable()
    try:
        Owner(said)
        loader = DataLoader(range(1), num_workers=1, collate_fn=collect, worker_init_fn=make_worker_init(None))
        assert list(loader) == [[0]] and not said.exists()
    finally:
        gc.enable()
    gc.collect()
    assert said.read_text() == f"{os.getpid()}"


# Megatron-Bridge's loaders have a handler of Python's, ours ignore the signal.
FAILS = """
import signal, sys
from qwen3vl_bridge.data.loading import kill_workers_at_exit, make_worker_init
from torch.utils.data import DataLoader, Dataset

kill_workers_at_exit()
begin = make_worker_init(signal.SIGTERM)
if sys.argv[1:]:
    begin = lambda _: signal.signal(signal.SIGTERM, lambda *_: None)
batches = iter(DataLoader(range(99), num_workers=2, worker_init_fn=begin))
next(batches)
raise ValueError("as in a step")
"""


@pytest.mark.slow
@pytest.mark.parametrize("whose", [[], pytest.param(["theirs"], marks=pytest.mark.slow)], ids=["ours", "theirs"])
def test_kill_workers_at_exit_lets_process_exit_after_uncaught_error(whose):
    done = subprocess.run([sys.executable, "-c", FAILS, *whose], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "as in a step" in done.stderr and "killed" not in done.stderr


class _Dies(Dataset):
    """Kill the current process, like the kernel when memory runs out."""

    def __init__(self, sent: signal.Signals) -> None:
        self._sent = sent

    def __len__(self) -> int:
        return 1

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), self._sent)
        return number


@pytest.mark.parametrize(("sent", "words"), [
    (signal.SIGKILL, r"was killed by a signal \(Killed\)\. Most likely memory ran out"),
    (signal.SIGBUS, r"was killed by a signal \(Bus error\)\. Shared memory is full"),
])  # fmt: skip
def test_describe_lost_worker_names_cause_if_worker_was_killed(sent, words):
    with pytest.raises(RuntimeError) as caught:
        next(iter(DataLoader(_Dies(sent), num_workers=1)))
    said = describe_lost_worker(caught.value)
    assert re.match(rf"a data-loading process \(pid \d+\) {words}.*lower dataset.num_workers", said)
    assert library_logs._is_unexpected(logging.makeLogRecord({"exc_info": (None, caught.value, None)})) is False
    assert describe_lost_worker(RuntimeError("CUDA error")) is None

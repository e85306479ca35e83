"""Streaming data sets: numbers that mean the same everywhere, however far and by whom they are read."""

import logging
import pickle
import random
import subprocess
import sys

from qwen3vl_bridge.data import DataError, JsonLines
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.loading.batch_stream import ignoring
from qwen3vl_bridge.data.sources.hub import EPOCH, StreamedDataset

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

pytestmark = pytest.mark.usefixtures("streams_end_at_once")

ANSWER = {"role": "assistant", "content": "Seven."}
ROWS, SHARDS = 103, 4


def record(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"{number}?"}, ANSWER], "other": number}


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> datasets.IterableDataset:
    """Rows of several files, in row groups of nine."""
    folder = tmp_path_factory.mktemp("stream")
    for shard in range(SHARDS):
        rows = [record(number) for number in range(ROWS * shard // SHARDS, ROWS * (shard + 1) // SHARDS)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=9)
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def asked(source: StreamedDataset, number: int) -> int:
    return int(source[number].messages[0]["content"].rstrip("?"))


def epoch_of(source: StreamedDataset, epoch: int) -> list[int]:
    return [asked(source, number) for number in source.numbers(epoch, 0, 2 * ROWS)]


@pytest.mark.parametrize("kind", ["parquet", "json", "memory", "generator"])
def test_rows_are_those_of_other_sources(folder, kind):
    expected = JsonLines(folder / "train.jsonl")
    if kind == "memory":
        dataset = datasets.load_from_disk(folder / "saved").to_iterable_dataset(num_shards=3)
    elif kind == "generator":
        dataset = datasets.IterableDataset.from_generator(datasets.load_from_disk(folder / "saved").__iter__)
    else:
        name = {"parquet": "train.parquet", "json": "train.jsonl"}[kind]
        dataset = datasets.load_dataset(kind, data_files=str(folder / name), split="train", streaming=True)
    source = StreamedDataset(dataset, "x", folder)
    numbers = source.numbers(0, 0, 99)
    assert [(source[n].messages, source[n].images) for n in numbers] == [(c.messages, c.images) for c in expected]
    assert source[7].sample_id == source.sample_id(7) == "x[7]"


def test_numbers_are_places_and_epochs(stream):
    source = StreamedDataset(stream, "x")
    assert list(source.numbers(0, 0, 3)) == [0, 1, 2]
    assert list(source.numbers(0, ROWS - 2, 5)) == [ROWS - 2, ROWS - 1]
    assert not source.numbers(0, ROWS, 5) and not source.numbers(0, ROWS + 7, 5) and not source.numbers(2, 500, 5)
    assert list(source.numbers(3, 5, 2)) == [3 * EPOCH + 5, 3 * EPOCH + 6]
    assert epoch_of(source, 0) == epoch_of(source, 3) == list(range(ROWS))
    assert len(source.numbers(0, 90, 99)) == ROWS - 90 and source._reading.epoch == 3  # it knows, and need not read
    for number in (-1, ROWS, EPOCH - 1, 3 * EPOCH + ROWS):
        with pytest.raises(IndexError):
            source[number]


def test_each_epoch_has_its_own_order_and_keeps_it(stream):
    source = StreamedDataset(stream, "x", seed=5, buffer_size=16)
    orders = [epoch_of(source, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and orders[0] != list(range(ROWS))
    assert epoch_of(source, 1) == orders[1]
    assert epoch_of(StreamedDataset(stream, "x", seed=6, buffer_size=16), 0) != orders[0]
    assert source[EPOCH + 3].sample_id == "x[3 of epoch 1]"


def test_a_fresh_process_finds_the_same_order(stream, tmp_path):
    source = StreamedDataset(stream, "x", seed=5, buffer_size=16)
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    script = (
        "import datasets, pickle; datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0\n"
        f"source = pickle.load(open({str(tmp_path / 'source')!r}, 'rb'))\n"
        "print([source[n].messages[0]['content'] for n in source.numbers(2, 30, 9)])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert found.stdout.strip() == str([f"{asked(source, n)}?" for n in source.numbers(2, 30, 9)]), found.stderr


@pytest.mark.parametrize("seed", [None, 5])
@settings(max_examples=15, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, ROWS - 1)), min_size=1, max_size=12),
    keep=st.sampled_from([1, 20, 500]),
)
def test_any_order_of_asking_gives_the_same(stream, seed, places, keep):
    truth = StreamedDataset(stream, "x", seed=seed, buffer_size=16, keep=1000)
    source = StreamedDataset(stream, "x", seed=seed, buffer_size=16, keep=keep)
    expected = {epoch: epoch_of(truth, epoch) for epoch in {epoch for epoch, _ in places}}
    for epoch, place in places:
        assert asked(source, epoch * EPOCH + place) == expected[epoch][place]
        assert len(source.numbers(epoch, place, 5)) == min(5, ROWS - place)


class Asked(Dataset):
    """What is asked at each number, and how long the epoch is; workers read it."""

    def __init__(self, source: StreamedDataset) -> None:
        self.source = source

    def __getitem__(self, number: int) -> tuple[int, int]:
        return asked(self.source, number), len(self.source.numbers(number // EPOCH, 0, 2 * ROWS))


@pytest.mark.parametrize("kind", ["parquet", "memory"])
def test_each_worker_sees_the_whole_stream(stream, kind):
    """Workers that are forked have an open file of their parent's; they are in different epochs at the same time."""
    if kind == "memory":
        stream = datasets.Dataset.from_list([record(n) for n in range(ROWS)]).to_iterable_dataset(num_shards=SHARDS)
    source = StreamedDataset(stream, "x", seed=5, buffer_size=16)
    expected = [(asked(source, epoch * EPOCH + place), ROWS) for place in range(30) for epoch in range(2)]
    assert source._reading is not None
    numbers = [epoch * EPOCH + place for place in range(30) for epoch in range(2)]
    loader = DataLoader(
        Asked(source), sampler=numbers, num_workers=2, batch_size=1, timeout=120, worker_init_fn=ignoring(None)
    )
    assert [(int(number), int(length)) for number, length in loader] == expected
    assert epoch_of(source, 0)[:30] == [number for number, _ in expected[::2]]  # the parent's own goes on


def pictures(count: int, size: int) -> list[dict]:
    noise = random.Random(0)
    messages = [{"role": "user", "content": "<image>"}, ANSWER]
    return [{"messages": messages, "image": {"bytes": noise.randbytes(size), "path": None}} for _ in range(count)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_pictures_are_left_as_they_are(ahead):
    """What does not decode here is none of `datasets`' business, which decodes what is on the hub ahead, in threads."""
    rows = pictures(7, 100)
    dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).to_iterable_dataset(2)
    source = StreamedDataset(dataset.decode(num_threads=ahead), "x", seed=0)
    assert sorted(source[n].images[0] for n in source.numbers(0, 0, 9)) == sorted(r["image"]["bytes"] for r in rows)


@pytest.mark.parametrize("seed", [None, 0])
def test_what_is_kept_has_bounds(seed):
    """32 MB of pictures, of which the latest are kept, and what shuffling has in its buffer.

    Not from Parquet files, of which Arrow's own scanner holds any number of rows ahead.
    """
    size, (row,) = 2**16, pictures(1, 2**16)
    features = datasets.Dataset.from_list([row]).features
    rows = datasets.IterableDataset.from_generator(lambda: iter([row] * 500), features=features)
    before, most = pa.total_allocated_bytes(), 0
    source = StreamedDataset(rows, "x", seed=seed, buffer_size=20, keep=20)
    for place in range(500):
        (number,) = source.numbers(0, place, 1)
        assert source[number].images == (row["image"]["bytes"],)
        most = max(most, pa.total_allocated_bytes() - before)
    # Kept rows, those that came with the first of them from the library, and those that come next; 20 to shuffle.
    assert len(source._kept) <= 20 + 64 and most < (20 + 3 * 64 + 20) * size
    assert len(source._seen) == 1 and source._ended == set()
    state = source.__getstate__()
    assert not state["_kept"] and state["_reading"] is None


def test_a_run_goes_on_far_ahead(stream, caplog):
    """The rows just before are kept, as they may be carried into the next window; earlier ones take another reading."""
    begun = StreamedDataset(stream, "x", seed=5, buffer_size=16)
    expected = epoch_of(begun, 4)
    source = StreamedDataset(stream, "x", seed=5, buffer_size=16, keep=20)
    with caplog.at_level(logging.WARNING, "qwen3vl_bridge.data.sources.hub"):
        numbers = source.numbers(4, 66, 10)
        assert caplog.messages == ["x: epoch 4 is read from its beginning to reach sample 75; the latest 20 are kept"]
        assert [asked(source, number) for number in range(numbers[0] - 10, numbers[-1] + 1)] == expected[56:76]
        assert len(caplog.messages) == 1
        assert asked(source, 4 * EPOCH + 30) == expected[30] and len(caplog.messages) == 2
        assert [asked(source, 4 * EPOCH + place) for place in range(31, ROWS)] == expected[31:]
        assert len(caplog.messages) == 2


def broken_at(place: int, state: dict):
    def rows():
        for number in range(20):
            if number == place and state["broken"]:
                raise ConnectionError("no route to host")
            yield record(number)

    return rows


def test_a_stream_that_breaks_off_is_said_and_can_go_on():
    state = {"broken": True}
    source = StreamedDataset(datasets.IterableDataset.from_generator(broken_at(7, state)), "owner/name#train")
    assert [asked(source, number) for number in source.numbers(0, 0, 7)] == list(range(7))
    for read in (lambda: source.numbers(0, 0, 8), lambda: source[12]):
        with pytest.raises(Unreachable, match=r"^owner/name#train\[7\]: .* \(ConnectionError: no route to host\), exp"):
            read()
    with pytest.raises(Unreachable) as caught:
        list(DataLoader(Asked(source), sampler=[12], num_workers=1, worker_init_fn=ignoring(None)))
    plain = caught.value.without_traceback()
    assert isinstance(plain, Unreachable) and str(plain).startswith("owner/name#train[7]: found the stream broken off")
    assert asked(source, 3) == 3
    state["broken"] = False
    assert [asked(source, number) for number in source.numbers(0, 0, 99)] == list(range(20))


def test_rows_of_several_types_are_refused_where_they_begin():
    rows = [record(0), {"messages": [{"role": "user", "content": ["a", {"b": 1}]}, ANSWER]}, record(2)]
    source = StreamedDataset(datasets.IterableDataset.from_generator(rows.__iter__), "x")
    assert asked(source, 0) == 0
    with pytest.raises(DataError, match=r"^x\[1\]: .*ArrowInvalid.* and all of one type \(load_dataset takes features"):
        source[1]


def test_bad_rows_have_their_names(stream):
    bad = [{"messages": [{"role": "user", "content": "?"}]}, {"messages": None}, {"words": "hi"}, record(3)]
    source = StreamedDataset(datasets.IterableDataset.from_generator(bad.__iter__), "x")
    assert len(source.numbers(0, 0, 9)) == 4
    for number, message in enumerate(["found the roles user, expected", "found null under", "found the columns words"]):
        with pytest.raises(DataError, match=rf"^x\[{number}\]: {message}") as caught:
            source[number]
        assert not isinstance(caught.value, Unreachable)
    assert asked(source, 3) == 3


def test_what_an_order_depends_on_is_in_the_fingerprint(stream):
    settings = [{}, {"seed": 1}, {"seed": 2}, {"seed": 1, "buffer_size": 9}]
    prints = [StreamedDataset(stream, "x", **one).fingerprint() for one in settings]
    prints += [StreamedDataset(stream, "y").fingerprint()]
    assert len(set(prints)) == 5
    assert prints[1] == StreamedDataset(stream, "x", seed=1, keep=3).fingerprint()
    assert prints[0] == f"x, {SHARDS} shards, None bytes"


def test_the_hub_is_asked_by_name_and_split(stream, monkeypatch):
    def load(name, split, streaming):
        assert (name, streaming) == ("owner/name", True)
        return stream

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    source = StreamedDataset.named("owner/name#test", seed=3, keep=9)
    assert source[0].sample_id == "owner/name#test[0 of epoch 0]"
    with pytest.raises(DataError, match="hf://owner/name: found the splits train, test, expected one, as hf://owner/n"):
        StreamedDataset.named("owner/name")

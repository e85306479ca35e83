"""Test streamed data sets: sample numbers, parts, and rows after a resume."""

import json
import logging
import multiprocessing
import os
import pickle
import random
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import count
from pathlib import Path

from qwen3vl_bridge.data import BatchStream, JsonLines, RowDataset, RowSettings, SampleFilter, Samples, one_pass
from qwen3vl_bridge.data.errors import DataError, DataUnavailable
from qwen3vl_bridge.data.hub import EPOCH_STRIDE, StreamedDataset
from qwen3vl_bridge.data.loading import StreamedRows, make_worker_init
from qwen3vl_bridge.data.offline_packing import pack
from qwen3vl_bridge.data.samples import Sizes

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from tests.data.conftest import built, ids, same, take

pytestmark = pytest.mark.usefixtures("streams_end_at_once")

ANSWER = {"role": "assistant", "content": "Seven."}
ROWS, SHARDS = 103, 4


def record(number: int) -> dict:
    return {"messages": [{"role": "user", "content": f"{number}?"}, ANSWER], "other": number}


@pytest.fixture(scope="module")
def rows_stream(tmp_path_factory) -> datasets.IterableDataset:
    """Write rows of several files, in row groups of nine."""
    folder = tmp_path_factory.mktemp("stream")
    for shard in range(SHARDS):
        rows = [record(number) for number in range(ROWS * shard // SHARDS, ROWS * (shard + 1) // SHARDS)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{shard}.parquet", row_group_size=9)
    files = sorted(map(str, folder.glob("*.parquet")))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


def asked(source: StreamedDataset, number: int) -> int:
    return int(source[number].messages[0]["content"].rstrip("?"))


def epoch_of(source: StreamedDataset, epoch: int) -> list[int]:
    return [asked(source, number) for number in source.sample_numbers(epoch, 0, 2 * ROWS)]


@pytest.mark.parametrize("kind", ["parquet", "json", "memory", "generator"])
def test_streamed_conversations_equal_those_read_from_json_lines(folder, kind):
    expected = JsonLines(folder / "train.jsonl")
    if kind == "memory":
        dataset = datasets.load_from_disk(folder / "saved").to_iterable_dataset(num_shards=3)
    elif kind == "generator":
        dataset = datasets.IterableDataset.from_generator(datasets.load_from_disk(folder / "saved").__iter__)
    else:
        name = {"parquet": "train.parquet", "json": "train.jsonl"}[kind]
        dataset = datasets.load_dataset(kind, data_files=str(folder / name), split="train", streaming=True)
    source = StreamedDataset(dataset, "x", folder)
    numbers = source.sample_numbers(0, 0, 99)
    assert [(source[n].messages, source[n].images) for n in numbers] == [(c.messages, c.images) for c in expected]
    assert source[7].sample_id == source.sample_id(7) == "x[7]"


def test_streamed_sample_numbers_encode_epoch_and_index(rows_stream):
    source = StreamedDataset(rows_stream, "x")
    assert list(source.sample_numbers(0, 0, 3)) == [0, 1, 2]
    assert list(source.sample_numbers(0, ROWS - 2, 5)) == [ROWS - 2, ROWS - 1]
    assert (
        not source.sample_numbers(0, ROWS, 5)
        and not source.sample_numbers(0, ROWS + 7, 5)
        and not source.sample_numbers(2, 500, 5)
    )
    assert list(source.sample_numbers(3, 5, 2)) == [3 * EPOCH_STRIDE + 5, 3 * EPOCH_STRIDE + 6]
    assert epoch_of(source, 0) == epoch_of(source, 3) == list(range(ROWS))
    # It knows, and need not read.
    assert len(source.sample_numbers(0, 90, 99)) == ROWS - 90 and source._readings[os.getpid()].epoch == 3
    for number in (-1, ROWS, EPOCH_STRIDE - 1, 3 * EPOCH_STRIDE + ROWS):
        with pytest.raises(IndexError):
            source[number]


def test_streamed_epochs_are_shuffled_differently_and_reproducibly(rows_stream):
    source = StreamedDataset(rows_stream, "x", seed=5, buffer_size=16)
    orders = [epoch_of(source, epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(ROWS)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3 and orders[0] != list(range(ROWS))
    assert epoch_of(source, 1) == orders[1]
    assert epoch_of(StreamedDataset(rows_stream, "x", seed=6, buffer_size=16), 0) != orders[0]
    assert source[EPOCH_STRIDE + 3].sample_id == "x[3 of epoch 1]"


@pytest.mark.slow
def test_streamed_shuffled_order_is_equal_in_new_process(rows_stream, tmp_path):
    source = StreamedDataset(rows_stream, "x", seed=5, buffer_size=16)
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    script = (
        "import datasets, pickle; datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0\n"
        f"source = pickle.load(open({str(tmp_path / 'source')!r}, 'rb'))\n"
        "print([source[n].messages[0]['content'] for n in source.sample_numbers(2, 30, 9)])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert found.stdout.strip() == str([f"{asked(source, n)}?" for n in source.sample_numbers(2, 30, 9)]), found.stderr


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("seed", [None, 5])
@settings(max_examples=15)
@given(
    places=st.lists(st.tuples(st.integers(0, 2), st.integers(0, ROWS - 1)), min_size=1, max_size=12),
    keep=st.sampled_from([1, 20, 500]),
)
def test_streamed_samples_read_in_random_order_equal_sequential_read(rows_stream, seed, places, keep):
    truth = StreamedDataset(rows_stream, "x", seed=seed, buffer_size=16, keep=1000)
    source = StreamedDataset(rows_stream, "x", seed=seed, buffer_size=16, keep=keep)
    expected = {epoch: epoch_of(truth, epoch) for epoch in {epoch for epoch, _ in places}}
    for epoch, place in places:
        assert asked(source, epoch * EPOCH_STRIDE + place) == expected[epoch][place]
        assert len(source.sample_numbers(epoch, place, 5)) == min(5, ROWS - place)


class Asked(Dataset):
    """Return the content and the epoch length at each number; read by workers."""

    def __init__(self, source: StreamedDataset) -> None:
        self.source = source

    def __getitem__(self, number: int) -> tuple[int, int]:
        return asked(self.source, number), len(self.source.sample_numbers(number // EPOCH_STRIDE, 0, 2 * ROWS))


@pytest.mark.parametrize("kind", ["parquet", "memory"])
def test_streamed_dataloader_workers_read_same_samples_as_main_process(rows_stream, kind):
    if kind == "memory":
        rows = datasets.Dataset.from_list([record(n) for n in range(ROWS)])
        rows_stream = rows.to_iterable_dataset(num_shards=SHARDS)
    source = StreamedDataset(rows_stream, "x", seed=5, buffer_size=16)
    expected = [(asked(source, epoch * EPOCH_STRIDE + place), ROWS) for place in range(30) for epoch in range(2)]
    assert source._readings
    numbers = [epoch * EPOCH_STRIDE + place for place in range(30) for epoch in range(2)]
    loader = DataLoader(
        Asked(source), sampler=numbers, num_workers=2, timeout=120, worker_init_fn=make_worker_init(None)
    )
    assert [(int(number), int(length)) for number, length in loader] == expected
    assert epoch_of(source, 0)[:30] == [number for number, _ in expected[::2]]  # the parent's own goes on


def pictures(count: int, size: int) -> list[dict]:
    noise = random.Random(0)
    messages = [{"role": "user", "content": "<image>"}, ANSWER]
    return [{"messages": messages, "image": {"bytes": noise.randbytes(size), "path": None}} for _ in range(count)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_streamed_images_stay_encoded_bytes(ahead):
    rows = pictures(7, 100)
    dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image()).to_iterable_dataset(2)
    source = StreamedDataset(dataset.decode(num_threads=ahead), "x", seed=0)
    assert sorted(source[n].images[0] for n in source.sample_numbers(0, 0, 9)) == sorted(
        r["image"]["bytes"] for r in rows
    )


@pytest.mark.parametrize("seed", [None, 0])
def test_streamed_dataset_row_cache_has_bounded_memory(seed):
    """Read 32 MB of images; only the latest rows and the shuffle buffer stay in memory.

    Not from Parquet files, because Arrow's scanner reads any number of rows ahead.
    """
    size, (row,) = 2**16, pictures(1, 2**16)
    features = datasets.Dataset.from_list([row]).features
    rows = datasets.IterableDataset.from_generator(lambda: iter([row] * 500), features=features)
    before, most = pa.total_allocated_bytes(), 0
    source = StreamedDataset(rows, "x", seed=seed, buffer_size=20, keep=20)
    for place in range(500):
        (number,) = source.sample_numbers(0, place, 1)
        assert source[number].images == (row["image"]["bytes"],)
        most = max(most, pa.total_allocated_bytes() - before)
    # Kept rows, those that came with the first of them from the library, and those that come next; 20 to shuffle.
    assert len(source._kept) <= 20 + 64 and most < (20 + 3 * 64 + 20) * size
    assert len(source._seen) == 1 and source._ended == set()
    state = source.__getstate__()
    assert not state["_kept"] and not state["_readings"]


def test_streamed_dataset_warns_if_sample_far_ahead_is_read(rows_stream, caplog):
    begun = StreamedDataset(rows_stream, "x", seed=5, buffer_size=16)
    expected = epoch_of(begun, 4)
    source = StreamedDataset(rows_stream, "x", seed=5, buffer_size=16, keep=20)
    with caplog.at_level(logging.WARNING, "qwen3vl_bridge.data.hub"):
        numbers = source.sample_numbers(4, 66, 10)
        assert caplog.messages == ["x: epoch 4 is read from its beginning to reach sample 75; the latest 20 are cached"]
        assert [asked(source, number) for number in range(numbers[0] - 10, numbers[-1] + 1)] == expected[56:76]
        assert len(caplog.messages) == 1
        assert asked(source, 4 * EPOCH_STRIDE + 30) == expected[30] and len(caplog.messages) == 2
        assert [asked(source, 4 * EPOCH_STRIDE + place) for place in range(31, ROWS)] == expected[31:]
        assert len(caplog.messages) == 2


def broken_at(place: int, state: dict):
    def rows():
        for number in range(20):
            if number == place and state["broken"]:
                raise ConnectionError("no route to host")
            yield record(number)

    return rows


def test_streamed_dataset_can_be_read_again_after_connection_error():
    state = {"broken": True}
    source = StreamedDataset(datasets.IterableDataset.from_generator(broken_at(7, state)), "owner/name#train")
    assert [asked(source, number) for number in source.sample_numbers(0, 0, 7)] == list(range(7))
    for read in (lambda: source.sample_numbers(0, 0, 8), lambda: source[12]):
        with pytest.raises(
            DataUnavailable, match=r"^owner/name#train\[7\]: .* \(ConnectionError: no route to host\)\. If"
        ):
            read()
    with pytest.raises(DataUnavailable) as caught:
        list(DataLoader(Asked(source), sampler=[12], num_workers=1, worker_init_fn=make_worker_init(None)))
    plain = caught.value.without_traceback()
    assert isinstance(plain, DataUnavailable) and str(plain).startswith(
        "owner/name#train[7]: the stream was interrupted"
    )
    assert asked(source, 3) == 3
    state["broken"] = False
    assert [asked(source, number) for number in source.sample_numbers(0, 0, 99)] == list(range(20))


def test_streamed_dataset_error_names_row_of_different_type():
    rows = [record(0), {"messages": [{"role": "user", "content": ["a", {"b": 1}]}, ANSWER]}, record(2)]
    source = StreamedDataset(datasets.IterableDataset.from_generator(rows.__iter__), "x")
    assert asked(source, 0) == 0
    with pytest.raises(DataError, match=r"^x\[1\]: .*ArrowInvalid.* several types, pass features"):
        source[1]


def test_streamed_dataset_error_names_invalid_row(rows_stream):
    bad = [{"messages": [{"role": "user", "content": "?"}]}, {"messages": None}, {"words": "hi"}, record(3)]
    source = StreamedDataset(datasets.IterableDataset.from_generator(bad.__iter__), "x")
    assert len(source.sample_numbers(0, 0, 9)) == 4
    for number, message in enumerate(["found the roles user, expected", "found None under", "found the columns words"]):
        with pytest.raises(DataError, match=rf"^x\[{number}\]: {message}") as caught:
            source[number]
        assert not isinstance(caught.value, DataUnavailable)
    assert asked(source, 3) == 3


def test_streamed_fingerprint_changes_with_name_seed_and_buffer_size(rows_stream):
    settings = [{}, {"seed": 1}, {"seed": 2}, {"seed": 1, "buffer_size": 9}]
    prints = [StreamedDataset(rows_stream, "x", **one).fingerprint() for one in settings]
    prints += [StreamedDataset(rows_stream, "y").fingerprint()]
    assert len(set(prints)) == 5
    assert prints[1] == StreamedDataset(rows_stream, "x", seed=1, keep=3).fingerprint()
    assert prints[0] == f"x, {SHARDS} shards, None bytes"


FILES = 8  # of five samples each


@pytest.fixture
def make(stream, even_file, encoder, collator):
    def make(seed=0, on_bad="error", source=None, dataset=stream, repeat=None):
        def rows(begin=None) -> RowDataset:
            file = source or StreamedDataset(dataset, "train", even_file.parent, seed=seed, buffer_size=16, keep=32)
            samples = Samples(file, SampleFilter(encoder, limit=256, on_bad=on_bad))
            return RowDataset(samples, RowSettings(collator, seed=seed, window_size=8), begin=begin, repeat=repeat)

        return rows

    return make


def numbered(files: list[str], log: str):
    """Yield records of files, and log which process reads each."""
    for path in files:
        for line in Path(path).read_text().splitlines():
            with Path(log).open("a") as file:
                file.write(f"{os.getpid()} {json.loads(line)['messages'][-1]['content'][0]['text'].split()[0]}\n")
            yield json.loads(line)


@pytest.fixture
def divided(even_file, stream, tmp_path):
    """Write forty samples in eight files, with a log of the readers."""
    lines = even_file.read_text().splitlines()
    paths = [tmp_path / f"{number}.jsonl" for number in range(FILES)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"{line}\n" for line in lines[5 * number : 5 * number + 5]))
    log = tmp_path / "read"
    log.touch()
    arguments = {"files": [*map(str, paths)], "log": str(log)}
    return datasets.IterableDataset.from_generator(numbered, gen_kwargs=arguments), log


def places(batch) -> list[int]:
    return [int(name.partition("[")[2].partition("]")[0].split()[0]) for name in batch.sample_ids]


def test_streamed_rows_without_shuffling_equal_rows_of_json_lines(make, make_rows, even_file):
    streamed, numbered = list(one_pass(make(seed=None)())), list(one_pass(make_rows(seed=None, path=even_file)()))
    assert [places(batch) for batch in streamed] == [
        [int(name.partition(":")[2]) - 1 for name in batch.sample_ids] for batch in numbered
    ]
    for one, other in zip(streamed, numbered, strict=True):
        assert one.input_ids.equal(other.input_ids) and one.loss_mask.equal(other.loss_mask)
        assert (one.vision is None) == (other.vision is None)
        assert one.vision is None or one.vision.pixel_values.equal(other.vision.pixel_values)


def part_and_epoch(sample_id: str) -> tuple[int, int]:
    words = sample_id.partition("[")[2].rstrip("]").replace(",", "").split()
    return int(words[words.index("part") + 1]) if "part" in words else 0, int(words[words.index("epoch") + 1])


def read_an_epoch(rows, rank: int, ranks: int, workers: int, queue) -> None:
    """Read as a data-parallel rank until all its parts have begun their second epoch."""
    torch.set_num_threads(1)  # a fork has none of OpenMP's, and would wait for them
    stream = BatchStream(rows, dp_rank=rank, dp_size=ranks, num_workers=workers)
    found, parts = list[str](), {rank + ranks * worker for worker in range(max(1, workers))}
    while not parts <= {part for part, epoch in map(part_and_epoch, found) if epoch == 1}:
        found += next(stream).sample_ids
    queue.put(found)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("ranks", "workers"), [(ranks, workers) for ranks in (1, 2, 4) for workers in (0, 2)])
def test_streamed_parts_of_ranks_and_workers_read_each_sample_once(make, divided, ranks, workers):
    dataset, log = divided
    rows = StreamedRows(make(dataset=dataset)(), ranks * max(1, workers))
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [fork.Process(target=read_an_epoch, args=(rows, rank, ranks, workers, queue)) for rank in range(ranks)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=300) for _ in processes]
    for process in processes:
        process.join(300)
    first = Counter(name for names in found for name in names if part_and_epoch(name)[1] == 0)
    assert len(first) == 40 and set(first.values()) == {1}
    readers = defaultdict(set)
    for process, sample in map(str.split, log.read_text().splitlines()):
        readers[sample].add(process)
    assert sorted(map(int, readers)) == list(range(40)) and {len(one) for one in readers.values()} == {1}
    assert len(set.union(*readers.values())) == ranks * max(1, workers)


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, 9])
def test_streamed_rows_resume_raises_if_stream_parts_differ(make, divided, done):
    rows = StreamedRows(make(dataset=divided[0])(), 4)

    def streams(ranks: int, workers: int) -> list[BatchStream]:
        return [BatchStream(rows, dp_rank=rank, dp_size=ranks, num_workers=workers) for rank in range(ranks)]

    def batches(streams, number: int) -> list:
        return [next(streams[place % len(streams)]) for place in range(number)]

    expected = batches(streams(2, 2), 4 * done + 12)
    before = streams(2, 2)
    batches(before, 4 * done)
    state = before[1].state_dict()
    for ranks, workers in ((2, 2), (4, 0), (1, 0), (1, 4)):
        resumed = streams(ranks, workers)
        for stream in resumed:
            stream.load_state_dict(state)
        assert all(map(same, batches(resumed, 12), expected[4 * done :]))
    other = BatchStream(StreamedRows(make(dataset=divided[0])(), 2))
    with pytest.raises(ValueError, match=r"a stream of 4 parts, but this run reads 2 .* dataset.stream_parts=4,"):
        other.load_state_dict(state)


@pytest.mark.slow
def test_streamed_part_begins_next_epoch_when_its_samples_are_used_up(make, divided, caplog):
    rows = StreamedRows(make(dataset=divided[0])(), 3)
    assert caplog.messages == [
        "train: 8 files or row groups are divided into 3 parts of 2 or 3. Samples of the smaller parts are read more "
        "often. To avoid this, use a number of parts that divides the number of files or row groups"
    ]
    shares = [BatchStream(rows, dp_rank=rank, dp_size=3) for rank in range(3)]
    names = [[name for batch in take(share, 30) for name in batch.sample_ids] for share in shares]
    sizes = [Counter(part_and_epoch(name)[1] for name in share) for share in names]
    assert [size[0] for size in sizes] == [15, 15, 10] and all(size[1] == size[0] for size in sizes)


def test_streamed_rows_raise_if_files_are_fewer_than_stream_parts(make, divided, stream):
    with pytest.raises(DataError, match=r"^train: found 8 files or row groups .*expected at least 9, one for each"):
        StreamedRows(make(dataset=divided[0])(), 9)


def test_streamed_single_parquet_file_is_divided_by_row_groups(make, even_file, tmp_path):
    path, cache = tmp_path / "train.parquet", str(tmp_path / "cache")
    datasets.Dataset.from_json(str(even_file), cache_dir=cache).to_parquet(path, batch_size=10)
    dataset = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    assert dataset.num_shards == 1
    streamed = StreamedRows(make(dataset=dataset)(), 4)
    found = [next(row for row in count() if streamed[4 * row + part].window.epoch == 1) for part in range(4)]
    rows = [4 * row + part for part, end in enumerate(found) for row in range(end)]
    names = [one.sample_id for row in rows for one in streamed[row].samples]
    assert len(set(names)) == len(names) == 40 and {part_and_epoch(name)[0] for name in names} == {0, 1, 2, 3}


def test_streamed_dropped_samples_are_counted_once_over_all_parts(make, divided, tmp_path, caplog):
    for number in range(FILES):
        with (tmp_path / f"{number}.jsonl").open("a") as file:
            answer = [{"type": "text", "text": "99"}]
            file.write(json.dumps({"messages": [{"role": "assistant", "content": answer}]}) + "\n")
    caplog.set_level("WARNING", "qwen3vl_bridge.data.samples")
    rows = StreamedRows(make(dataset=divided[0], on_bad="drop")(), 4, Sizes().count_drop)
    dropped = Counter()
    for number in count():
        row = rows[number]
        dropped[number % 4, row.window.epoch] += sum(row.newly_dropped)
        assert row.dropped == () and rows.collate_fn([row]).newly_dropped == row.newly_dropped
        if all((part, 2) in dropped for part in range(4)):
            break
    assert {(epoch, count) for (_, epoch), count in dropped.items()} == {(0, 2), (1, 0), (2, 0)}
    said = [int(text.split("dropped, ")[1].split()[0]) for text in caplog.messages if "dropped, " in text]
    assert said[:5] == [1, 2, 3, 4, 8] and len(said) < 8  # the first of all parts together


def test_streamed_evaluation_reads_each_sample_once_then_repeats_rows(make, divided):
    rows = StreamedRows(make(dataset=divided[0], seed=None, repeat=40)(), 4)
    batches = [rows.collate_fn([rows[number]]) for number in range(40)]
    trained = Counter(name for batch in batches if batch.loss_mask.any() for name in batch.sample_ids)
    assert len(trained) == 40 and set(trained.values()) == {1}
    assert same(rows.collate_fn([rows[43]]), batches[3])


class Breaks(JsonLines):
    def __getitem__(self, index):
        if index == 2:
            raise DataUnavailable(self.sample_id(index), "found no answer")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_batch_stream_raises_data_unavailable_despite_on_bad_drop(make, train_file, workers):
    stream = BatchStream(make(seed=None, on_bad="drop", source=Breaks(train_file))(), num_workers=workers)
    with pytest.raises(DataUnavailable, match=r"^train.jsonl:3: found no answer$"):
        take(stream, 8)


def test_offline_packing_raises_if_data_is_streamed(make, tmp_path):
    with pytest.raises(ValueError, match="the data set is streamed, so its rows cannot be packed before"):
        pack(make()(), tmp_path / "rows")


@pytest.fixture
def provider(make_provider, train_file, divided, monkeypatch):
    def load(name, split, streaming):
        assert (name, split, streaming) == ("me/digits", "train", True)
        return divided[0]

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load)

    paths = {"train_path": "hf://me/digits", "valid_path": "hf://me/digits#train", "media_root": train_file.parent}
    return lambda **changes: make_provider(**{**paths, "window_size": 8, "streaming": True, **changes})


def test_streamed_provider_reads_hub_data_set_for_training_and_validation(provider):
    seen = sorted(place for batch in provider().evaluation("valid") for place in places(batch))
    assert seen == list(range(40))
    first, again = (take(provider().stream("train"), 5) for _ in range(2))
    assert ids(first) == ids(again)
    assert all("of epoch 0]" in name for batch in first for name in batch.sample_ids)


@pytest.mark.slow
def test_streamed_build_datasets_yields_same_rows_as_rank_streams(provider):

    def names(rows, numbers):
        return [[sample.sample_id for sample in rows[number].samples] for number in numbers]

    one = provider(num_workers=2, pad_to_multiple_of=4)
    train, valid, test = built(one, 40, 8, dp=2)
    assert len(train) == 40 and test is None and one.position["data"]["parts"] == 4
    streams = [one.stream("train", dp_rank=rank, dp_size=2) for rank in range(2)]
    expected = [list(next(streams[number % 2]).sample_ids) for number in range(12)]
    assert names(train, range(12)) == expected
    assert all(name.endswith(f"part {n % 4} of 4]") for n, row in enumerate(expected) for name in row)
    shared, other = (built(provider(num_workers=2), 40, dp=2, cp=2, dp_rank=rank)[0] for rank in range(2))
    assert names(shared, range(12)) == names(other, range(12)) == expected
    assert all("epoch" not in name for row in names(valid, range(8)) for name in row)

    later = provider(num_workers=1)
    later.expect_position(one.position, 12)
    with pytest.raises(
        ValueError, match=r"a stream of 4 parts, but this run reads 2 parts\. Use as many data-parallel ranks"
    ):
        built(later, 40, dp=2)
    again = provider(num_workers=1, stream_parts=4, pad_to_multiple_of=4)
    again.expect_position(one.position, 12)
    assert names(built(again, 40, dp=2)[0], range(12)) == expected


def test_streamed_provider_raises_if_settings_are_invalid(provider):
    for changes, message in (
        ({"streaming": False, "stream_parts": 4}, "stream_parts is 4, but streaming is off"),
        ({"stream_parts": 0}, "stream_parts is 0, expected at least 1"),
        ({"balance_over": 4}, "balance_over is 4, but streaming is on, and this setting needs random access"),
        ({"train_packing": "rows"}, "train_packing is 'rows', but streaming is on"),
        ({"train_path": "train.jsonl"}, "streaming is on, but train.jsonl is not on the hub; use hf://owner/name"),
    ):
        with pytest.raises(ValueError, match=message):
            provider(**changes)
    with pytest.raises(ValueError, match=r"_parts is 3, expected a multiple of 8: 2 data-.* x 2 data-.* x 2 rows"):
        provider(stream_parts=3, num_workers=2, rows_of_microbatch=2).stream("train", dp_size=2)

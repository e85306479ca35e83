"""Which addresses were given up is the same for all that train on some data, whatever is downloaded meanwhile."""

import json
from pathlib import Path

from qwen3vl_bridge import Qwen3VLConversationProvider
from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import DataError, open_source
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media.media_access import DownloadRecord, UrlCache, digest_of
from qwen3vl_bridge.data.packing import sample_sizes

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist
from megatron.bridge.data.base import DatasetBuildContext

from .conftest import groups, write
from .media.test_video import ask
from .packing.test_shared_sizes import run as run_processes
from .servers import png


def asking(address: str) -> dict:
    return {"messages": ask({"type": "image", "image": address})}


@pytest.fixture
def download(server, tmp_path, capsys):
    """Downloads what a file refers to; the command's status."""

    def download(*data: object, cache: str = "cache", options: tuple[str, ...] = ()) -> int:
        where = ["--url-cache", str(tmp_path / cache), "--allowed-urls", f"{server.url}/"]
        status = main(["download", *map(str, data), *where, *options])
        capsys.readouterr()
        return status

    return download


@pytest.fixture
def training(checkpoint, tmp_path):
    """A run's rows of a file, each a job of its own."""

    def training(file: Path, cache: str = "cache", **settings) -> Qwen3VLConversationProvider:
        sample_sizes._job.cache_clear()
        provider = Qwen3VLConversationProvider(
            train_path=str(file), hf_processor_path=str(checkpoint), seq_length=256, num_workers=0, on_bad="drop",
            url_cache=str(tmp_path / cache), **{"window_size": 4, **settings},
        )  # fmt: skip
        provider.finalize()
        return provider

    return training


@pytest.fixture
def file(server, tmp_path) -> Path:
    """Eight conversations with a picture each, of which two are gone."""
    names = [f"/{number}.png" for number in range(8)]
    server.answers = {name: png() for name in names} | {"/2.png": 404, "/5.png": 404}
    return write(tmp_path / "data/train.jsonl", [asking(server.url + name) for name in names])


def samples_of(provider, number: int = 1) -> list[list[str]]:
    stream = provider.stream("train")
    return [sorted(next(stream).sample_ids) for _ in range(number)]


def test_a_run_goes_on_with_what_it_began_with_or_not_at_all(server, download, training, file, tmp_path, checkpoint):
    assert download("--data", file) == 1
    stream = training(file).stream("train")
    next(stream)
    state = stream.state_dict()
    assert "without 2 of 8 addresses (" in state["data"]["data"]
    training(file).stream("train").load_state_dict(state)

    # The command run again changes nothing.
    assert download("--data", file) == 1
    training(file).stream("train").load_state_dict(state)
    packing = ["pack", "--data", str(file), "--hf-model", str(checkpoint), "--seq-length", "256", "--on-bad", "drop"]
    packing += ["--workers", "0", "--url-cache", str(tmp_path / "cache"), "--output", str(tmp_path / "rows")]
    assert main(packing) == 0

    server.answers["/2.png"] = png()
    assert download("--data", file, options=("--retry",)) == 1
    found = r"found data \w+, without 1 of 8 addresses \(\w+\), expected \w+, without 2 of 8 addresses"
    with pytest.raises(ValueError, match=f"position belongs to other data: {found}"):
        training(file).stream("train").load_state_dict(state)
    provider = training(file, train_packing=str(tmp_path / "rows"), window_size=512)
    with pytest.raises(ValueError, match=r"has data \w+, without 1 of 8 .* \(packed with \w+, without 2 of"):
        provider.rows("train")


def test_a_stream_goes_by_the_record_of_its_download(server, download, training, checkpoint, tmp_path, monkeypatch):
    """Which addresses were given up is part of what the stream is; downloads read it by number."""
    names = [f"/{number}.png" for number in range(8)]
    server.answers = {name: png() for name in names} | {"/2.png": 404, "/5.png": 404}
    records = [asking(server.url + name) for name in names]
    for record in records:  # contents of one type, as tables need it
        record["messages"][1]["content"] = [{"type": "text", "text": "Seven."}]

    def load(*name, split, streaming=False, **_):
        whole = datasets.Dataset.from_list(records)
        return whole.to_iterable_dataset(num_shards=2) if streaming else whole

    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_, **__: ["train"])
    monkeypatch.setattr(datasets, "load_dataset", load)
    assert download("--data", "hf://me/digits#train") == 1
    stream = training("hf://me/digits#train", streaming=True).stream("train")
    assert "without 2 of 8 addresses (" in stream.state_dict()["data"]["data"]
    batches = [next(stream) for _ in range(4)]
    assert sum(sum(batch.newly_dropped) for batch in batches) >= 2
    state = stream.state_dict()
    training("hf://me/digits#train", streaming=True).stream("train").load_state_dict(state)

    server.answers["/2.png"] = png()
    assert download("--data", "hf://me/digits#train", options=("--retry",)) == 1
    with pytest.raises(ValueError, match=r"other data: found data .*, without 1 of 8 addresses"):
        training("hf://me/digits#train", streaming=True).stream("train").load_state_dict(state)


def test_data_with_all_their_addresses_are_what_they_are_without_a_record(server, download, training, file, tmp_path):
    """Runs of before go on, and so do those whose folder was copied without records."""
    server.answers |= {"/2.png": png(), "/5.png": png()}
    assert download("--data", file) == 0
    with_record = open_source(file, addresses=UrlCache(tmp_path / "cache")).fingerprint()
    (record,) = (tmp_path / "cache/records").iterdir()
    record.unlink()
    assert with_record == open_source(file, addresses=UrlCache(tmp_path / "cache")).fingerprint()
    assert len(samples_of(training(file))[0]) > 1


def test_other_data_in_the_same_folder_change_nothing_unnoticed(server, download, training, file, tmp_path):
    download("--data", file)
    before = samples_of(training(file), 4)

    # One that is tried anew for others is there by now.
    server.answers["/2.png"] = png()
    other = write(tmp_path / "other/train.jsonl", [asking(f"{server.url}/2.png"), asking(f"{server.url}/x.png")])
    download("--data", other, options=("--retry",))
    with pytest.raises(Unreachable, match=r"2.png', which is there by now, and had been given up when these data were"):
        samples_of(training(file), 4)
    (found,) = (path for path in (tmp_path / "cache").rglob("*2.png") if path.is_file())
    found.unlink()
    assert samples_of(training(file), 4) == before

    # One that is gone, and given up for others alone.
    third = write(tmp_path / "third/train.jsonl", [asking(f"{server.url}/x.png"), asking(f"{server.url}/0.png")])
    with pytest.raises(Unreachable, match=r"x.png', which could not be downloaded \(.*404.*\), and no record of that"):
        samples_of(training(third))
    assert download("--data", third) == 1
    assert len(samples_of(training(third))[0]) == 1


def test_a_download_that_is_not_at_its_end_is_refused_before_the_work(server, download, training, file, tmp_path):
    server.answers["/5.png"] = 503
    download("--data", file)
    message = "found 1 of 8 URLs not downloaded; run `qwen3vl data download` again, or with --give-up to exclude them"
    with pytest.raises(Unreachable, match=message):
        training(file).rows("train")
    download("--data", file, options=("--give-up",))
    assert "without 2 of 8" in training(file).rows("train").fingerprint()["data"]


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_every_kind_of_source_has_a_record_and_each_set_of_a_mixture(server, download, file, tmp_path, kind):
    records = [json.loads(line) for line in file.read_text().splitlines()]
    other = tmp_path / f"other.{kind}"
    if kind == "json":
        other.write_text(json.dumps(records[2:]))
    else:
        turns = [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": "Seven."}]
        addresses = [f"{server.url}/{number}.png" for number in range(2, 8)]
        pq.write_table(pa.Table.from_pylist([{"messages": turns, "images": [one]} for one in addresses]), other)
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"- {{path: {file}, name: first}}\n- {{path: {other}, name: second}}\n")
    assert download("--mixture", mix) == 1
    cache = UrlCache(tmp_path / "cache")
    assert "without 2 of 8 addresses" in open_source(file, addresses=cache).fingerprint()
    assert "without 2 of 6 addresses" in open_source(other, addresses=cache).fingerprint()
    assert server.asked["/0.png"] == server.asked["/7.png"] == 1


def test_machines_with_other_downloads_are_refused_together(server, download, training, file, tmp_path):
    """Two processes with a folder each: one could get a picture that the other could not."""
    download("--data", file, cache="one")
    server.answers["/2.png"] = png()
    download("--data", file, cache="other")

    def begin(rank: int):
        def on_rank() -> str:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
            provider = training(file, cache=["one", "other"][rank])
            context = DatasetBuildContext(
                train_samples=4, valid_samples=0, test_samples=0, pg_collection=groups(dp=2, dp_rank=rank)
            )
            try:
                provider.build_datasets(context)
            except ValueError as error:
                return str(error)
            return "built"

        return on_rank

    said = run_processes(begin(0), begin(1))
    for one in said:
        assert one.startswith("the data of the split 'train' differ among the processes: found ")
        assert "without 1 of 8 addresses" in one and "expected " in one and "on rank 0. Every machine needs" in one


def test_a_record_knows_what_it_was_made_of(tmp_path):
    addresses = [f"http://a/{number}.png" for number in range(200)]
    record = DownloadRecord.of(300, 1, map(digest_of, addresses[::2]))
    record.write(tmp_path, "data")
    again = DownloadRecord.read(tmp_path, "data")
    assert again == record and DownloadRecord.read(tmp_path, "other") == DownloadRecord()
    assert [digest_of(address) in again for address in addresses] == [True, False] * 100
    assert digest_of("http://a/0.png#top") in again
    whole = DownloadRecord(300, 0, record.given_up)
    assert whole.mark("data", "here").startswith("data, without 100 of 300 addresses (")
    (file,) = (tmp_path / "records").iterdir()
    for damaged in (b"", b"[]", b'{"total": 1}', file.read_bytes().replace(b'["', b'["a')):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read what was downloaded .* download of these data mends it"):
            DownloadRecord.read(tmp_path, "data")

"""Test `qwen3vl data download`: each URL once, in parallel, resumed after a stop; and its records."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from qwen3vl_bridge.cli.data import main
from qwen3vl_bridge.data import Columns, DataError, JsonLines, open_source
from qwen3vl_bridge.data import samples as samples_module
from qwen3vl_bridge.data.downloading import Downloader
from qwen3vl_bridge.data.errors import DataUnavailable
from qwen3vl_bridge.data.media import DownloadRecord, MediaAccess, UrlCache, find_media, url_digest

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch.distributed as dist

from tests.data.conftest import built, dialogue, write
from tests.data.servers import files, png, send
from tests.data.test_shared_sizes import run as run_processes
from tests.data.test_videos import ask, clip


def asking(*addresses: str) -> dict:
    return {"messages": ask(*({"type": "image", "image": address} for address in addresses))}


@pytest.fixture
def download(server, tmp_path):
    def download(*options: object, cache: str = "cache") -> int:
        where = ["--url-cache", str(tmp_path / cache), "--allowed-urls", f"{server.url}/"]
        return main(["download", *where, *map(str, options)])

    return download


@pytest.fixture
def run(download, tmp_path, capsys):
    """Return a function that runs the command on records; it returns the exit status and the report."""

    def run(records: list, *options: str) -> tuple[int, dict]:
        status = download("--data", write(tmp_path / "train.jsonl", records), "--json", *options)
        return status, json.loads(capsys.readouterr().out)

    return run


def manifest_of(tmp_path: Path) -> Path:
    return tmp_path / "cache/failed.jsonl"


def manifest(tmp_path: Path) -> dict[str, bool]:
    lines = [json.loads(line) for line in manifest_of(tmp_path).read_text().splitlines()]
    return {line["address"].rpartition("/")[2]: line["final"] for line in lines}


def test_download_requests_each_url_once(server, run, tmp_path):
    names = [f"/{number}.png" for number in range(50)]
    server.answers = {name: png() for name in names}
    records = [asking(server.url + names[n], server.url + names[(7 * n) % 50]) for n in range(50)] * 2
    assert run(records) == (0, {"downloaded": 50, "present": 0, "failures": [], "unread": []})
    assert server.asked == Counter(names) and len(files(tmp_path / "cache")) == 52  # the manifest and the record, too
    assert run(records)[1]["present"] == 50 and server.asked == Counter(names)
    assert run([*records, asking(f"{server.url}/0.png#top")])[1]["present"] == 50


def test_download_with_8_workers_requests_8_urls_at_once(server, run):
    together = threading.Barrier(8)

    def answer(handler):
        together.wait(30)
        send(handler, 200, png())

    server.answers = {f"/{number}.png": answer for number in range(8)}
    records = [asking(f"{server.url}/{number}.png") for number in range(8)]
    assert run(records, "--workers", "8") == (0, {"downloaded": 8, "present": 0, "failures": [], "unread": []})
    assert set(server.asked.values()) == {1} and not together.broken


def test_downloaded_images_and_videos_are_read_in_training_without_server(
    server, run, make_provider, encoder, tmp_path
):
    server.answers = {"/a.png": png(), "/b.mkv": clip(tmp_path / "b.mkv", 12).read_bytes()}
    url = server.url
    frames = {"type": "video", "video": [f"{url}/a.png", "local.png"], "sample_fps": 2}
    parts = [{"type": "image", "image": f"{url}/a.png"}, {"type": "video", "video": f"{url}/b.mkv"}, frames]
    (tmp_path / "local.png").write_bytes(png("blue"))
    assert run([{"messages": ask(*parts)}])[0] == 0
    assert server.asked == {"/a.png": 1, "/b.mkv": 1}
    server.close()

    cache = UrlCache(tmp_path / "cache")
    conversation = open_source(tmp_path / "train.jsonl", url_cache=cache)[0]
    sample = encoder(conversation)
    assert encoder.size(conversation).tokens == len(sample)
    local = [parts[0] | {"image": "local.png"}, parts[1] | {"video": "b.mkv"}, frames | {"video": ["local.png"] * 2}]
    same = encoder(JsonLines(write(tmp_path / "local.jsonl", [{"messages": ask(*local)}]))[0])
    assert (sample.input_ids == same.input_ids).all() and len(sample.pixel_values_videos) > 12

    provider = make_provider(train_path=tmp_path / "train.jsonl", seq_length=512, url_cache=tmp_path / "cache")
    assert next(provider.stream("train")).vision is not None


def test_second_download_requests_only_temporarily_failed_urls(server, run, tmp_path):
    server.answers = {"/a.png": png(), "/gone.png": 404, "/busy.png": 503, "/page.png": b"<html>"}
    far = "http://far.example/1.png"
    records = [asking(f"{server.url}/{name}") for name in ("a.png", "gone.png", "busy.png", "page.png")]
    records += [asking(far), asking("http://"), {"messages": []}]
    status, report = run(records)
    assert status == 1 and report["downloaded"] == 1 and report["unread"][0].startswith("train.jsonl:7: found")
    problems = {failure["address"]: failure["problem"] for failure in report["failures"]}
    assert problems[far].endswith(f"expected one that begins with {server.url}/ (--allowed-urls)")
    failed = {"gone.png": True, "page.png": True, "": True, "busy.png": False, "1.png": False}
    assert manifest(tmp_path) == failed

    # What failed for good is a bad sample; at the rest training stops.
    cache = UrlCache(tmp_path / "cache")
    with pytest.raises(DataError, match=r"^here: found the URL '.*gone.png', which could not be downl.*status 404"):
        cache(f"{server.url}/gone.png", "here")
    for address in (f"{server.url}/busy.png", far, "http://new.example/1.png"):
        with pytest.raises(
            DataUnavailable, match=r"^here: found the URL .*run `qwen3vl data download` for these data, with"
        ):
            cache(address, "here")

    # Only what is not known to be gone is asked for again, unless that is wanted too.
    server.answers |= {"/gone.png": png(), "/busy.png": png()}
    before = server.asked.copy()
    assert run(records)[1]["downloaded"] == 1 and server.asked - before == {"/busy.png": 1}
    assert run(records, "--retry")[1]["downloaded"] == 1 and cache(f"{server.url}/gone.png", "here").is_file()
    assert run(records, "--give-up")[0] == 1 and set(manifest(tmp_path).values()) == {True}
    with pytest.raises(DataError, match="could not be downloaded") as caught:
        cache(far, "here")
    assert not isinstance(caught.value, DataUnavailable)
    assert run(records[:1], "--manifest", str(tmp_path / "other/failed.jsonl"))[0] == 0
    assert (tmp_path / "other/failed.jsonl").read_text() == ""
    assert not list(tmp_path.rglob("*.unfinished"))


@pytest.mark.slow
def test_download_killed_leaves_failures_so_far_in_unfinished_manifest(server, tmp_path):
    server.answers = {"/0.png": 404, "/1.png": 404}
    server.first = {"/9.png": [lambda handler: time.sleep(60)]}
    file = write(tmp_path / "train.jsonl", [asking(f"{server.url}/{name}.png") for name in (0, 1, 9)])
    command = [sys.executable, "-m", "qwen3vl_bridge", "data", "download", "--data", str(file), "--workers", "3"]
    command += ["--url-cache", str(tmp_path / "cache"), "--allowed-urls", f"{server.url}/"]
    unfinished = tmp_path / "cache/failed.jsonl.unfinished"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b'{"address": "http://a/b.p')  # it was killed, too
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    begin = unfinished.stat().st_size + 1
    while process.poll() is None and unfinished.read_bytes()[begin:].count(b"\n") < 2:
        time.sleep(0.05)
    process.kill()
    process.wait()
    found = [json.loads(line) for line in unfinished.read_bytes()[begin:].splitlines()]
    assert {one["address"][-5:] for one in found} == {"0.png", "1.png"} and all(one["final"] for one in found)
    assert not (tmp_path / "cache/failed.jsonl").exists() and not (tmp_path / "cache/records").exists()
    server.answers["/9.png"] = png()
    assert main(command[4:]) == 1
    assert manifest(tmp_path) == {"0.png": True, "1.png": True} and not unfinished.exists()


@pytest.mark.slow
@pytest.mark.parametrize("sent", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_download_after_interrupt_or_kill_requests_only_missing_urls(server, run, tmp_path, sent):
    several = [f"/{number}.png" for number in range(12)]
    server.answers = {name: png() for name in several}

    def slow(handler):
        send(handler, 200, png()[:40], Content_Length=len(png()))
        time.sleep(60)

    server.first = {name: [slow] for name in several[6:]}
    file = write(tmp_path / "train.jsonl", [asking(server.url + name) for name in several])
    command = [sys.executable, "-m", "qwen3vl_bridge", "data", "download", "--data", str(file), "--workers", "8"]
    command += ["--give-up", "--url-cache", str(tmp_path / "cache"), "--allowed-urls", f"{server.url}/"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while sum(server.asked[name] for name in several) < 12 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(sent)
    assert process.wait(60) == (130 if sent is signal.SIGINT else -sent)
    whole = list((tmp_path / "cache").rglob("[!.]*.png"))
    assert len(whole) <= 6 and all(path.read_bytes() == png() for path in whole)
    assert not list((tmp_path / "cache").rglob("*.problem"))
    before = server.asked.copy()
    status, report = run([asking(server.url + name) for name in several])
    assert status == 0 and report["present"] == len(whole) and report["downloaded"] == 12 - len(whole)
    assert (server.asked - before).total() == 12 - len(whole)


def test_download_exits_with_code_2_if_cache_or_allowed_urls_are_unusable(server, download, tmp_path, capsys):
    server.answers["/a.png"] = png()
    (tmp_path / "cache").write_text("a file")
    file = write(tmp_path / "train.jsonl", [asking(f"{server.url}/a.png")])
    assert download("--data", file) == 2
    assert str(tmp_path / "cache") in capsys.readouterr().err
    assert download("--data", file, "--allowed-urls", "ftp://a") == 2
    assert "--allowed-urls: allowed_urls has 'ftp://a', expected a scheme" in capsys.readouterr().err


def test_download_default_folder_is_user_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert UrlCache().path_of("http://a/1.png").is_relative_to(tmp_path / "xdg/qwen3vl_bridge/media")
    with pytest.raises(DataUnavailable, match=f"no download of it in {tmp_path}/xdg/qwen3vl_bridge/media"):
        find_media("http://a/1.png", MediaAccess(), "here")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert UrlCache().root == Path.home() / ".cache/qwen3vl_bridge/media"


CAPTIONS = {"image": "image_url", "question": "text:Describe this image.", "answer": "caption"}


@pytest.fixture
def captions(server, tmp_path) -> Path:
    """Write captions of images, one of which is missing."""
    server.answers = {"/0.png": png(), "/1.png": png("blue"), "/2.png": 404}
    file = tmp_path / "train.parquet"
    addresses = [f"{server.url}/{number}.png" for number in range(3)]
    rows = [{"image_url": one, "caption": "A house.", "transcripts": ["Well, a house."]} for one in addresses]
    pq.write_table(pa.Table.from_pylist(rows), file)
    return file


def test_download_requests_urls_of_column_in_columns_option(server, download, captions, encoder, tmp_path, capsys):
    assert download("--data", captions) == 2 and not server.asked
    assert "found the columns image_url, caption, transcripts, expected" in capsys.readouterr().err
    assert download("--data", captions, "--columns", *(f"{key}={column}" for key, column in CAPTIONS.items())) == 1
    assert server.asked == {"/0.png": 1, "/1.png": 1, "/2.png": 1}

    source = open_source(captions, url_cache=UrlCache(tmp_path / "cache"), columns=Columns(**CAPTIONS))
    assert source.fingerprint().count("without 1 of 3 addresses") == 1
    for number in range(2):
        assert encoder(source[number]).pixel_values is not None
    with pytest.raises(DataError, match=r"which could not be downloaded: .*found the status 404") as caught:
        source[2]
    assert not isinstance(caught.value, DataUnavailable)


def test_training_raises_if_download_used_different_columns_setting(download, captions, tmp_path):
    rows = [{**row, "large_url": f"{row['image_url']}?large"} for row in pq.read_table(captions).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows), captions)
    options = ["question=text:Describe this image.", "answer=caption", "ignore=large_url"]
    assert download("--data", captions, "--columns", "image=image_url", *options) == 1
    columns = Columns(**{**CAPTIONS, "image": "large_url"}, ignore=["image_url"])
    source = open_source(captions, url_cache=UrlCache(tmp_path / "cache"), columns=columns)
    with pytest.raises(DataUnavailable, match=r"found the URL '.*0.png\?large', and no download of it in") as caught:
        source[0]
    assert "run `qwen3vl data download` for these data, with --columns and --schema-adapter as in the run" in str(
        caught.value
    )


def test_download_with_schema_adapter_requests_its_image_urls(server, download, tmp_path):
    server.answers = {"/0.png": png()}
    truth = json.dumps({"gt_parse": {"menu": [{"nm": "Tea"}]}})
    file = write(tmp_path / "train.jsonl", [{"image": f"{server.url}/0.png", "ground_truth": truth}])
    assert download("--data", file, "--schema-adapter", "cord_v2") == 0
    source = open_source(file, url_cache=UrlCache(tmp_path / "cache"), schema_adapter="cord_v2")
    assert server.asked == {"/0.png": 1} and len(source[0].images) == 1


@pytest.fixture
def training(make_provider, tmp_path):
    """Return the rows of a run, as a separate job."""

    def training(file: Path | str, cache: str = "cache", **settings):
        samples_module._job.cache_clear()
        settings = {"on_bad": "drop", "window_size": 4, **settings}
        return make_provider(train_path=file, url_cache=tmp_path / cache, **settings)

    return training


@pytest.fixture
def file(server, tmp_path) -> Path:
    """Write eight conversations with an image each; two images are missing."""
    names = [f"/{number}.png" for number in range(8)]
    server.answers = {name: png() for name in names} | {"/2.png": 404, "/5.png": 404}
    return write(tmp_path / "data/train.jsonl", [asking(server.url + name) for name in names])


def samples_of(provider, number: int = 1) -> list[list[str]]:
    stream = provider.stream("train")
    return [sorted(next(stream).sample_ids) for _ in range(number)]


def test_resume_raises_if_download_changed_available_urls(server, download, training, file, tmp_path, checkpoint):
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
    assert download("--data", file, "--retry") == 1
    found = r"found data \w+, without 1 of 8 addresses \(\w+\), expected \w+, without 2 of 8 addresses"
    with pytest.raises(ValueError, match=f"position belongs to other data: {found}"):
        training(file).stream("train").load_state_dict(state)
    provider = training(file, train_packing=str(tmp_path / "rows"), window_size=512)
    with pytest.raises(ValueError, match=r"has data \w+, without 1 of 8 .* \(packed with \w+, without 2 of"):
        provider.rows("train")


def test_streamed_resume_raises_if_download_changed_available_urls(server, download, training, file, monkeypatch):
    records = [json.loads(line) for line in file.read_text().splitlines()]
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
    assert download("--data", "hf://me/digits#train", "--retry") == 1
    with pytest.raises(ValueError, match=r"other data: found data .*, without 1 of 8 addresses"):
        training("hf://me/digits#train", streaming=True).stream("train").load_state_dict(state)


def test_download_without_failures_does_not_change_data_fingerprint(server, download, training, file, tmp_path):
    server.answers |= {"/2.png": png(), "/5.png": png()}
    assert download("--data", file) == 0
    with_record = open_source(file, url_cache=UrlCache(tmp_path / "cache")).fingerprint()
    (record,) = (tmp_path / "cache/records").iterdir()
    record.unlink()
    assert with_record == open_source(file, url_cache=UrlCache(tmp_path / "cache")).fingerprint()
    assert len(samples_of(training(file))[0]) > 1


def test_training_raises_if_download_for_another_dataset_changed_cache(server, download, training, file, tmp_path):
    download("--data", file)
    before = samples_of(training(file), 4)

    # One that is tried anew for others is there by now.
    server.answers["/2.png"] = png()
    other = write(tmp_path / "other/train.jsonl", [asking(f"{server.url}/2.png"), asking(f"{server.url}/x.png")])
    download("--data", other, "--retry")
    with pytest.raises(DataUnavailable, match=r"2.png', which exists now, but its download failed .* again$"):
        samples_of(training(file), 4)
    (found,) = (path for path in (tmp_path / "cache").rglob("*2.png") if path.is_file())
    found.unlink()
    assert samples_of(training(file), 4) == before

    # One that is gone, and given up for others alone.
    third = write(tmp_path / "third/train.jsonl", [asking(f"{server.url}/x.png"), asking(f"{server.url}/0.png")])
    with pytest.raises(DataUnavailable, match=r"x.png', which failed in a download of other data \(.*404.*\)"):
        samples_of(training(third))
    assert download("--data", third) == 1
    assert len(samples_of(training(third))[0]) == 1


def test_training_drops_samples_if_5_percent_of_urls_failed_temporarily(server, download, training, file, tmp_path):
    server.answers |= {f"/{number}.png": png() for number in range(8, 20)} | {"/5.png": 503}
    write(file, [asking(f"{server.url}/{number}.png") for number in range(20)])
    assert download("--data", file) == 1  # one of twenty may be requested again: not more than 5 %
    rows = training(file).rows("train")
    assert "without 2 of 20 addresses" in rows.fingerprint()["data"]
    batches = training(file).stream("train")
    assert [next(batches) for _ in range(12)][-1].dropped == (2,)
    with pytest.raises(
        DataError, match=r"train data: 2 of 20 records .*dataset.on_bad=drop drops(.*\n)+.*download` again"
    ):
        training(file, on_bad="error").check_samples()
    server.answers["/5.png"] = png()  # it is requested again, unlike the one that is gone
    assert download("--data", file) == 1
    assert "without 1 of 20 addresses" in training(file).rows("train").fingerprint()["data"]


def test_training_raises_if_over_5_percent_of_urls_failed_temporarily(server, download, training, file, capsys):
    server.answers |= {"/2.png": 503, "/5.png": 404}
    assert download("--data", file) == 1
    assert "more than 5% of the URLs of a data set, training stops, unless --give-up" in capsys.readouterr().out
    message = r"train.jsonl:\d: .*: 1 of 8 images and videos could not be downloaded .*; run .* --give-up to train"
    for work in (training(file).check_samples, lambda: samples_of(training(file), 4)):
        with pytest.raises(DataError, match=message):
            work()
    assert download("--data", file, "--give-up") == 1
    training(file).check_samples()
    assert "without 2 of 8 addresses" in training(file).rows("train").fingerprint()["data"]


@pytest.mark.parametrize("options", [(), ("--give-up",)])
def test_download_retries_unreachable_host_after_all_urls_were_tried(
    server, download, training, tmp_path, monkeypatch, options
):
    """The name server answers nothing until all URLs have been tried; one URL is in both data sets."""
    server.answers = {f"/{number}.png": png() for number in range(12)}
    addresses = [f"{server.url}/{number}.png" for number in range(12)]
    for kind, some in (("first", addresses[:8]), ("second", addresses[6:])):
        write(tmp_path / f"{kind}.jsonl", list(map(asking, some)))
    (tmp_path / "mix.yaml").write_text("".join(f"- path: {tmp_path}/{kind}.jsonl\n" for kind in ("first", "second")))
    connect, retried = socket.create_connection, threading.Event()

    def create_connection(*args, **kwargs):
        if not retried.is_set():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return connect(*args, **kwargs)

    allow = Downloader.allow_reconnecting
    monkeypatch.setattr(Downloader, "allow_reconnecting", lambda self: (retried.set(), allow(self)))
    monkeypatch.setattr(socket, "create_connection", create_connection)
    assert download("--mixture", tmp_path / "mix.yaml", *options) == 0
    assert server.asked == Counter(list(server.answers)) and manifest(tmp_path) == {}
    assert not list((tmp_path / "cache").rglob("*.problem"))
    for kind in ("first", "second"):
        assert (
            "without"
            not in open_source(tmp_path / f"{kind}.jsonl", url_cache=UrlCache(tmp_path / "cache")).fingerprint()
        )


def test_check_samples_raises_without_downloads_despite_on_bad_drop(training, file):
    message = r"train data: 8 of 8 records cannot be used:\n.*1: .* no download of it .*\n  the same in 7 more"
    with pytest.raises(DataError, match=message):
        training(file).check_samples()


def test_download_mixture_waits_for_unreachable_host_only_once(server, download, tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"
        names = [f"/{number}.png" for number in range(20)]
        server.answers = {name: png() for name in names}
        for kind in ("first", "second"):
            records = [asking(host + name + f"?{kind}") for name in names for host in (dead, server.url)]
            write(tmp_path / f"{kind}.jsonl", records)
        mix = tmp_path / "mix.yaml"
        mix.write_text("".join(f"- {{path: {tmp_path}/{kind}.jsonl}}\n" for kind in ("first", "second")))
        monkeypatch.setattr("qwen3vl_bridge.data.downloading.WAITS", (0.2, 30.0))
        begun = time.monotonic()
        assert download("--mixture", mix, "--allowed-urls", "http://", "--workers", 4) == 1
        assert time.monotonic() - begun < 10  # 20 s and more with a second wait
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "downloaded: 40; there before: 0",
        f"failed: 40, permanently 0; all of them: {manifest_of(tmp_path)}",
    ]
    assert sum("ConnectError" in line for line in manifest_of(tmp_path).read_text().splitlines()) <= 4  # the workers
    assert len(said) < 9


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_download_of_mixture_records_failed_urls_of_each_data_set(server, download, file, tmp_path, kind):
    records = [json.loads(line) for line in file.read_text().splitlines()]
    other = tmp_path / f"other.{kind}"
    if kind == "json":
        other.write_text(json.dumps(records[2:]))
    else:
        turns = dialogue("<image>", "Seven.")
        addresses = [f"{server.url}/{number}.png" for number in range(2, 8)]
        pq.write_table(pa.Table.from_pylist([{"messages": turns, "images": [one]} for one in addresses]), other)
    mix = tmp_path / "mix.yaml"
    mix.write_text(f"- {{path: {file}, name: first}}\n- {{path: {other}, name: second}}\n")
    assert download("--mixture", mix) == 1
    cache = UrlCache(tmp_path / "cache")
    assert "without 2 of 8 addresses" in open_source(file, url_cache=cache).fingerprint()
    assert "without 2 of 6 addresses" in open_source(other, url_cache=cache).fingerprint()
    assert server.asked["/0.png"] == server.asked["/7.png"] == 1


def test_build_datasets_raises_on_all_ranks_if_their_downloads_differ(server, download, training, file, tmp_path):
    download("--data", file, cache="one")
    server.answers["/2.png"] = png()
    download("--data", file, cache="other")

    def begin(rank: int):
        def on_rank() -> str:
            dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=rank, world_size=2)
            provider = training(file, cache=["one", "other"][rank])
            try:
                built(provider, 4, dp=2, dp_rank=rank)
            except ValueError as error:
                return str(error)
            return "built"

        return on_rank

    for one in run_processes(begin(0), begin(1)):
        assert one.startswith("the data of the split 'train' differ among the processes: found ")
        assert "without 1 of 8 addresses" in one and "expected " in one and "on rank 0. Every machine needs" in one


def test_download_record_is_read_back_unchanged(tmp_path):
    addresses = [f"http://a/{number}.png" for number in range(200)]
    record = DownloadRecord(300, frozenset(map(url_digest, addresses[::2])), 7)
    record.write(tmp_path, "data")
    again = DownloadRecord.read(tmp_path, "data")
    assert again == record and DownloadRecord.read(tmp_path, "other") == DownloadRecord()
    assert [url_digest(address) in again.failed for address in addresses] == [True, False] * 100
    assert url_digest("http://a/0.png#top") in again.failed
    assert record.add_missing_urls("data").startswith("data, without 100 of 300 addresses (")
    (file,) = (tmp_path / "records").iterdir()
    old = json.loads(file.read_bytes())
    del old["retryable"]
    file.write_text(json.dumps(old))
    assert DownloadRecord.read(tmp_path, "data") == DownloadRecord(300, record.failed)
    for damaged in (b"", b"[]", b'{"total": 1}', file.read_bytes().replace(b'["', b'["a')):
        file.write_bytes(damaged)
        with pytest.raises(DataError, match=r"cannot read the download record .* for these data again"):
            DownloadRecord.read(tmp_path, "data")

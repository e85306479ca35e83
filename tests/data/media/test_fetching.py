"""Pictures and videos from a server: fetched once, by any number of processes, or refused for a reason that is said."""

import multiprocessing
import random
import socket
import threading
import time
from pathlib import Path

from qwen3vl_bridge.data import DataError, JsonLines, open_source
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media import downloads as module
from qwen3vl_bridge.data.media.downloads import default_cache, fetch

import pytest

from ..conftest import write
from ..servers import files, png, redirect, send
from .test_video import ask, clip


def test_a_file_is_fetched_once_and_has_a_name_that_says_something(server, get, tmp_path):
    server.answers = {"/a/cat%20photo.png": png(), "/a": png("blue")}
    path = get("/a/cat%20photo.png?size=2")
    assert path.read_bytes() == png() and path.name.endswith("-cat_photo.png")
    assert get("/a/cat%20photo.png?size=2#top") == path and server.asked["/a/cat%20photo.png"] == 1
    other = get("/a/cat%20photo.png?size=3")
    assert other != path and server.asked["/a/cat%20photo.png"] == 2
    assert files(tmp_path / "cache") == sorted([path.name, other.name])
    server.close()
    (path.parent / ".lock").unlink()
    assert get("/a/cat%20photo.png?size=2") == path
    assert not (path.parent / ".lock").exists()  # what is there takes no lock


def test_conversations_train_on_what_was_fetched(server, encoder, tmp_path):
    """Planned, then encoded, and the same next time, also from frames and from a video."""
    server.answers = {"/a.png": png(), "/b.mkv": clip(tmp_path / "b.mkv", 12).read_bytes()}
    url = server.url
    frames = {"type": "video", "video": [f"{url}/a.png", "local.png"], "sample_fps": 2}
    parts = [{"type": "image", "image": f"{url}/a.png"}, {"type": "video", "video": f"{url}/b.mkv"}, frames]
    (tmp_path / "local.png").write_bytes(png("blue"))
    file = write(tmp_path / "train.jsonl", [{"messages": ask(*parts)}])
    options = {"allowed_urls": (f"{url}/",), "url_cache": tmp_path / "cache"}
    source = open_source(file, **options)
    sample = encoder(source[0])
    assert encoder.size(open_source(file, **options)[0]).tokens == len(sample)
    local = [parts[0] | {"image": "local.png"}, parts[1] | {"video": "b.mkv"}, frames | {"video": ["local.png"] * 2}]
    same = encoder(JsonLines(write(tmp_path / "local.jsonl", [{"messages": ask(*local)}]))[0])
    assert (sample.input_ids == same.input_ids).all() and len(sample.pixel_values_videos) > 12
    assert server.asked == {"/a.png": 1, "/b.mkv": 1}
    assert len(files(tmp_path / "cache")) == 2
    with pytest.raises(
        DataError, match=r"^train.jsonl:1: message 1, part 1: found the address 'http://127.*allowed_urls"
    ):
        open_source(file)[0]


def test_redirects_are_followed_where_they_are_allowed(server, get):
    to = {
        "1": "/a/2.png?x=1",
        "out": "/b/1.png",
        "up": "%2e%2e/b/1.png",
        "far": "http://evil.com/",
        "file": "file:///etc/passwd",
        "user": server.url.replace("//", "//me@") + "/a/2.png",
        "loop": "loop.png",
    }
    server.answers = {f"/a/{name}.png": redirect(address) for name, address in to.items()}
    server.answers |= {"/a/2.png": png(), "/b/1.png": png(), "/a/none.png": 302}
    allowed = f"{server.url}/a/"
    assert get("/a/1.png", allowed).read_bytes() == png()
    for name in ("out", "up", "far", "file", "user"):
        with pytest.raises(
            DataError, match=rf"^here: {allowed}{name}.png leads elsewhere: found the address '"
        ) as caught:
            get(f"/a/{name}.png", allowed)
        assert not isinstance(caught.value, Unreachable)
    assert server.asked["/b/1.png"] == 0
    assert get("/a/out.png", allowed, f"{server.url}/b/").read_bytes() == png()
    with pytest.raises(DataError, match="redirected over 5 times"):
        get("/a/loop.png")
    assert server.asked["/a/loop.png"] == 6
    with pytest.raises(DataError, match="found the status 302"):
        get("/a/none.png")


@pytest.mark.parametrize("status", [204, 400, 401, 403, 404, 410, 451])
def test_an_address_that_is_gone_is_a_bad_sample(server, get, tmp_path, status):
    server.answers["/a.png"] = status
    with pytest.raises(DataError, match=f"^here: {server.url}/a.png: found the status {status}") as caught:
        get("/a.png")
    assert not isinstance(caught.value, Unreachable)
    assert server.asked["/a.png"] == 1 and not files(tmp_path / "cache")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(server, get, tmp_path, status):
    server.answers["/a.png"], server.first["/a.png"] = png(), [status, status]
    assert get("/a.png").read_bytes() == png() and server.asked["/a.png"] == 3
    server.answers["/b.png"] = status
    with pytest.raises(Unreachable, match=rf"^here: found '{server.url}/b.png' out of reach after 3 .*status {status}"):
        get("/b.png")
    assert server.asked["/b.png"] == 3 and len(files(tmp_path / "cache")) == 1


def test_a_network_that_is_down_is_said_and_no_bad_sample(server, get, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
    for address in (f"{closed}/a.png", "http://no.such.host.invalid/a.png"):
        with pytest.raises(
            Unreachable, match=rf"^here: found '{address}' out of reach after 3 attempts \(ConnectError"
        ):
            fetch(address, ("http://",), tmp_path / "cache", "here")


def test_a_body_that_breaks_off_is_fetched_again(server, get, tmp_path):
    def half(handler):
        send(handler, 200, png()[:50], Content_Length=len(png()))
        handler.close_connection = True

    server.answers["/a.png"], server.first["/a.png"] = png(), [half]
    assert get("/a.png").read_bytes() == png() and server.asked["/a.png"] == 2
    server.answers["/b.png"] = half
    with pytest.raises(Unreachable, match="RemoteProtocolError"):
        get("/b.png")
    assert len(files(tmp_path / "cache")) == 1


@pytest.mark.parametrize(
    ("wait", "longest", "message"), [(0.4, 5, "ReadTimeout"), (0.05, 0.4, r"\([1-9]\d* bytes in 0 seconds")]
)
def test_a_slow_server_holds_nobody(server, get, tmp_path, monkeypatch, wait, longest, message):
    """Neither without a byte, nor with one now and then."""

    def drip(handler):
        send(handler, 200, b"", Content_Length=1000)
        for _ in range(400):
            handler.wfile.write(b"x")
            time.sleep(wait)

    server.answers["/a.png"] = drip
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    monkeypatch.setattr(module, "LONGEST", longest)
    begin = time.monotonic()
    with pytest.raises(Unreachable, match=message):
        get("/a.png")
    assert time.monotonic() - begin < 10 and not files(tmp_path / "cache")


@pytest.mark.parametrize("told", [True, False])
def test_too_much_is_refused(server, get, tmp_path, monkeypatch, told):
    def long(handler):
        if told:  # and not a byte of it sent
            send(handler, 200, Content_Length=5000)
        else:
            send(handler, 200, b"x" * 5000, Content_Length=None)
        handler.close_connection = True

    server.answers = {"/a.png": long, "/b.png": png() + b"x" * (1000 - len(png()))}
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    with pytest.raises(
        DataError, match=rf"here: {server.url}/a.png: found at least [\d,]+ bytes, expected at most 1,000"
    ):
        get("/a.png")
    assert not files(tmp_path / "cache")
    assert len(get("/b.png").read_bytes()) == 1000


def test_what_claims_to_be_packed_and_is_not_is_refused(server, get):
    server.answers["/a.png"] = lambda handler: send(handler, 200, b"none", Content_Encoding="gzip")
    with pytest.raises(DataError, match=r"a.png' damaged"):
        get("/a.png")


def _fetch_often(address: str, folder: Path, barrier, locks: bool) -> None:
    barrier.wait()
    assert fetch(address, ("http://",), folder, "here").read_bytes() == png()
    assert locks or module._client.cache_info().currsize == 2  # the parent's, and that of this process


@pytest.mark.parametrize("locks", [True, False])
def test_processes_share_a_cache(server, get, tmp_path, monkeypatch, locks):
    """With locks each file is fetched once; without, each process still finds a whole one."""

    def slow(handler):
        """With no answer before all have asked, where all do."""
        end = time.monotonic() + (0.1 if locks else 20)
        while server.asked["/a.png"] < 4 and time.monotonic() < end:
            time.sleep(0.01)
        send(handler, 200, png())

    def none(*_):
        raise OSError("no locks here")

    server.answers["/a.png"], server.answers["/b.png"] = slow, png()
    get("/b.png")  # so that the forked ones have a client of their parent's
    if not locks:
        monkeypatch.setattr(module.fcntl, "flock", none)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    arguments = (f"{server.url}/a.png", tmp_path / "cache", barrier, locks)
    several = [context.Process(target=_fetch_often, args=arguments) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join(120)  # where the machine is busy
    assert [one.exitcode for one in several] == [0] * 4
    assert server.asked["/a.png"] == (1 if locks else 4)
    assert len(files(tmp_path / "cache")) == 2


def test_threads_do_not_end(server, get):
    """A process that is forked while one does may wait forever: OpenSSL has a lock then."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == module.__name__}

    server.answers = {"/a.png": png(), "/b.png": png(), "/c.png": 404}
    get("/a.png")
    first = threads()
    get("/b.png")
    with pytest.raises(DataError):
        get("/c.png")
    assert first and threads() == first


def test_a_cache_that_cannot_be_written_to_is_said(server, get, tmp_path):
    server.answers["/a.png"] = png()
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(Unreachable, match=rf"^here: found the cache {tmp_path}/cache unusable \(.*\(url_cache\)$"):
        get("/a.png")


def test_the_cache_is_the_users_unless_told_otherwise(server, monkeypatch, tmp_path):
    server.answers["/a.png"] = png()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    path = fetch(f"{server.url}/a.png", ("http://",), None, "here")
    assert path.is_relative_to(tmp_path / "xdg/qwen3vl_bridge/media")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache/qwen3vl_bridge/media"


def test_other_random_numbers_stay_as_they_are(server, get):
    server.answers["/a.png"], server.first["/a.png"] = png(), [500]
    random.seed(3)
    expected = random.random()
    random.seed(3)
    get("/a.png")
    assert random.random() == expected


def test_the_server_is_told_who_asks(server, get):
    heard = {}

    def listen(handler):
        heard.update({name.lower(): value for name, value in handler.headers.items()})
        send(handler, 200, png())

    server.answers["/a.png"] = listen
    get("/a.png")
    assert heard["user-agent"] == "qwen3vl-bridge" and heard["accept-encoding"] == "identity"

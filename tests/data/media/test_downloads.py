"""One download: put in its place, or refused for a reason that is said."""

import os
import socket
import time

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media import downloads as module
from qwen3vl_bridge.data.media.downloads import Downloader
from qwen3vl_bridge.data.media.url_cache import UrlCache

import pytest

from ..servers import files, png, redirect, send


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
        with pytest.raises(DataError, match=rf"^here: {allowed}{name}.png leads elsewhere: found the URL '"):
            get(f"/a/{name}.png", allowed)
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
        with pytest.raises(Unreachable, match=rf"^here: found '{address}' out of reach after 3 attempts \(ConnectErr"):
            Downloader(UrlCache(tmp_path / "cache"), ("http://",))(address, "here")


def test_what_a_killed_download_left_is_removed_and_what_goes_on_is_not(server, get, tmp_path):
    left, going_on = (tmp_path / "cache/unfinished" / name for name in ("left", "going_on"))
    left.parent.mkdir(parents=True)
    for path in (left, going_on):
        path.write_bytes(png()[:50])
    os.utime(left, (0, 0))
    server.answers["/a.png"] = png()
    assert get("/a.png").read_bytes() == png()
    assert list(left.parent.iterdir()) == [going_on]


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
    ("wait", "longest", "message"), [(0.4, 5, "ReadTimeout"), (0.05, 0.4, r"\(ReadTimeout: [1-9]\d* bytes so far")]
)
def test_a_slow_server_holds_nobody(server, get, tmp_path, monkeypatch, wait, longest, message):
    """Neither without a byte, nor with one now and then."""
    whole = []

    def drip(handler):
        send(handler, 200, b"", Content_Length=1000)
        for _ in range(1000):
            handler.wfile.write(b"x")
            time.sleep(wait)
        whole.append(handler.path)

    server.answers["/a.png"] = drip
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    monkeypatch.setattr(module, "LONGEST", longest)
    with pytest.raises(Unreachable, match=message):
        get("/a.png")
    assert not whole and not files(tmp_path / "cache")


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


def test_the_server_is_told_who_asks(server, get):
    heard = {}

    def listen(handler):
        heard.update({name.lower(): value for name, value in handler.headers.items()})
        send(handler, 200, png())

    server.answers["/a.png"] = listen
    get("/a.png")
    assert heard["user-agent"] == "qwen3vl-bridge" and heard["accept-encoding"] == "identity"

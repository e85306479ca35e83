"""Servers that are down are not waited for once for each of their addresses; those that are up are asked as ever."""

import socket
import threading
import time

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media import downloads as module
from qwen3vl_bridge.data.media import hosts
from qwen3vl_bridge.data.media.downloads import Downloader
from qwen3vl_bridge.data.media.hosts import MOST_DOWN
from qwen3vl_bridge.data.media.url_cache import UrlCache

import pytest

from ..servers import png, redirect, send

ATTEMPTS = 3  # of an address, in these tests


@pytest.fixture
def fetch(server, tmp_path):
    return Downloader(UrlCache(tmp_path / "cache"), ("http://",))


def out_of_reach(fetch: Downloader, address: str) -> str:
    with pytest.raises(Unreachable) as caught:
        fetch(address, "here")
    return str(caught.value)


@pytest.fixture
def closed():
    """An address at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def hanging(monkeypatch):
    """One that takes connections, and says nothing; how many it has taken."""
    monkeypatch.setattr(module, "TIMEOUT", 0.1)
    taken = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def take() -> None:
            while True:
                try:
                    taken.append(listening.accept())
                except OSError:
                    return

        threading.Thread(target=take, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", taken
        listening.shutdown(socket.SHUT_RDWR)
    for connection, _ in taken:
        connection.close()


def test_of_a_server_that_is_down_no_more_than_a_few_addresses_are_asked_for(server, fetch, closed):
    for number in range(MOST_DOWN):
        assert "out of reach after 3 attempts (ConnectError" in out_of_reach(fetch, f"{closed}/{number}.png")
    where = closed.removeprefix("http://")
    assert out_of_reach(fetch, f"{closed}/9.png") == (
        f"here: found '{closed}/9.png' not requested, because 3 URLs of {where} in a row failed, "
        "expected a server that responds"
    )
    server.answers["/a.png"] = png()  # another server, of the same name and at another port
    fetch(f"{server.url}/a.png", "here")


def test_a_server_that_hangs_is_asked_no_more(fetch, server, monkeypatch, tmp_path, hanging):
    url, taken = hanging
    fetch = Downloader(UrlCache(tmp_path / "cache"), ("http://",))  # with the short patience
    for number in range(MOST_DOWN + 5):
        said = out_of_reach(fetch, f"{url}/{number}.png")
        assert ("ReadTimeout" if number < MOST_DOWN else "not requested") in said
    assert len(taken) == MOST_DOWN * ATTEMPTS


def test_a_server_that_sends_its_headers_byte_by_byte_holds_nobody(server, fetch, monkeypatch):
    """Each byte begins the library's patience anew; the answer as a whole has an end. Others go on meanwhile."""
    whole = []

    def drip(handler):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
        for _ in range(5000):
            handler.wfile.write(b"x")
            time.sleep(0.02)
        whole.append(handler.path)

    monkeypatch.setattr(hosts, "ANSWER", 0.3)
    server.answers = {"/a.png": drip, "/b.png": png()}
    assert "out of reach after 3 attempts (no whole answer in 0.3 s)" in out_of_reach(fetch, f"{server.url}/a.png")
    assert not whole and server.asked["/a.png"] == ATTEMPTS
    fetch(f"{server.url}/b.png", "here")


@pytest.mark.parametrize("status", [500, 503, 521])
def test_a_server_that_is_broken_is_asked_no_more(server, fetch, status):
    server.answers = {f"/{number}.png": status for number in range(9)}
    said = [out_of_reach(fetch, f"{server.url}/{number}.png") for number in range(9)]
    assert [f"status {status}" in one for one in said] == [True] * MOST_DOWN + [False] * (9 - MOST_DOWN)
    assert server.asked.total() == MOST_DOWN * ATTEMPTS


@pytest.mark.parametrize("answer", [404, 429, "half", "picture"])
def test_a_server_that_answers_anything_is_up(server, fetch, answer):
    """Also one that has enough of us, or whose body breaks off."""

    def half(handler):
        send(handler, 200, png()[:50], Content_Length=len(png()))
        handler.close_connection = True

    server.answers = {f"/{number}.png": 503 for number in range(12)}
    server.answers |= {"/2.png": {"half": half, "picture": png()}.get(answer, answer)}
    for number in range(MOST_DOWN + 2):  # the third is the other one
        if number == 2:
            try:
                fetch(f"{server.url}/{number}.png", "here")
            except DataError:
                continue
        else:
            assert "status 503" in out_of_reach(fetch, f"{server.url}/{number}.png")
    assert server.asked["/4.png"] == ATTEMPTS
    assert "status 503" in out_of_reach(fetch, f"{server.url}/5.png")
    assert "not requested" in out_of_reach(fetch, f"{server.url}/6.png")


def test_attempts_that_are_under_way_end_as_well(server, fetch, closed, monkeypatch):
    """Those of other threads, when they would ask the next time."""
    monkeypatch.setattr(module, "WAITS", (0.01, 0.02, 30.0))
    monkeypatch.setattr(fetch._hosts, "_missed", {closed.removeprefix("http://"): MOST_DOWN - 1})
    fetch._hosts.missed(closed.removeprefix("http://"))
    assert "not requested" in out_of_reach(fetch, f"{closed}/1.png")


def test_who_redirects_is_not_the_one_that_is_down(server, fetch, closed):
    server.answers = {f"/{number}.png": redirect(f"{closed}/{number}.png") for number in range(9)}
    said = [out_of_reach(fetch, f"{server.url}/{number}.png") for number in range(5)]
    assert [closed.removeprefix("http://") in one for one in said[MOST_DOWN:]] == [True, True]
    server.answers["/a.png"] = png()
    fetch(f"{server.url}/a.png", "here")

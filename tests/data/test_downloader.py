"""Test the download of one URL: allowed URLs, stored files, and servers that fail."""

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from qwen3vl_bridge.data import DataError, videos
from qwen3vl_bridge.data import downloading as module
from qwen3vl_bridge.data.downloading import FIRST_ATTEMPTS, MOST_DOWN, Downloader, check_allowed_url, check_url_prefix
from qwen3vl_bridge.data.errors import DataUnavailable
from qwen3vl_bridge.data.media import MediaAccess, UrlCache, find_media, image_size, load_image

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.servers import files, png, raw, redirect, send
from tests.data.test_videos import clip

HOST = "https://images.example.org"


@pytest.fixture
def get(server, tmp_path):
    cache = UrlCache(tmp_path / "cache")

    def get(path: str, *allowed: str) -> Path:
        Downloader(cache, allowed or (f"{server.url}/",))(server.url + path, "here")
        return cache(server.url + path, "here")

    return get


def allowed(address: str, *prefixes: str) -> bool:
    try:
        check_allowed_url(address, prefixes, "here")
    except DataError as error:
        assert str(error).startswith("here: found ")
        return False
    return True


@pytest.mark.parametrize(("prefix", "address"), [
    (f"{HOST}/", f"{HOST}/a/1.png"), (HOST, f"{HOST}/a/1.png"), (HOST, HOST), (f"{HOST}/", f"{HOST}?id=1#top"),
    (f"{HOST}/a/", f"{HOST}/a/b/1.png?size=2"), (f"{HOST}/a", f"{HOST}/a/1.png"), (f"{HOST}/a", f"{HOST}/a"),
    (f"{HOST}/a/", f"{HOST}/b/../a/1.png"), ("HTTPS://Images.Example.ORG/a/", f"{HOST}/a/1.png"),
    (f"{HOST}/", "HTTPS://IMAGES.EXAMPLE.ORG:443/1.png"), (f"{HOST}:443/", f"{HOST}/1.png"),
    (f"{HOST}:8443/", f"{HOST}:8443/1.png"), (f"{HOST}/ä/", f"{HOST}/%C3%A4/1.png"),
    ("https://bücher.example/", "https://xn--bcher-kva.example/1.png"),
    ("https://", "https://anywhere.example/..1.png"), ("HTTP://", "http://anywhere.example/1.png"),
    ("http://127.0.0.1:80/", "http://127.0.0.1/1.png"), ("https://[::1]/", "https://[::1]/1.png"),
])  # fmt: skip
def test_allowed_urls_accept_url_that_begins_with_allowed_prefix(prefix, address):
    check_url_prefix(prefix)
    assert allowed(address, "https://other.example/", prefix)
    assert not allowed(address, "https://other.example/")


@pytest.mark.parametrize("prefix", [HOST, f"{HOST}/", f"{HOST}/a", f"{HOST}/a/"])
@pytest.mark.parametrize("address", [
    "https://images.example.org.evil.com/a/1.png", "https://images.example.orgevil.com/a/1.png",
    "https://images.example.org@evil.com/a/1.png", "https://images.example.org%2fa%2f@evil.com/a/1.png",
    "https://images.example.org:443@evil.com/a/1.png", "https://user:secret@images.example.org/a/1.png",
    "https://images.example.org\\@evil.com/a/1.png", "https://images.example.org\\.evil.com/a/1.png",
    "https://evil.com/https://images.example.org/a/1.png", "https://evil.com?https://images.example.org/a/1.png",
    "https://evil.com#images.example.org/a/1.png", "https://images.example.org./a/1.png",
    "https://images.example.org:8443/a/1.png", "https://images.example.org:99999/a/1.png",
    "https://images.example.org:x/a/1.png", "https://sub.images.example.org/a/1.png",
    "http://images.example.org/a/1.png", "ftp://images.example.org/a/1.png", "https:images.example.org/a/1.png",
    "https:///images.example.org/a/1.png", "//images.example.org/a/1.png",
    "https://images。example。org.evil.com/a/1.png", "https://images.example.org\n.evil.com/a/1.png",
    "https://images.example.org/a/%2e%2e/b/1.png", "https://images.example.org/a/%2E./b/1.png",
    "https://images.example.org/a/..%2fb/1.png", "https://images.example.org/a/..%5Cb/1.png",
    "https://images.example.org/a/..\\b/1.png", "https://images.example.org/a/..;/b/1.png",
    "https://images.example.org/a/%252e%252e/b/1.png", "https://images.example.org/a/%2525252525252e/b/1.png",
    "https://images.example.org/a/\ud800.png", "https://", "https://xn--/a/1.png", "https://xn--0/a/1.png",
    "https://images.example.org/a/" + "x" * 70_000,
])  # fmt: skip
def test_allowed_urls_reject_urls_disguised_as_allowed_ones(prefix, address):
    assert not allowed(address, prefix)


@pytest.mark.parametrize("address", ["https://xn--/1.png", "https://xn--0/1.png", "https://a\ud800/1.png"])
def test_allowed_urls_reject_invalid_url_even_if_all_hosts_are_allowed(address):
    assert not allowed(address, "https://")


@pytest.mark.parametrize("address", ["/b/1.png", "/ab/1.png", "/A/1.png", "/a/../b/1.png", "/b/a/1.png", "/a%2f1.png"])
def test_allowed_urls_reject_path_outside_allowed_folder(address):
    assert not allowed(f"{HOST}{address}", f"{HOST}/a", f"{HOST}/a/")


names = st.text("ab.-@:/\\?#%2eE5cfF;é。", max_size=12)


@settings(max_examples=500)
@given(between=names, after=names, prefix=st.sampled_from([HOST, f"{HOST}/", f"{HOST}/a", f"{HOST}/a/"]))
def test_random_url_that_is_accepted_leads_to_allowed_host_and_path(between, after, prefix):
    address = f"https://images.example.org{between}/a/{after}"
    if allowed(address, prefix):
        url = check_allowed_url(address, [prefix], "here")
        request = httpx.Request("GET", url)
        assert request.headers["host"] == "images.example.org" and request.url.port in (None, 443)
        path = request.url.raw_path.decode().partition("?")[0].lower()
        assert not prefix.rstrip("/").endswith("/a") or path == "/a" or path.startswith("/a/")
        assert not {".", ".."} & set(path.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").split("/"))


@settings(max_examples=300)
@given(path=st.lists(st.text("ab1é .-_~", min_size=1, max_size=5), min_size=1, max_size=3))
def test_allowed_urls_accept_any_path_below_allowed_folder(path):
    if not {".", ".."} & {segment.strip() for segment in path}:
        assert allowed("/".join([HOST, "a", *path]), f"{HOST}/a/")


@pytest.mark.parametrize("prefix", [
    "", "https:", "https:/", "images.example.org", "//images.example.org", "ftp://images.example.org", "file:///",
    "https:///a", "https://user@example.org", "https://example.org/?id=", "https://*.example.org", "https://a b/",
    "https://example.org#", "https://example.org\\", "https://example.org:x/", "https://xn--/",
    "https://example.org/%2e%2e/",
])  # fmt: skip
def test_allowed_urls_raise_if_prefix_is_invalid(prefix):
    with pytest.raises(ValueError, match="expected a scheme and a host, and optionally a path, such as"):
        check_url_prefix(prefix)


def test_disallowed_url_error_names_url_and_allowed_prefixes():
    with pytest.raises(DataUnavailable, match=rf"^here: found .*evil.com/1.png', .* begins with {HOST} or http://"):
        check_allowed_url("https://evil.com/1.png", [HOST, "http://"], "here")
    with pytest.raises(DataError, match=r"found the URL 's3://bucket/1.png', expected the path of a file"):
        find_media("s3://bucket/1.png", MediaAccess(), "here")


def test_downloader_follows_redirects_only_to_allowed_urls(server, get):
    to = {
        "1": "/a/2.png?x=1", "out": "/b/1.png", "up": "%2e%2e/b/1.png", "far": "http://evil.com/",
        "file": "file:///etc/passwd", "user": server.url.replace("//", "//me@") + "/a/2.png", "loop": "loop.png",
    }  # fmt: skip
    server.answers = {f"/a/{name}.png": redirect(address) for name, address in to.items()}
    server.answers |= {"/a/2.png": png(), "/b/1.png": png(), "/a/none.png": 302}
    allowed = f"{server.url}/a/"
    assert get("/a/1.png", allowed).read_bytes() == png()
    for name in ("out", "up", "far", "file", "user"):
        with pytest.raises(DataError, match=rf"^here: {allowed}{name}.png redirects to another: found the URL '"):
            get(f"/a/{name}.png", allowed)
    assert server.asked["/b/1.png"] == 0
    assert get("/a/out.png", allowed, f"{server.url}/b/").read_bytes() == png()
    with pytest.raises(DataError, match="redirected over 5 times"):
        get("/a/loop.png")
    assert server.asked["/a/loop.png"] == 6
    with pytest.raises(DataError, match="found the status 302"):
        get("/a/none.png")


@pytest.mark.parametrize("status", [204, 400, 401, 403, 404, 410, 451])
def test_downloader_raises_data_error_without_retry_if_failure_is_permanent(server, get, tmp_path, status):
    server.answers["/a.png"] = status
    with pytest.raises(DataError, match=f"^here: {server.url}/a.png: found the status {status}") as caught:
        get("/a.png")
    assert not isinstance(caught.value, DataUnavailable)
    assert server.asked["/a.png"] == 1 and not files(tmp_path / "cache")


@pytest.mark.parametrize("status", [408, 429, 500, 503])
def test_downloader_retries_temporary_http_error_then_raises_data_unavailable(server, get, tmp_path, status):
    server.answers["/a.png"], server.first["/a.png"] = png(), [status, status]
    assert get("/a.png").read_bytes() == png() and server.asked["/a.png"] == 3
    server.answers["/b.png"] = status
    with pytest.raises(
        DataUnavailable, match=rf"^here: '{server.url}/b.png' could not be downloaded in 3 .*status {status}"
    ):
        get("/b.png")
    assert server.asked["/b.png"] == 3 and len(files(tmp_path / "cache")) == 1


def test_downloader_raises_data_unavailable_if_host_is_unknown(server, get, tmp_path):
    with pytest.raises(DataUnavailable, match=r"^here: .* could not be downloaded in 2 attempts \(ConnectErr"):
        Downloader(UrlCache(tmp_path / "cache"), ("http://",))("http://no.such.host.invalid/a.png", "here")


def test_downloader_removes_old_unfinished_files_and_keeps_recent_ones(server, get, tmp_path):
    left, going_on = (tmp_path / "cache/unfinished" / name for name in ("left", "going_on"))
    left.parent.mkdir(parents=True)
    for path in (left, going_on):
        path.write_bytes(png()[:50])
    os.utime(left, (0, 0))
    server.answers["/a.png"] = png()
    assert get("/a.png").read_bytes() == png()
    assert list(left.parent.iterdir()) == [going_on]


def half(handler):
    send(handler, 200, png()[:50], Content_Length=len(png()))
    handler.close_connection = True


@pytest.mark.parametrize(
    ("wait", "longest", "message"), [(0.4, 5, "ReadTimeout"), (0.05, 0.4, r"\(ReadTimeout: [1-9]\d* bytes so far")]
)
def test_downloader_times_out_if_server_is_slow(server, get, tmp_path, monkeypatch, wait, longest, message):
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
    with pytest.raises(DataUnavailable, match=message):
        get("/a.png")
    assert not whole and not files(tmp_path / "cache")


@pytest.mark.parametrize("told", [True, False])
def test_downloader_raises_if_file_exceeds_size_limit(server, get, tmp_path, monkeypatch, told):
    def long(handler):
        if told:  # and not a byte of it sent
            send(handler, 200, Content_Length=5000)
        else:
            send(handler, 200, b"x" * 5000, Content_Length=None)
        handler.close_connection = True

    server.answers = {"/a.png": long, "/b.png": png() + b"x" * (1000 - len(png()))}
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    with pytest.raises(DataError, match=r"a.png: found at least [\d,]+ bytes, expected at most 1,000"):
        get("/a.png")
    assert not files(tmp_path / "cache")
    assert len(get("/b.png").read_bytes()) == 1000


def test_downloader_raises_if_gzip_encoding_is_invalid(server, get):
    server.answers["/a.png"] = lambda handler: send(handler, 200, b"none", Content_Encoding="gzip")
    with pytest.raises(DataError, match=r"a.png' damaged"):
        get("/a.png")


@pytest.mark.parametrize("to", ["http://[::1", "http:a.png", "data:,x", "http://xn--/", "/a\x01.png", "//[x]"])
def test_downloader_raises_if_redirect_url_is_invalid(server, get, to):
    server.answers["/a.png"] = redirect(to)
    with pytest.raises(
        DataError, match=rf"^here: (found )?'{server.url}/a.png' (could not be downloaded in 3|redirected to an inv)"
    ):
        get("/a.png")


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize("answer", [
    b"", b"HTTP/1.1 2", b"SSH-2.0-OpenSSH_9.6\r\n\r\n", OK + b"no header\r\n\r\n", OK + b"X: " + b"x" * 200_000,
    OK + b"Content-Le", OK + b"Content-Length: -5\r\n\r\n", OK + b"Content-Length: 9\r\n\r\nabc",
    OK + b"Transfer-Encoding: none\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
    OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab", OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
    pytest.param(OK + b"Content-Length: 999\r\n\r\n" + png()[:50], id="half a picture"),
])  # fmt: skip
def test_downloader_retries_malformed_response_then_raises_data_unavailable(server, get, tmp_path, answer):
    server.answers["/a.png"] = raw(answer)
    with pytest.raises(DataUnavailable, match=rf"^here: '{server.url}/a.png' could not be downloaded in 3 .*Error: "):
        get("/a.png")
    assert server.asked["/a.png"] == 3 and not files(tmp_path / "cache")
    server.answers["/b.png"], server.first["/b.png"] = png(), [raw(answer)]
    assert get("/b.png").read_bytes() == png() and server.asked["/b.png"] == 2


PAGES = ("text/html; charset=utf-8", "TEXT/HTML", "text/plain", "Application/JSON")


@pytest.mark.parametrize(("kind", "body", "message"), [
    *((kind, png(), rf"found a page \({kind.lower()}\), expected an image") for kind in PAGES),
    ("image/png", b"", "found 0 bytes, expected"), ("video/mp4", b"", "found 0 bytes, expected"),
    ("image/png", b"<html>", r"found contents that begin b'<html>' \(image/png\), expected an image or a video"),
    ("IMAGE/PNG", b"\x1aE\xdf\xa3", r"found contents that begin .*\(image/png\)"),
    ("application/octet-stream", b"not found", r"found contents that begin b'not found' \(application/octet-"),
    (None, b"not found", r"found contents that begin b'not found' \(no type\)"),
])  # fmt: skip
def test_downloader_raises_and_stores_no_file_if_contents_are_no_media(server, get, tmp_path, kind, body, message):
    server.answers["/a.png"] = png()
    server.first["/a.png"] = [lambda handler: send(handler, 200, body, Content_Type=kind)]
    with pytest.raises(DataError, match=f"^here: {server.url}/a.png: {message}") as caught:
        get("/a.png")
    assert not isinstance(caught.value, DataUnavailable) and not list((tmp_path / "cache").rglob("*a.png*"))
    assert get("/a.png").read_bytes() == png()


@pytest.mark.parametrize("kind", [None, "binary/octet-stream", "video/x-any"])
@pytest.mark.parametrize("ending", ["mkv", "mp4", "avi", "ts", "m2ts", "mpg", "flv", "mov", "ogv", "wmv"])
def test_downloader_stores_video_of_any_container_and_content_type(server, get, tmp_path, kind, ending):
    body = {"ogv": b"OggS" + bytes(60), "flv": b"FLV\1" + bytes(60)}.get(ending)
    body = body or clip(tmp_path / f"a.{ending}", 3, rate=25).read_bytes()
    server.answers["/a"] = lambda handler: send(handler, 200, body, Content_Type=kind)
    assert get("/a").read_bytes() == body


def test_image_size_raises_if_downloaded_image_exceeds_pixel_limit(server, get, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    server.answers["/a.png"] = png()
    with pytest.raises(DataError, match=rf"-a.png \(downloaded from {server.url}/a.png\) is too large"):
        image_size(get("/a.png"), "here")


def test_error_names_url_of_downloaded_file_that_does_not_decode(server, get):
    server.answers = {"/a.png": png(), "/b": b"OggS" + bytes(60)}
    server.first["/a.png"] = [raw(OK + b"\r\n" + png()[:-30])]
    path = get("/a.png?x=1")
    with pytest.raises(DataError, match=rf"{path} \(downloaded from {server.url}/a.png\?x=1\) does not decode"):
        load_image(path, "here")
    processor = SimpleNamespace(fps=2)
    with pytest.raises(DataError, match=rf"-b \(downloaded from {server.url}/b\) does not decode as a video"):
        videos.sample_frames(get("/b"), processor, "here")
    path.unlink()
    assert load_image(get("/a.png?x=1"), "here").size == (64, 32)


ATTEMPTS = 3  # of an address, in these tests


@pytest.fixture
def fetch(server, tmp_path):
    return Downloader(UrlCache(tmp_path / "cache"), ("http://",))


def out_of_reach(fetch: Downloader, address: str) -> str:
    with pytest.raises(DataUnavailable) as caught:
        fetch(address, "here")
    return str(caught.value)


@pytest.fixture
def closed():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"


def test_downloader_requests_no_more_urls_of_server_after_failed_connection(server, fetch, closed):
    assert "could not be downloaded in 2 attempts (ConnectError" in out_of_reach(fetch, f"{closed}/0.png")
    where = closed.removeprefix("http://")
    assert out_of_reach(fetch, f"{closed}/9.png") == (
        f"here: '{closed}/9.png' was not requested, because earlier requests to {where} failed; run the download again "
        "when the server responds"
    )
    server.answers["/a.png"] = png()  # another server, of the same name and at another port
    fetch(f"{server.url}/a.png", "here")


@pytest.mark.parametrize("answer", [500, 503, 521, "nothing"])
def test_downloader_requests_no_more_urls_of_server_after_repeated_failures(server, monkeypatch, tmp_path, answer):
    monkeypatch.setattr(module, "TIMEOUT", 0.1 if answer == "nothing" else 15)
    fetch = Downloader(UrlCache(tmp_path / "cache"), ("http://",))
    answers = (lambda handler: time.sleep(1)) if answer == "nothing" else answer
    server.answers = {f"/{number}.png": answers for number in range(9)}
    said = [out_of_reach(fetch, f"{server.url}/{number}.png") for number in range(9)]
    problem = "ReadTimeout" if answer == "nothing" else f"status {answer}"
    assert [problem in one for one in said] == [True] * MOST_DOWN + [False] * (9 - MOST_DOWN)
    assert server.asked.total() == MOST_DOWN * (FIRST_ATTEMPTS if answer == "nothing" else ATTEMPTS)


@pytest.mark.parametrize("answer", [404, 429, "half", "picture"])
def test_downloader_resets_failure_count_when_server_responds(server, fetch, answer):
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


def test_downloader_stops_retries_when_other_threads_find_server_down(server, fetch, closed, monkeypatch):
    fetch._responded.add(closed.removeprefix("http://"))
    fetch._failed[closed.removeprefix("http://")] = MOST_DOWN - 1
    others = threading.Timer(0.2, lambda: fetch._failed.update([closed.removeprefix("http://")]))
    others.start()
    monkeypatch.setattr(module, "WAITS", (0.01, 0.5, 30.0))
    assert "not requested" in out_of_reach(fetch, f"{closed}/1.png")
    others.join()


def test_downloader_does_not_blame_server_for_failed_redirect_target(server, fetch, closed):
    server.answers = {f"/{number}.png": redirect(f"{closed}/{number}.png") for number in range(9)}
    said = [out_of_reach(fetch, f"{server.url}/{number}.png") for number in range(5)]
    assert [closed.removeprefix("http://") in one for one in said[MOST_DOWN:]] == [True, True]
    server.answers["/a.png"] = png()
    fetch(f"{server.url}/a.png", "here")

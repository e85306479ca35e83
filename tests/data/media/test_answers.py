"""Answers of servers that are no good: which are bad samples, which are no answers, and what stays out of the cache."""

from types import SimpleNamespace

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media import videos
from qwen3vl_bridge.data.media.images import image_size, load_image

import pytest
from PIL import Image

from ..servers import files, png, raw, redirect, send
from .test_video import clip


@pytest.mark.parametrize("to", ["http://[::1", "http:a.png", "data:,x", "http://xn--/", "/a\x01.png", "//[x]"])
def test_redirects_to_no_address_are_refused(server, get, to):
    server.answers["/a.png"] = redirect(to)
    with pytest.raises(DataError, match=rf"^here: found '{server.url}/a.png' (out of reach after 3|redirected to no)"):
        get("/a.png")


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 2",
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        OK + b"no header\r\n\r\n",
        OK + b"X: " + b"x" * 200_000,
        OK + b"Content-Le",
        OK + b"Content-Length: -5\r\n\r\n",
        OK + b"Content-Length: 9\r\n\r\nabc",
        OK + b"Transfer-Encoding: none\r\n\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nabc\r\n",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nab",
        OK + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
    ],
)
def test_what_breaks_the_rules_of_http_or_off_is_asked_for_again(server, get, tmp_path, answer):
    server.answers["/a.png"] = raw(answer)
    with pytest.raises(Unreachable, match=rf"^here: found '{server.url}/a.png' out of reach after 3 .*Error: "):
        get("/a.png")
    assert server.asked["/a.png"] == 3 and not files(tmp_path / "cache")
    server.answers["/b.png"], server.first["/b.png"] = png(), [raw(answer)]
    assert get("/b.png").read_bytes() == png()


@pytest.mark.parametrize("kind", ["text/html; charset=utf-8", "TEXT/HTML", "text/plain", "Application/JSON"])
def test_a_page_is_no_picture(server, get, tmp_path, kind):
    server.answers["/a.png"] = lambda handler: send(handler, 200, png(), Content_Type=kind)
    with pytest.raises(DataError, match=rf"a.png: found a page \({kind.lower()}\), expected an image"):
        get("/a.png")
    assert not files(tmp_path / "cache")


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("image/png", b"", "found 0 bytes, expected"),
        ("video/mp4", b"", "found 0 bytes, expected"),
        ("image/png", b"<html>", r"found contents that begin b'<html>' \(image/png\), expected an image or a video"),
        ("IMAGE/PNG", b"\x1aE\xdf\xa3", r"found contents that begin .*\(image/png\)"),
        ("application/octet-stream", b"not found", r"found contents that begin b'not found' \(application/octet-"),
        (None, b"not found", r"found contents that begin b'not found' \(no type\)"),
    ],
)
def test_what_is_neither_picture_nor_video_stays_out_of_the_cache(server, get, tmp_path, kind, body, message):
    server.answers["/a.png"] = png()
    server.first["/a.png"] = [lambda handler: send(handler, 200, body, Content_Type=kind)]
    with pytest.raises(DataError, match=f"^here: {server.url}/a.png: {message}") as caught:
        get("/a.png")
    assert not isinstance(caught.value, Unreachable) and not list((tmp_path / "cache").rglob("*a.png*"))
    assert get("/a.png").read_bytes() == png()


@pytest.mark.parametrize("kind", [None, "binary/octet-stream", "video/x-any"])
@pytest.mark.parametrize("ending", ["mkv", "mp4", "avi", "ts", "m2ts", "mpg", "flv", "mov", "ogv", "wmv"])
def test_videos_are_videos_whatever_a_server_calls_them(server, get, tmp_path, kind, ending):
    body = {"ogv": b"OggS" + bytes(60), "flv": b"FLV\1" + bytes(60)}.get(ending)
    body = body or clip(tmp_path / f"a.{ending}", 3, rate=25).read_bytes()
    server.answers["/a"] = lambda handler: send(handler, 200, body, Content_Type=kind)
    assert get("/a").read_bytes() == body


def test_a_picture_too_large_to_be_opened_is_fetched(server, get, monkeypatch):
    """It is refused for what it is, with others' limits perhaps not."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    server.answers["/a.png"] = png()
    with pytest.raises(DataError, match=rf"-a.png \(downloaded from {server.url}/a.png\) is too large"):
        image_size(get("/a.png"), "here")


def test_what_does_not_decode_says_where_it_is_from(server, get):
    """Such as what broke off, of a server that does not say how long it is; who removes it gets it anew."""
    server.answers = {"/a.png": png(), "/b": b"OggS" + bytes(60)}
    server.first["/a.png"] = [raw(OK + b"\r\n" + png()[:-30])]
    path = get("/a.png?x=1")
    with pytest.raises(DataError, match=rf"{path} \(downloaded from {server.url}/a.png\?x=1\) does not decode"):
        load_image(path, "here")
    processor = SimpleNamespace(fps=2)
    with pytest.raises(DataError, match=rf"-b \(downloaded from {server.url}/b\) does not decode as a video"):
        videos.sample(get("/b"), processor, "here")
    path.unlink()
    assert load_image(get("/a.png?x=1"), "here").size == (64, 32)

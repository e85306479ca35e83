"""Which addresses are allowed: those that begin as a user said, and none that only look so."""

from qwen3vl_bridge.data import DataError
from qwen3vl_bridge.data.downloading import allowed_url, check_prefix
from qwen3vl_bridge.data.errors import Unreachable
from qwen3vl_bridge.data.media.media_access import MediaAccess, find

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

HOST = "https://images.example.org"


def allowed(address: str, *prefixes: str) -> bool:
    try:
        allowed_url(address, prefixes, "here")
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
def test_addresses_that_begin_so_are_allowed(prefix, address):
    check_prefix(prefix)
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
def test_addresses_that_only_look_so_are_refused(prefix, address):
    assert not allowed(address, prefix)


@pytest.mark.parametrize("address", ["https://xn--/1.png", "https://xn--0/1.png", "https://a\ud800/1.png"])
def test_what_is_no_address_is_refused_where_all_are_allowed(address):
    assert not allowed(address, "https://")


@pytest.mark.parametrize("address", ["/b/1.png", "/ab/1.png", "/A/1.png", "/a/../b/1.png", "/b/a/1.png", "/a%2f1.png"])
def test_paths_are_compared_by_whole_segments(address):
    assert not allowed(f"{HOST}{address}", f"{HOST}/a", f"{HOST}/a/")


names = st.text("ab.-@:/\\?#%2eE5cfF;é。", max_size=12)


@settings(max_examples=500, deadline=None)
@given(between=names, after=names, prefix=st.sampled_from([HOST, f"{HOST}/", f"{HOST}/a", f"{HOST}/a/"]))
def test_what_is_allowed_is_asked_of_that_host_and_folder(between, after, prefix):
    address = f"https://images.example.org{between}/a/{after}"
    if allowed(address, prefix):
        url = allowed_url(address, [prefix], "here")
        request = httpx.Request("GET", url)
        assert request.headers["host"] == "images.example.org" and request.url.port in (None, 443)
        path = request.url.raw_path.decode().partition("?")[0].lower()
        assert not prefix.rstrip("/").endswith("/a") or path == "/a" or path.startswith("/a/")
        assert not {".", ".."} & set(path.replace("%2e", ".").replace("%2f", "/").replace("%5c", "/").split("/"))


@settings(max_examples=300, deadline=None)
@given(path=st.lists(st.text("ab1é .-_~", min_size=1, max_size=5), min_size=1, max_size=3))
def test_every_address_in_a_folder_is_allowed(path):
    if not {".", ".."} & {segment.strip() for segment in path}:
        assert allowed("/".join([HOST, "a", *path]), f"{HOST}/a/")


@pytest.mark.parametrize(
    "prefix",
    [
        *(
            "",
            "https:",
            "https:/",
            "images.example.org",
            "//images.example.org",
            "ftp://images.example.org",
            "file:///",
        ),
        *(
            "https:///a",
            "https://user@example.org",
            "https://example.org/?id=",
            "https://*.example.org",
            "https://a b/",
        ),
        *("https://example.org#", "https://example.org\\", "https://example.org:x/", "https://xn--/"),
        "https://example.org/%2e%2e/",
    ],
)
def test_what_is_no_beginning_of_an_address_is_refused(prefix):
    with pytest.raises(ValueError, match="expected a scheme and a host, and a path if need be, such as"):
        check_prefix(prefix)


def test_what_is_allowed_is_said():
    with pytest.raises(Unreachable, match=rf"^here: found .*evil.com/1.png', .* begins with {HOST} or http://"):
        allowed_url("https://evil.com/1.png", [HOST, "http://"], "here")
    with pytest.raises(DataError, match=r"found the URL 's3://bucket/1.png', expected the path of a file"):
        find("s3://bucket/1.png", MediaAccess(), "here")

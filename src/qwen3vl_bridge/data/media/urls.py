"""URLs of images and videos: which of them are allowed.

Both sides are parsed by the library that sends the request, so that the compared URL is the requested one. Scheme, host
and port are compared whole, paths by whole segments: "https://example.org/a" allows "https://example.org/a/1.png", but
neither "https://example.org/ab" nor "https://example.org.evil.com/a".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from urllib.parse import unquote

from qwen3vl_bridge.data.errors import DataError, Unreachable

import httpx

_PORTS = {"http": 80, "https": 443}
_MOST_ENCODINGS = 3  # nested encodings of one path


def check_prefix(prefix: str) -> None:
    """Refuse prefixes that cannot begin a URL, or would allow more than they seem to.

    Raises:
        ValueError: no scheme, a scheme other than http and https, a user, a query, or a pattern.
    """
    if _is_scheme(prefix):
        return
    url = read_url(prefix)
    if url is None or url.scheme not in _PORTS or not url.host or re.search(r"[@?#*\\\s]", prefix) or _climbs(url):
        raise ValueError(
            f"allowed_urls has {prefix!r}, expected a scheme and a host, and a path if need be, such as "
            "'https://images.example.org/' or 'https://images.example.org/public/'; 'https://' allows every URL "
            "of that scheme"
        )


def allowed_url(address: str, prefixes: Sequence[str], place: str) -> httpx.URL:
    """A URL as it will be requested.

    Args:
        address: the URL in a record or a redirect.
        prefixes: allowed prefixes of URLs.
        place: its position in the data, for messages.

    Raises:
        DataError: not a valid URL.
        Unreachable: a URL that is not allowed (by the current prefixes).
    """
    url = read_url(address)
    if url is None or not url.host:
        raise DataError(place, f"found {shown(address)}, expected the URL of an image or a video")
    if url.userinfo or _climbs(url) or not any(_begins(url, one) for one in prefixes):
        raise Unreachable(
            place,
            f"found the URL {shown(address)}, expected one that begins with {' or '.join(prefixes)} (--allowed-urls)",
        )
    return url.copy_with(fragment=None)


def shown(address: str) -> str:
    """A URL for a message."""
    return repr(address if len(address) <= 200 else f"{address[:197]}...")


@lru_cache(maxsize=256)  # a lookup of one address needs it several times
def read_url(address: str) -> httpx.URL | None:
    """A URL as it is requested; None if it is not valid."""
    try:
        url = httpx.URL(address)
        url.host  # noqa: B018  (read for what it raises)
    except (httpx.InvalidURL, ValueError):  # the latter for text that is not Unicode, and names that only look encoded
        return None
    return url


def _is_scheme(prefix: str) -> bool:
    return prefix.lower() in [f"{scheme}://" for scheme in _PORTS]


def _begins(url: httpx.URL, prefix: str) -> bool:
    if _is_scheme(prefix):
        return prefix.lower() == f"{url.scheme}://"
    start = httpx.URL(prefix)
    if _server(url) != _server(start):
        return False
    folder = _path(start).rstrip("/")
    return _path(url).startswith(f"{folder}/") or (_path(url) == folder == _path(start))


def _server(url: httpx.URL) -> tuple[str, bytes, int | None]:
    return url.scheme, url.raw_host, url.port or _PORTS.get(url.scheme)


def _path(url: httpx.URL) -> str:
    """The path as it is sent, with its percent signs."""
    return url.raw_path.decode("ascii").partition("?")[0]


def _climbs(url: httpx.URL) -> bool:
    """Whether a server could take the path for another one: plain '..' is resolved here, encoded ones are not."""
    path = _path(url)
    for _ in range(_MOST_ENCODINGS):
        path = unquote(path)
    segments = (segment.partition(";")[0] for segment in re.split(r"[/\\]", path))
    return unquote(path) != path or any(segment in (".", "..") for segment in segments)

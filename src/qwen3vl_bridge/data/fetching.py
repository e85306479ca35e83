"""Pictures and videos from the network, kept in files.

What lives here: one download, what counts as an answer, and the cache. What may not: which addresses are allowed
(`addresses.py`), opening what was fetched (`media.py`, `video.py`).

An answer that says an address is gone or forbidden (404, 410, 403, any other that is neither 200 nor below) is a
`DataError`, as any bad sample's. No answer at all, and one that says that the server is busy or broken (408, 425, 429,
5xx), is `Unreachable` after several attempts, and never drops a sample: a network that is down for a minute would drop
thousands, and other ones in each process, whose plans have to agree.

A file comes into the cache whole, by renaming, and is never looked at again: who wants it anew removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path

import httpx

from .addresses import allowed_url
from .errors import DataError, Unreachable

MOST_BYTES = 2**30
MOST_REDIRECTS = 5
# Seconds. A file has its limit whole, so that a server that sends a byte now and then holds nobody for ever.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts
TIMEOUT, LONGEST = 30.0, 900.0  # without a byte; for a file with all attempts
_BUSY = (408, 425, 429)


def default_cache() -> Path:
    """Where files are kept unless a user says otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qwen3vl_bridge" / "media"


def fetch(address: str, allowed_urls: Sequence[str], cache_folder: Path | None, place: str) -> Path:
    """The file with what an address holds, downloaded unless it is there.

    Args:
        address: an http or https address.
        allowed_urls: what it may begin with, and what addresses may that it is redirected to.
        cache_folder: where files are kept; the user's cache folder if None.
        place: where the address stands, for messages.

    Raises:
        DataError: an address that is not allowed, is gone, holds too much, or a page in place of a picture.
        Unreachable: no answer from the network, or a cache that cannot be written to.
    """
    url = allowed_url(address, allowed_urls, place)
    folder = cache_folder or default_cache()
    path = _path_of(url, folder)
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if not path.is_file():
                _download(url, path, allowed_urls, place)
    except OSError as error:
        raise Unreachable(
            place, f"found the cache {folder} unusable ({error}), expected a folder to write into (url_cache)"
        ) from error
    return path


def _path_of(url: httpx.URL, folder: Path) -> Path:
    """A name for each address, with the end of its path, so that messages say something, and FFmpeg sees an ending."""
    digest = hashlib.sha256(str(url).encode()).hexdigest()
    ending = re.sub(r"[^\w.-]", "_", url.path.rpartition("/")[2], flags=re.ASCII)[-60:]
    return folder / digest[:2] / f"{digest[2:42]}-{ending}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time, so that those that plan the same samples fetch each file once."""
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        # Some network file systems have no locks. Then a file is fetched several times, which harms nothing.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _download(url: httpx.URL, path: Path, allowed_urls: Sequence[str], place: str) -> None:
    """Puts the file in its place, after as many attempts as it takes."""
    end = time.monotonic() + LONGEST
    for attempt, wait in enumerate((*WAITS, None), start=1):
        try:
            problem = _attempt(url, path, allowed_urls, end, place)
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
        except httpx.DecodingError as error:
            raise DataError(place, f"found {str(url)!r} damaged ({error}), expected a picture or a video") from error
        if problem is None:
            return
        if wait is None or time.monotonic() + wait > end:
            raise Unreachable(
                place, f"found {str(url)!r} out of reach after {attempt} attempts ({problem}), expected an answer"
            )
        # A generator of its own: others' random numbers stay as they are. Processes don't all come back at once.
        time.sleep(wait * (0.5 + random.Random().random()))


@cache
def _client(process: int) -> httpx.Client:
    """Connections of one process: a forked one has its parent's, and must not use them."""
    # Pictures and videos are compressed already, and a small answer may unpack to a large one.
    headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
    return httpx.Client(timeout=TIMEOUT, headers=headers)


def _attempt(url: httpx.URL, path: Path, allowed_urls: Sequence[str], end: float, place: str) -> str | None:
    """None where the file is in its place; else why it may be worth another attempt."""
    client = _client(os.getpid())
    request = client.build_request("GET", url, timeout=TIMEOUT)
    for _ in range(MOST_REDIRECTS + 1):
        # Redirects are followed here, not by the library, so that each address is checked.
        response = client.send(request, stream=True)
        with closing(response):
            if response.next_request is None:
                return _saved(response, path, end, f"{place}: {url}")
        where = f"{place}: {url} leads elsewhere"
        request = client.build_request(
            "GET", allowed_url(str(response.next_request.url), allowed_urls, where), timeout=TIMEOUT
        )
    raise DataError(place, f"found {str(url)!r} redirected over {MOST_REDIRECTS} times, expected a picture or a video")


def _saved(response: httpx.Response, path: Path, end: float, place: str) -> str | None:
    status = response.status_code
    if status in _BUSY or status >= 500:
        return f"status {status}"
    if status != 200:
        raise DataError(place, f"found the status {status} {response.reason_phrase}, expected 200")
    kind = response.headers.get("content-type", "")
    if kind.startswith("text/html"):
        raise DataError(place, f"found a page ({kind}), expected a picture or a video")
    length = response.headers.get("content-length", "")
    if length.isdecimal():
        _check_size(int(length), place)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            for chunk in response.iter_bytes():
                file.write(chunk)
                _check_size(file.tell(), place)
                if time.monotonic() > end:
                    return f"{file.tell():,} bytes in {LONGEST:.0f} seconds"
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return None


def _check_size(found: int, place: str) -> None:
    if found > MOST_BYTES:
        raise DataError(place, f"found at least {found:,} bytes, expected at most {MOST_BYTES:,}")

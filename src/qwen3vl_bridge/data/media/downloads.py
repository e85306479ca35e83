"""Pictures and videos from the network, kept in files.

What lives here: one download, what counts as an answer, and the cache. What may not: which addresses are allowed
(`urls.py`), decoding what was fetched (`images.py`, `videos.py`).

Three kinds of answers:

- It says that an address is gone or forbidden (404, 410, 403, any other that is neither 200 nor below), or holds what
  is neither a picture nor a video: a `DataError`, as any bad sample's.
- It breaks the rules of HTTP in every one of several attempts: a `DataError` too, since that will not change.
- There is none, it breaks off, or it says that the server is busy or broken (408, 425, 429, 5xx): `Unreachable` after
  several attempts. It never drops a sample: a network that is down for a minute would drop thousands, and other ones in
  each process, whose plans have to agree.

A file comes into the cache whole, by renaming, once it begins as a picture or a video does; beside it lies a text file
with its address. It is never fetched again: who wants it anew, because it does not decode after all (as one of an
answer that broke off without having said how long it is), removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.images import address_file, is_picture
from qwen3vl_bridge.data.media.urls import allowed_url

import httpx

MOST_BYTES = 2**30
MOST_REDIRECTS = 5
# Seconds. A file has its limit whole, so that a server that sends a byte now and then holds nobody for ever.
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts
TIMEOUT, LONGEST = 30.0, 900.0  # without a byte; for a file with all attempts, names and connections
_BUSY = (408, 425, 429)
# The libraries for HTTP have one exception for answers that break its rules and for those that break off.
_CUT = re.compile("closed connection|disconnected")
# Beginnings of videos, for servers that do not say what they send: MP4 and its kin, Matroska, AVI, MPEG, transport
# streams, Flash, Ogg, Windows Media.
_VIDEO = re.compile(
    rb"....(ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xb3\xba]"
    rb"|(.{4})?G.{187}(.{4})?G|FLV|OggS|0&\xb2u",
    re.DOTALL,
)


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
        DataError: an address that is not allowed, is gone, gives no HTTP, holds too much, or no picture or
            video.
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
    broken = True  # whether each answer so far broke the rules
    for attempt, pause in enumerate((*WAITS, None), start=1):
        try:
            problem = _attempt(url, path, allowed_urls, end, place)
            broken = False
        except httpx.TransportError as error:
            problem = f"{type(error).__name__}: {error}"
            broken = broken and isinstance(error, httpx.ProtocolError) and not _CUT.search(str(error))
        except httpx.DecodingError as error:
            raise DataError(place, f"found {str(url)!r} damaged ({error}), expected a picture or a video") from error
        if problem is None:
            return
        if pause is None or time.monotonic() + pause > end:
            raise _failure(url, problem, attempt, broken, place)
        # A generator of its own: others' random numbers stay as they are. Processes don't all come back at once.
        time.sleep(pause * (0.5 + random.Random().random()))


def _failure(url: httpx.URL, problem: str, attempts: int, broken: bool, place: str) -> DataError:
    if broken:
        return DataError(
            place, f"found {str(url)!r} broken in {attempts} attempts ({problem}), expected an answer in HTTP"
        )
    return Unreachable(
        place,
        f"found {str(url)!r} out of reach after {attempts} attempts ({problem}), expected an answer; if it stays so, "
        "remove the samples with this address from the data: on_bad='drop' keeps them, since a network or server "
        "that is down says nothing about a sample, and all processes have to leave out the same ones",
    )


@cache
def _client(process: int) -> httpx.Client:
    """Connections of one process: a forked one has its parent's, and must not use them."""
    # Pictures and videos are compressed already, and a small answer may unpack to a large one.
    headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
    return httpx.Client(timeout=TIMEOUT, headers=headers)


def _attempt(url: httpx.URL, path: Path, allowed_urls: Sequence[str], end: float, place: str) -> str | None:
    """None where the file is in its place; else why it may be worth another attempt."""
    where = f"{place}: {url}"
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with partial.open("xb") as file:
            response = _by(end, lambda: _answer(url, file, allowed_urls, place))
            if response is None:
                return f"{file.tell():,} bytes in {LONGEST:.0f} seconds"
        if _is_busy(response):
            return f"status {response.status_code}"
        _check_contents(partial, _kind(response), where)
        address_file(path).write_text(str(url), "utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return None


def _by[Result](end: float, work: Callable[[], Result]) -> Result | None:
    """What work gives, if it does before the end; None else.

    Limits of the library for HTTP begin anew with each byte, and it has none for names. So another thread works; one
    that is late is left to itself, and stops as it is about to write to the file, which is closed by then.
    """
    future: Future[Result] = Future()
    free = _free_threads(os.getpid())
    try:
        given = free.pop()
    except IndexError:
        given = SimpleQueue()
        threading.Thread(target=_work_on, args=(given, free), name=__name__, daemon=True).start()
    given.put((work, future))
    wait([future], max(end - time.monotonic(), 0))
    return future.result() if future.done() else None


type _Given = SimpleQueue[tuple[Callable[[], Any], Future[Any]]]  # what a thread is to work on


@cache
def _free_threads(process: int) -> list[_Given]:
    """Where threads of one process that have no work are given some.

    They never end: OpenSSL holds a lock while a thread does, and a process forked at that moment, as workers of a data
    loader are after planning, would wait for it as soon as it fetches something.
    """
    return []


def _work_on(given: _Given, free: list[_Given]) -> None:
    while True:
        work, future = given.get()
        try:
            answer = partial(future.set_result, work())
        except BaseException as error:
            answer = partial(future.set_exception, error)
        free.append(given)  # before its answer is heard by who may come with more work
        answer()


def _answer(url: httpx.URL, file: BinaryIO, allowed_urls: Sequence[str], place: str) -> httpx.Response:
    """Follows redirects, and writes the body; that of a server that is busy is left."""
    client = _client(os.getpid())
    request = client.build_request("GET", url, timeout=TIMEOUT)
    for _ in range(MOST_REDIRECTS + 1):
        # Redirects are followed here, not by the library, so that each address is checked.
        try:
            response = client.send(request, stream=True)
        except (httpx.InvalidURL, ValueError) as error:  # some of the redirects that are no addresses
            raise DataError(
                place, f"found {str(request.url)!r} redirected to no address ({error}), expected a picture or a video"
            ) from error
        with closing(response):
            if response.next_request is None:
                if not _is_busy(response):
                    _save(response, file, f"{place}: {url}")
                return response
        where = f"{place}: {url} leads elsewhere"
        request = client.build_request(
            "GET", allowed_url(str(response.next_request.url), allowed_urls, where), timeout=TIMEOUT
        )
    raise DataError(place, f"found {str(url)!r} redirected over {MOST_REDIRECTS} times, expected a picture or a video")


def _is_busy(response: httpx.Response) -> bool:
    return response.status_code in _BUSY or response.status_code >= 500


def _kind(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").strip().lower()


def _save(response: httpx.Response, file: BinaryIO, where: str) -> None:
    if response.status_code != 200:
        raise DataError(where, f"found the status {response.status_code} {response.reason_phrase}, expected 200")
    if _kind(response).startswith(("text/", "application/json")):
        raise DataError(where, f"found a page ({_kind(response)}), expected a picture or a video")
    length = response.headers.get("content-length", "")
    if length.isdecimal():
        _check_size(int(length), where)
    for chunk in response.iter_bytes():
        file.write(chunk)
        _check_size(file.tell(), where)


def _check_size(found: int, where: str) -> None:
    if found > MOST_BYTES:
        raise DataError(where, f"found at least {found:,} bytes, expected at most {MOST_BYTES:,}")


def _check_contents(file: Path, kind: str, where: str) -> None:
    """Refuses what does not begin as a picture or a video. A server's word is taken for videos, which are of any kind.

    Raises:
        DataError: it does not.
    """
    with file.open("rb") as opened:
        start = opened.read(512)
    if not start:
        raise DataError(where, "found 0 bytes, expected a picture or a video")
    if is_picture(file) or kind.startswith("video/"):
        return
    if kind.startswith("image/") or not _VIDEO.match(start):
        raise DataError(
            where, f"found contents that begin {start[:16]!r} ({kind or 'no type'}), expected a picture or a video"
        )

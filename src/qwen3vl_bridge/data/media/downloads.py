"""One download of a picture or a video.

What lives here: what counts as an answer, and putting the file in its place. What may not: which addresses are allowed
(`urls.py`), which servers are still asked (`hosts.py`), where files are kept (`url_cache.py`), which files are wanted
(`data/downloading.py`).

An answer that an address is gone or forbidden (404, 410, 403, any other that is neither 200 nor a busy server's), or
contents that are neither a picture nor a video, are final: a `DataError`. No answer, one that breaks off, or one of a
server that is busy or broken (408, 425, 429, 5xx) is `Unreachable` after several attempts: another time it may be
there.
"""

from __future__ import annotations

import contextlib
import random
import re
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.data.media.hosts import Down, Hosts
from qwen3vl_bridge.data.media.images import address_file, is_picture
from qwen3vl_bridge.data.media.url_cache import UrlCache
from qwen3vl_bridge.data.media.urls import allowed_url, check_prefix

import httpx

MOST_BYTES = 2**30
MOST_REDIRECTS = 5
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds between attempts
TIMEOUT, LONGEST = 15.0, 900.0  # seconds without a byte; for a body
_OLD = 3600  # seconds since somebody wrote to a file that is going on
_BUSY = (408, 425, 429)
# Beginnings of videos, for servers that do not say what they send: MP4 and its kin, Matroska, AVI, MPEG, transport
# streams, Flash, Ogg, Windows Media.
_VIDEO = re.compile(
    rb"....(ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xb3\xba]"
    rb"|(.{4})?G.{187}(.{4})?G|FLV|OggS|0&\xb2u",
    re.DOTALL,
)


class Downloader:
    """Downloads files into a cache; any number of threads may use one."""

    def __init__(self, cache: UrlCache, allowed_urls: Sequence[str]) -> None:
        """Say from where and to where.

        Args:
            cache: where files are kept.
            allowed_urls: what addresses may begin with, and what those may that they are redirected to.

        Raises:
            ValueError: something that is no beginning of an address.
        """
        for prefix in allowed_urls:
            check_prefix(prefix)
        self._cache, self._allowed = cache, tuple(allowed_urls)
        self._unfinished = cache.root / "unfinished"
        _remove_left_over(self._unfinished)
        self._stopped = threading.Event()
        # Pictures and videos are compressed already, and a small answer may unpack to a large one.
        headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
        certificates = httpx.create_ssl_context()  # takes a while to read
        self._hosts = Hosts(partial(httpx.Client, timeout=TIMEOUT, headers=headers, verify=certificates))

    @property
    def stopped(self) -> bool:
        """Whether downloads may have failed because `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Let downloads that are going on fail as unreachable, and make no further attempts."""
        self._stopped.set()

    def __call__(self, address: str, place: str) -> None:
        """Put what an address holds in its place.

        Args:
            address: an http or https address.
            place: where it stands, for messages.

        Raises:
            DataError: an address that is not allowed, is gone, holds too much, or no picture or video.
            Unreachable: no answer, or none to the end; or a server that is down for others, too.
            OSError: the cache cannot be written to.
        """
        url = allowed_url(address, self._allowed, place)
        path = self._cache.path_of(address)
        for folder in (path.parent, self._unfinished):
            folder.mkdir(parents=True, exist_ok=True)
        for attempt, pause in enumerate((*WAITS, None), start=1):
            down = None
            try:
                problem = self._attempt(url, path, place)
            except Down as error:
                problem, down = str(error), error.server
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            except httpx.DecodingError as error:
                raise DataError(
                    place, f"found {str(url)!r} damaged ({error}), expected a picture or a video"
                ) from error
            if problem is None:
                return
            # Threads don't all come back at once.
            if pause is None or self._stopped.wait(pause * (0.5 + random.random())):
                if down is not None and not self.stopped:
                    self._hosts.missed(down)
                raise Unreachable(
                    place, f"found {str(url)!r} out of reach after {attempt} attempts ({problem}), expected an answer"
                )

    def _attempt(self, url: httpx.URL, path: Path, place: str) -> str | None:
        """None where the file is in its place; else why it may be worth another attempt."""
        where = f"{place}: {url}"
        unfinished = self._unfinished / uuid.uuid4().hex
        try:
            with unfinished.open("xb") as file:
                kind = self._answer(url, file, place)
            if isinstance(kind, int):
                return f"status {kind}"
            _check_contents(unfinished, kind, where)
            address_file(path).write_text(str(url), "utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return None

    def _answer(self, url: httpx.URL, file: BinaryIO, place: str) -> str | int:
        """Follows redirects and writes the body; its type, or the status of a server that is busy."""
        asked = url
        for _ in range(MOST_REDIRECTS + 1):
            # Redirects are followed here, not by the library, so that each address is checked.
            try:
                response = self._hosts.send(asked, place)
            except DataError:
                raise
            except (httpx.InvalidURL, ValueError) as error:  # some of the redirects that are no addresses
                problem = f"found {str(asked)!r} redirected to no address ({error})"
                raise DataError(place, f"{problem}, expected a picture or a video") from error
            with closing(response):
                if response.next_request is None:
                    if response.status_code in _BUSY:
                        return response.status_code
                    self._save(response, file, f"{place}: {url}")
                    return _kind(response)
            asked = allowed_url(str(response.next_request.url), self._allowed, f"{place}: {url} leads elsewhere")
        raise DataError(
            place, f"found {str(url)!r} redirected over {MOST_REDIRECTS} times, expected a picture or a video"
        )

    def _save(self, response: httpx.Response, file: BinaryIO, where: str) -> None:
        if response.status_code != 200:
            raise DataError(where, f"found the status {response.status_code} {response.reason_phrase}, expected 200")
        if _kind(response).startswith(("text/", "application/json")):
            raise DataError(where, f"found a page ({_kind(response)}), expected a picture or a video")
        length = response.headers.get("content-length", "")
        if length.isdecimal():
            _check_size(int(length), where)
        # The library's limit begins anew with each byte: a server that sends one now and then would hold a thread.
        end = time.monotonic() + LONGEST
        for chunk in response.iter_bytes():
            file.write(chunk)
            _check_size(file.tell(), where)
            if time.monotonic() > end or self._stopped.is_set():
                raise httpx.ReadTimeout(f"{file.tell():,} bytes so far")


def _remove_left_over(folder: Path) -> None:
    """Remove what downloads have left that were killed. Those that go on write to their files all the time."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # it has come to its end, or is another user's
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def _kind(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").strip().lower()


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

"""Downloading one image or video.

A response that a URL is gone or forbidden (404, 410, 403, any other status except 200 and those of a busy server), or
whose contents are neither an image nor a video, is permanent: a `DataError`. No response, an interrupted one, or that
of a busy or failing server (408, 425, 429, 5xx) is `Unreachable` after several attempts: a later download may succeed.
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
TIMEOUT, LONGEST = 15.0, 900.0  # seconds without a byte; seconds for a body
_OLD = 3600  # seconds since the last write, after which an unfinished file is abandoned
_BUSY = (408, 425, 429)
# First bytes of videos, for servers that do not send a type: MP4 and related formats, Matroska, AVI, MPEG, transport
# streams, Flash, Ogg, Windows Media.
_VIDEO = re.compile(
    rb"....(ftyp|moov|mdat|free|skip|wide)|\x1aE\xdf\xa3|RIFF....AVI |\x00\x00\x01[\xb3\xba]"
    rb"|(.{4})?G.{187}(.{4})?G|FLV|OggS|0&\xb2u",
    re.DOTALL,
)


class Downloader:
    """Downloads files into a cache; any number of threads may use one."""

    def __init__(self, cache: UrlCache, allowed_urls: Sequence[str]) -> None:
        """Set the target folder and the allowed URLs.

        Args:
            cache: folder of the files.
            allowed_urls: allowed prefixes of URLs, including those of redirects.

        Raises:
            ValueError: a prefix that cannot begin a URL.
        """
        for prefix in allowed_urls:
            check_prefix(prefix)
        self._cache, self._allowed = cache, tuple(allowed_urls)
        self._unfinished = cache.root / "unfinished"
        _remove_left_over(self._unfinished)
        self._stopped = threading.Event()
        # Images and videos are already compressed, and a small compressed response may expand to a large one.
        headers = {"User-Agent": "qwen3vl-bridge", "Accept-Encoding": "identity"}
        certificates = httpx.create_ssl_context()  # created once, because reading the certificates is slow
        self._hosts = Hosts(partial(httpx.Client, timeout=TIMEOUT, headers=headers, verify=certificates))

    @property
    def stopped(self) -> bool:
        """Whether downloads may have failed because `stop` was called."""
        return self._stopped.is_set()

    def stop(self) -> None:
        """Make running downloads fail as unreachable, without further attempts."""
        self._stopped.set()

    def __call__(self, address: str, place: str) -> None:
        """Download a URL into the cache.

        Args:
            address: an http or https URL.
            place: the sample that contains it, for messages.

        Raises:
            DataError: the URL is not allowed or is gone, or its contents are too large, or neither image nor video.
            Unreachable: no complete response; or the server is down for other URLs, too.
            OSError: the cache cannot be written.
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
                raise DataError(place, f"found {str(url)!r} damaged ({error}), expected an image or a video") from error
            if problem is None:
                return
            # Random, so that the threads do not retry at the same time.
            if pause is None or self._stopped.wait(pause * (0.5 + random.random())):
                if down is not None and not self.stopped:
                    self._hosts.missed(down)
                raise Unreachable(
                    place, f"found {str(url)!r} out of reach after {attempt} attempts ({problem}), expected an answer"
                )

    def _attempt(self, url: httpx.URL, path: Path, place: str) -> str | None:
        """Returns None if the file is stored, or the reason why another attempt may succeed."""
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
        """Follow redirects and write the body; returns its content type, or the status of a busy server."""
        asked = url
        for _ in range(MOST_REDIRECTS + 1):
            # Redirects are followed here, not by the library, so that each address is checked.
            try:
                response = self._hosts.send(asked, place)
            except DataError:
                raise
            except (httpx.InvalidURL, ValueError) as error:  # some of the redirects to something other than a URL
                problem = f"found {str(asked)!r} redirected to no address ({error})"
                raise DataError(place, f"{problem}, expected an image or a video") from error
            with closing(response):
                if response.next_request is None:
                    if response.status_code in _BUSY:
                        return response.status_code
                    self._save(response, file, f"{place}: {url}")
                    return _kind(response)
            asked = allowed_url(str(response.next_request.url), self._allowed, f"{place}: {url} leads elsewhere")
        raise DataError(
            place, f"found {str(url)!r} redirected over {MOST_REDIRECTS} times, expected an image or a video"
        )

    def _save(self, response: httpx.Response, file: BinaryIO, where: str) -> None:
        if response.status_code != 200:
            raise DataError(where, f"found the status {response.status_code} {response.reason_phrase}, expected 200")
        if _kind(response).startswith(("text/", "application/json")):
            raise DataError(where, f"found a page ({_kind(response)}), expected an image or a video")
        length = response.headers.get("content-length", "")
        if length.isdecimal():
            _check_size(int(length), where)
        # The library's limit restarts with each byte: a server that sends single bytes slowly would block a thread.
        end = time.monotonic() + LONGEST
        for chunk in response.iter_bytes():
            file.write(chunk)
            _check_size(file.tell(), where)
            if time.monotonic() > end or self._stopped.is_set():
                raise httpx.ReadTimeout(f"{file.tell():,} bytes so far")


def _remove_left_over(folder: Path) -> None:
    """Remove unfinished files of killed downloads. Running downloads write to their files continuously."""
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):  # the download has completed, or is another user's
            if time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def _kind(response: httpx.Response) -> str:
    return response.headers.get("content-type", "").strip().lower()


def _check_size(found: int, where: str) -> None:
    if found > MOST_BYTES:
        raise DataError(where, f"found at least {found:,} bytes, expected at most {MOST_BYTES:,}")


def _check_contents(file: Path, kind: str, where: str) -> None:
    """Check that the contents begin like an image or a video. A server's content type of a video is accepted unchecked,
    because there are many video formats.
    """
    with file.open("rb") as opened:
        start = opened.read(512)
    if not start:
        raise DataError(where, "found 0 bytes, expected an image or a video")
    if is_picture(file) or kind.startswith("video/"):
        return
    if kind.startswith("image/") or not _VIDEO.match(start):
        raise DataError(
            where, f"found contents that begin {start[:16]!r} ({kind or 'no type'}), expected an image or a video"
        )

"""Where a conversation's images and videos are: in media roots, or in the folder of downloaded URLs.

For each URL that folder contains the file, or a text with the reason why the URL was given up, or nothing; and for each
data set a record of the URLs that were given up when it was downloaded. A sample whose URL was given up is bad. These
samples have to be the same in every process, on every machine and in a resumed run, regardless of other downloads into
the same folder, so the record is decisive: training stops where the folder differs from it, or has nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from qwen3vl_bridge.data.errors import DataError, Unreachable
from qwen3vl_bridge.io.atomic import replace_file
from qwen3vl_bridge.io.files import user_cache
from qwen3vl_bridge.io.parsing import read_json

import httpx

Media = Path | bytes


@dataclass(frozen=True)
class FrameList:
    """A video given as a list of sampled frames, all of one size, with their number per second."""

    frames: tuple[Media, ...]
    fps: float


Video = Media | FrameList


@dataclass(frozen=True)
class MediaAccess:
    """Folders and downloads that records may refer to."""

    # Folders that paths are relative to and must not leave: a path is looked up in each, in order, and symbolic links
    # may point from one into another. Empty if paths are not allowed.
    roots: tuple[Path, ...] = ()
    addresses: UrlCache = field(default_factory=lambda: UrlCache())  # downloaded URLs
    parts: Mapping[str, Any] | None = None  # files of a WebDataset's sample, by name; then it can refer only to these

    @classmethod
    def of(cls, root: str | Path | Sequence[str | Path] | None, addresses: UrlCache | None = None) -> MediaAccess:
        """Create from settings; a single root need not be in a list."""
        return cls(_roots(root), addresses or UrlCache())

    def of_data(self, data: str) -> MediaAccess:
        """The same access, limited to what the download record of the named data says."""
        return replace(self, addresses=self.addresses.of_data(data))

    def mark(self, fingerprint: str, place: str) -> str:
        """The fingerprint of data of a known record, with the URLs that could not be downloaded (`DownloadRecord`)."""
        record = self.addresses.record
        return record.mark(fingerprint, place) if record else fingerprint


# A folder, several, or None for none or the source's own.
MediaRoot = str | Path | Sequence[str | Path] | MediaAccess | None


def _roots(given: Any) -> tuple[Path, ...]:
    each = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if wrong := [root for root in each if not isinstance(root, str | Path)]:
        raise ValueError(f"media_root has {wrong[0]!r}, expected a folder, or a list of folders")
    return tuple(map(Path, each))


def media_access(given: MediaRoot, default: Path | None) -> MediaAccess:
    """The access for the argument of a source; `default` is its root if none is given. Its folders must exist."""
    access = given if isinstance(given, MediaAccess) else MediaAccess.of(given)
    roots = access.roots or _roots(default)
    for root in roots:
        if not root.is_dir():
            raise DataError(str(root), "there is no such folder, expected the media root")
    return replace(access, roots=roots)


def find(name: str, root: Path | MediaAccess, place: str) -> Media:
    """The file or bytes that a conversation at a place calls `name`: a path relative to a root, or absolute and inside
    one, which leaves it neither by `..` nor by a symbolic link; a URL; or "data:...;base64,...".

    Raises:
        DataError: a URL that was given up, a path that leaves the roots or does not exist, or damaged contents.
        Unreachable: a URL that was not downloaded. Nothing is downloaded here.
    """
    access = root if isinstance(root, MediaAccess) else MediaAccess((root,))
    if name.startswith("data:"):
        head, comma, contents = name.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(place, f"found {name[:40]!r}, expected 'data:...;base64,' and contents")
        try:
            return base64.b64decode(contents, validate=True)
        except ValueError as error:
            raise DataError(place, f"found contents that are not valid base64 ({error})") from error
    if access.parts is not None:
        if name not in access.parts:
            there = ", ".join(sorted(access.parts)) or "none"
            raise DataError(place, f"found {name!r}, expected a part of the same sample; there is {there}")
        return access.parts[name]
    if name.lower().startswith(("http://", "https://")):
        return access.addresses(name, place)
    if "://" in name:
        raise DataError(place, f"found the URL {name[:80]!r}, expected the path of a file")
    if not access.roots:
        raise DataError(place, f"found the path {name[:80]!r}, and no media_root that it is relative to")
    return _file(name, access.roots, place)


def _file(name: str, roots: tuple[Path, ...], place: str) -> Path:
    try:
        inside = [root.resolve() for root in roots]
        paths = [(root / name).resolve() for root in inside]
        path = next((path for path in paths if path.is_file()), None)
        outside = [one for one in ([path] if path else paths) if not any(map(one.is_relative_to, inside))]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a loop of symbolic links
        raise DataError(place, f"found {name[:80]!r}, expected the path of a file ({error})") from error
    if outside:
        given = [*map(str, roots), str(outside[0].parent)]
        raise DataError(
            f"{place}: {name!r} is {outside[0]}",  # what follows is the same for all files of a linked folder
            f"expected a path inside the media root {' or '.join(given[:-1])}; if that place is meant, name its folder "
            f"too: dataset.media_root=[{','.join(given)}] for training, --media-root for each for `qwen3vl data`",
        )
    if path is None:
        raise DataError(place, f"{name!r} is {' or '.join(map(str, paths))}, and there is no such file")
    return path


def describe(media: Media) -> str:
    """Description for messages: the path, with the URL of a downloaded file, or the number of bytes."""
    if not isinstance(media, Path):
        return f"an image or video of {len(media):,} bytes"
    try:
        return f"{media} (downloaded from {address_file(media).read_text('utf-8')})"
    except (OSError, ValueError):
        return str(media)


def address_file(downloaded: Path) -> Path:
    """The file that stores the URL of a downloaded file."""
    return downloaded.with_name(f"{downloaded.name}.address")


@dataclass(frozen=True)
class DownloadRecord:
    """Which URLs of a data set were given up, by their digests (see `digest_of`); empty if there is no record.

    `missing` URLs of all are neither downloaded nor given up; if any, the download is to be continued.
    """

    total: int = 0
    missing: int = 0
    given_up: frozenset[bytes] = frozenset()

    @classmethod
    def read(cls, root: Path, data: str) -> Self:
        """Read the record of the named data from a folder of downloads; a `DataError` if it is damaged."""
        path = cls._path(root, data)
        try:
            found = read_json(path)
            return cls(int(found["total"]), int(found["missing"]), frozenset(map(bytes.fromhex, found["given_up"])))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                str(path), f"cannot read what was downloaded ({error}); qwen3vl data download of these data mends it"
            ) from error

    def write(self, root: Path, data: str) -> None:
        """Write the record of the named data, replacing an earlier one; the name does not depend on their path."""
        path = self._path(root, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        given_up = sorted(digest.hex() for digest in self.given_up)
        replace_file(path, json.dumps({"total": self.total, "missing": self.missing, "given_up": given_up}).encode())

    @staticmethod
    def _path(root: Path, data: str) -> Path:
        return root / "records" / f"{hashlib.sha256(data.encode()).hexdigest()[:40]}.json"

    def mark(self, fingerprint: str, place: str) -> str:
        """Add the URLs that were given up to the fingerprint of data, which messages call `place`; `Unreachable` if the
        download is not complete, so that the data are not determined yet.
        """
        if self.missing:
            raise Unreachable(
                place,
                f"found {self.missing:,} of {self.total:,} URLs not downloaded; run `qwen3vl data download` again, or "
                "with --give-up to exclude them",
            )
        if not self.given_up:
            return fingerprint
        digest = hashlib.sha256(b"".join(sorted(self.given_up))).hexdigest()[:16]
        return f"{fingerprint}, without {len(self.given_up):,} of {self.total:,} addresses ({digest})"


@dataclass(frozen=True)
class UrlCache:
    """A folder of downloaded files; None for the user's cache folder. Picklable, for data-loading workers.

    With a `record`, only the files that it says are there are read.
    """

    folder: Path | None = None
    record: DownloadRecord | None = None

    @property
    def root(self) -> Path:
        """The folder."""
        return self.folder or user_cache() / "media"

    def of_data(self, data: str) -> UrlCache:
        """The same folder, with the record of the named data."""
        return replace(self, record=DownloadRecord.read(self.root, data))

    def __call__(self, address: str, place: str) -> Path:
        """The file that was downloaded from an http or https URL, which stands at `place`; a `DataError` if it was
        given up, `Unreachable` if it was not downloaded, or its state differs from the record.
        """
        path, found = self.path_of(address), f"found the URL {shown_url(address)}"
        given_up = self.record is not None and digest_of(address) in self.record.given_up
        if path.is_file():
            if not given_up:
                return path
            state = "which is there by now, and had been given up when these data were downloaded"
        else:
            problem = self.problem_of(address)
            if given_up or (problem is not None and self.record is None):
                raise DataError(place, f"{found}, which could not be downloaded: {problem or 'it was given up'}")
            state = f"and no download of it in {self.root} (url_cache)"
            if problem is not None:
                state = f"which could not be downloaded ({problem}), and no record of that in a download of these data"
        raise Unreachable(
            place,
            f"{found}, {state}; expected what a download of these data recorded: run qwen3vl data download for them, "
            "with --columns and --schema-adapter as in the run",
        )

    def path_of(self, address: str) -> Path:
        """Path of a URL's file, existing or not: a digest and the URL's end, so that FFmpeg gets an extension."""
        digest, url = digest_of(address).hex(), read_url(address)
        name = "" if url is None else url.path.rpartition("/")[2]
        ending = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-60:]
        return self.root / digest[:2] / f"{digest[2:]}-{ending}"

    def problem_file(self, address: str) -> Path:
        """The file that stores why a URL was given up."""
        path = self.path_of(address)
        return path.with_name(f"{path.name}.problem")

    def problem_of(self, address: str) -> str | None:
        """Why a URL was given up; None if it was not."""
        file = self.problem_file(address)
        return file.read_text("utf-8") if file.exists() else None


@lru_cache(maxsize=256)  # a lookup of one address needs it several times
def read_url(address: str) -> httpx.URL | None:
    """A URL as the library that sends the request parses it; None if it is not valid."""
    try:
        url = httpx.URL(address)
        url.host  # noqa: B018  (read for what it raises)
    except (httpx.InvalidURL, ValueError):  # the latter for text that is not Unicode, and names that only look encoded
        return None
    return url


def digest_of(address: str) -> bytes:
    """20 bytes of SHA-256 that identify a URL, without its fragment, which is not sent to the server."""
    url = read_url(address)
    text = address if url is None else str(url.copy_with(fragment=None))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:20]


def shown_url(address: str) -> str:
    """A URL for a message."""
    return repr(address if len(address) <= 200 else f"{address[:197]}...")

"""Find, check and load the images of a conversation, in media roots or in the folder of downloaded URLs.

For each URL, the download folder contains the file, or a text file with the reason why the download failed
permanently, or nothing. For each data set it contains a download record, which lists the URLs that failed when the data
set was downloaded. A sample with such a URL is bad. If a new download would retry many of these URLs
(`MOST_RETRYABLE`), training stops instead.

The samples must be the same in every process, on every machine and in a resumed run, regardless of other downloads into
the same folder. So the download record decides: training stops if the folder contains the file of a URL that failed
according to the record, or lacks the file of another URL.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import struct
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from qwen3vl_bridge.core.atomic import replace_file
from qwen3vl_bridge.core.files import read_json, user_cache
from qwen3vl_bridge.data.errors import DataError, DataUnavailable

import httpx
from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngImageFile

Media = Path | bytes
MOST_RETRYABLE = 0.05  # fraction of the URLs of a data set; if more fail, assume an outage, not the loss of old images


@dataclass(frozen=True)
class FrameList:
    """A video given as a list of sampled frames of one size, with the number of frames per second."""

    frames: tuple[Media, ...]
    fps: float


Video = Media | FrameList


@dataclass(frozen=True)
class MediaAccess:
    """The folders and files in which images and videos of records are looked up."""

    # Folders that paths are relative to and must not leave: a path is looked up in each, in order, and symbolic links
    # may point from one into another. Empty if paths are not allowed.
    roots: tuple[Path, ...] = ()
    url_cache: UrlCache = field(default_factory=lambda: UrlCache())  # downloaded URLs
    # files of a WebDataset sample, by name; if set, the record can refer only to these files
    files: Mapping[str, Any] | None = None

    @classmethod
    def from_settings(
        cls, root: str | Path | Sequence[str | Path] | None, url_cache: UrlCache | None = None
    ) -> MediaAccess:
        """Create a `MediaAccess` from the settings `media_root` (None, a folder or several folders) and `url_cache`."""
        return cls(_as_roots(root), url_cache or UrlCache())

    def for_data(self, data: str) -> MediaAccess:
        """Return a copy that uses the download record of one data set. `data` is the data set's `download_key`."""
        return replace(self, url_cache=self.url_cache.for_data(data))

    def add_missing_urls(self, fingerprint: str) -> str:
        """Return the fingerprint of a data set. If URLs could not be downloaded, append a hash of these URLs."""
        record = self.url_cache.record
        return record.add_missing_urls(fingerprint) if record else fingerprint


# A folder, several folders, or None for the default of the source.
MediaRoot = str | Path | Sequence[str | Path] | MediaAccess | None


def _as_roots(given: Any) -> tuple[Path, ...]:
    each = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if wrong := [root for root in each if not isinstance(root, str | Path)]:
        raise ValueError(f"media_root has {wrong[0]!r}, expected a folder, or a list of folders")
    return tuple(map(Path, each))


def make_media_access(given: MediaRoot, default: Path | None) -> MediaAccess:
    """Return a `MediaAccess` for the setting `media_root`; raise DataError if a folder does not exist.

    `given` is the value of the setting. If it has no folders, `default` is the only root.
    """
    access = given if isinstance(given, MediaAccess) else MediaAccess.from_settings(given)
    roots = access.roots or _as_roots(default)
    for root in roots:
        if not root.is_dir():
            raise DataError(str(root), "there is no such folder, expected the folder of images and videos (media_root)")
    return replace(access, roots=roots)


def find_media(name: str, root: Path | MediaAccess, place: str) -> Media:
    """Return the file or bytes that a conversation refers to by `name`.

    `name` is a path relative to a root, or an absolute path inside a root; a URL; or "data:...;base64,...". A path must
    not leave the roots, neither by `..` nor by a symbolic link. Nothing is downloaded here.

    Raises:
        DataError: the URL could not be downloaded, the path leaves the roots or does not exist, or the contents are
            damaged.
        DataUnavailable: the download of the URL was not tried.
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
    if access.files is not None:
        if name not in access.files:
            there = f"its files are {', '.join(sorted(access.files))}" if access.files else "the sample has none"
            raise DataError(place, f"found {name!r}, expected a file of the same sample; {there}")
        return access.files[name]
    if name.lower().startswith(("http://", "https://")):
        return access.url_cache(name, place)
    if "://" in name:
        raise DataError(
            place, f"found the URL {name[:80]!r}, expected the path of a file, or a URL with http:// or https://"
        )
    if not access.roots:
        raise DataError(place, f"found the path {name[:80]!r}, but media_root is not set: set it to the path's folder")
    return _find_file(name, access.roots, place)


def _find_file(name: str, roots: tuple[Path, ...], place: str) -> Path:
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
            f"expected a path inside the media root {' or '.join(given[:-1])}; to allow that folder, add it to "
            f"the roots: dataset.media_root=[{','.join(given)}] for training, --media-root for each for `qwen3vl data`",
        )
    if path is None:
        problem = "is not a file" if any(path.exists() for path in paths) else "does not exist"
        raise DataError(place, f"{name!r} is {' or '.join(map(str, paths))}, which {problem}")
    return path


def describe(media: Media) -> str:
    """Return text for messages that describes a medium: its path and the URL it is from, or its number of bytes."""
    if not isinstance(media, Path):
        return f"an image or video of {len(media):,} bytes"
    try:
        return f"{media} (downloaded from {address_file(media).read_text('utf-8')})"
    except (OSError, ValueError):
        return str(media)


def address_file(downloaded: Path) -> Path:
    """Return the path of the file that stores the URL of a downloaded file."""
    return downloaded.with_name(f"{downloaded.name}.address")


@dataclass(frozen=True)
class DownloadRecord:
    """Record of the download of a data set: how many URLs it contains, and which of them failed.

    `failed` contains the hashes of the failed URLs (see `url_digest`). The next download requests `num_retryable` of
    them again. The record is empty if the data set was not downloaded.
    """

    total: int = 0
    failed: frozenset[bytes] = frozenset()
    num_retryable: int = 0

    @classmethod
    def read(cls, root: Path, data: str) -> Self:
        """Read the record of one data set from a folder. `data` is the data set's `download_key`.

        Return an empty record if there is none; raise DataError if it is damaged.
        """
        path = cls._path(root, data)
        try:
            found = read_json(path)
            failed = frozenset(map(bytes.fromhex, found["given_up"]))
            return cls(int(found["total"]), failed, int(found.get("retryable", 0)))  # missing in older records
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                str(path),
                f"cannot read the download record ({error}); run `qwen3vl data download` for these data again",
            ) from error

    def write(self, root: Path, data: str) -> None:
        """Write this record to a folder; replace an earlier record. `data` is the data set's `download_key`."""
        path = self._path(root, data)
        path.parent.mkdir(parents=True, exist_ok=True)
        failed = sorted(digest.hex() for digest in self.failed)
        contents = {"total": self.total, "given_up": failed, "retryable": self.num_retryable}
        replace_file(path, json.dumps(contents).encode())

    @staticmethod
    def _path(root: Path, data: str) -> Path:
        return root / "records" / f"{hashlib.sha256(data.encode()).hexdigest()[:40]}.json"

    def add_missing_urls(self, fingerprint: str) -> str:
        """Return the fingerprint of a data set. If URLs could not be downloaded, append a hash of these URLs."""
        if not self.failed:
            return fingerprint
        digest = hashlib.sha256(b"".join(sorted(self.failed))).hexdigest()[:16]
        return f"{fingerprint}, without {len(self.failed):,} of {self.total:,} addresses ({digest})"


@dataclass(frozen=True)
class UrlCache:
    """A folder of downloaded files. Picklable, for data-loading workers.

    `folder` is None for the cache folder of the user. `record` is the download record of the data set that is read, if
    any: URLs that failed in that download raise, even if their files exist now.
    """

    folder: Path | None = None
    record: DownloadRecord | None = None

    @property
    def root(self) -> Path:
        """Return the folder of downloaded files."""
        return self.folder or user_cache() / "media"

    def for_data(self, data: str) -> UrlCache:
        """Return a copy that uses the download record of one data set. `data` is the data set's `download_key`."""
        return replace(self, record=DownloadRecord.read(self.root, data))

    def __call__(self, address: str, place: str) -> Path:
        """Return the file that was downloaded from an http or https URL found at `place`.

        Raises:
            DataError: the download failed.
            DataUnavailable: no download was tried, the folder differs from the download record, or too many URLs of the
                data set failed with errors that may be temporary.
        """
        path, found = self.path_of(address), f"found the URL {quote_url(address)}"
        record = self.record or DownloadRecord()
        has_failed = bool(record.failed) and url_digest(address) in record.failed
        if has_failed and record.num_retryable > MOST_RETRYABLE * record.total:
            raise DataUnavailable(
                place,
                f"{record.num_retryable:,} of {record.total:,} images and videos could not be downloaded because "
                "hosts did not answer or are not in --allowed-urls; run `qwen3vl data download` again, or with "
                "--give-up to train without them",
            )
        if path.is_file():
            if not has_failed:
                return path
            raise DataUnavailable(
                place,
                f"{found}, which exists now, but its download failed when this data set was last downloaded; run "
                "`qwen3vl data download` again",
            )
        problem = self.failure_reason(address)
        if has_failed or (problem is not None and self.record is None):
            problem = problem or "the latest download of these data did not reach it; run `qwen3vl data download` again"
            raise DataError(place, f"{found}, which could not be downloaded: {problem}")
        state = f"and no download of it in {self.root} (url_cache)"
        if problem is not None:
            state = f"which failed in a download of other data ({problem})"
        raise DataUnavailable(
            place,
            f"{found}, {state}; run `qwen3vl data download` for these data, with --columns and --schema-adapter as in "
            "the run",
        )

    def path_of(self, address: str) -> Path:
        """Return the path that a URL is downloaded to. The file name is a hash of the URL, and the URL's last part."""
        digest, url = url_digest(address).hex(), parse_url(address)
        name = "" if url is None else url.path.rpartition("/")[2]
        ending = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[-60:]
        return self.root / digest[:2] / f"{digest[2:]}-{ending}"

    def failure_file(self, address: str) -> Path:
        """Return the path of the file that stores why the download of a URL failed permanently."""
        path = self.path_of(address)
        return path.with_name(f"{path.name}.problem")

    def failure_reason(self, address: str) -> str | None:
        """Return the reason why the download of a URL failed permanently; None if it did not."""
        file = self.failure_file(address)
        return file.read_text("utf-8") if file.exists() else None


@lru_cache(maxsize=256)  # a lookup of one address needs it several times
def parse_url(address: str) -> httpx.URL | None:
    """Parse a URL with httpx, which also sends the requests; return None if the URL is not valid."""
    try:
        url = httpx.URL(address)
        url.host  # noqa: B018  (read for what it raises)
    except (httpx.InvalidURL, ValueError):  # the latter for text that is not Unicode, and names that only look encoded
        return None
    return url


def url_digest(address: str) -> bytes:
    """Return a hash of 20 bytes that identifies a URL. Ignore its fragment, which is not sent to the server."""
    url = parse_url(address)
    text = address if url is None else str(url.copy_with(fragment=None))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).digest()[:20]


def quote_url(address: str) -> str:
    """Return a URL in quotation marks, shortened to 200 characters, for messages."""
    return repr(address if len(address) <= 200 else f"{address[:197]}...")


# Pillow warns beyond this many pixels and raises beyond twice as many, as protection from files made to exhaust memory.
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 2**30
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_PNG_START = 8  # bytes before the first chunk
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may have the orientation
_MOST_CHUNKS = 2**16  # an image of 64 megapixels has some thousands
# Factors by which Pillow converts a PNG's pixels to 8 bits, by pixel format. It does not convert the transparent value.
_TO_8_BITS = {"L;2": 255 / 3, "L;4": 255 / 15, "RGB;16B": 1 / 256}


def is_image_file(file: Path) -> bool:
    """Return whether Pillow recognizes a file as an image, even if the image is too large to open."""
    try:
        _open_image(file).close()
    except Image.DecompressionBombError:
        return True
    except Exception:  # each of Pillow's decoders has its own
        return False
    return True


def image_size(image: Media, place: str) -> tuple[int, int]:
    """Return the height and width of an image after its EXIF rotation, if possible from its header.

    Raises:
        DataError: the file does not decode, or has too many pixels.
    """
    with _open_checked(image, place) as opened:
        width, height = opened.size
        try:
            # Pillow would decode the full PNG to look for metadata after the pixels, even if there are none.
            is_read = isinstance(opened, PngImageFile) and _has_no_late_orientation(opened)
            exif = Image.Image.getexif(opened) if is_read else opened.getexif()
            sideways = exif.get(ExifTags.Base.Orientation) in _SIDEWAYS
        except Exception as error:  # for some formats Pillow reads the full file
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error
    return (width, height) if sideways else (height, width)


def _has_no_late_orientation(opened: PngImageFile) -> bool:
    """Return whether a PNG is complete and has no metadata, such as an EXIF orientation, after its pixels."""
    file, has_begun = opened.fp, False
    if file is None:
        return False
    before = file.tell()
    try:
        file.seek(_PNG_START)
        for _ in range(_MOST_CHUNKS):
            length, kind = struct.unpack(">I4s", file.read(8))
            if kind == b"IEND":
                return True
            if has_begun and kind in _PNG_TEXTS:
                return False
            has_begun = has_begun or kind == b"IDAT"
            file.seek(length + 4, io.SEEK_CUR)  # and a checksum
        return False
    except struct.error:  # truncated
        return False
    finally:
        file.seek(before)


def load_image(image: Media, place: str) -> Image.Image:
    """Return an image in RGB, rotated upright, on a white background. Of an animation, return the first frame.

    Raises:
        DataError: the file does not decode, or has too many pixels.
    """
    with _open_checked(image, place) as opened:
        try:
            if isinstance(opened, PngImageFile):
                # Convert the transparent gray or color to 8 bits, as Pillow converts the pixels.
                factor, value = _TO_8_BITS.get(str(opened.tile[0][3])), opened.info.get("transparency")
                if factor and value is not None:
                    is_gray = not isinstance(value, tuple)
                    scaled = int(value * factor) if is_gray else tuple(int(one * factor) for one in value)
                    opened.info["transparency"] = scaled
            upright = ImageOps.exif_transpose(opened)
            if not upright.has_transparency_data:
                return upright.convert("RGB")  # exactly as Pillow converts opaque pixels
            upright, white = upright.convert("RGBA"), Image.new("RGB", upright.size, "white")
            white.paste(upright, mask=upright.getchannel("A"))
            return white
        except Exception as error:  # each of Pillow's decoders has its own
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error


def _open_image(media: Media) -> Image.Image:
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        return Image.open(media if isinstance(media, Path) else io.BytesIO(media))


def _open_checked(media: Media, place: str) -> Image.Image:
    try:
        image = _open_image(media)
    except Image.DecompressionBombError as error:
        raise DataError(
            place, f"{describe(media)} is too large: {error}; expected at most {MOST_PIXELS:,} pixels"
        ) from error
    except Exception as error:  # each of Pillow's decoders has its own
        problem = error if isinstance(media, Path) else f"these bytes are no image ({media[:8]!r}...)"
        raise DataError(place, f"{describe(media)} does not decode as an image: {problem}") from error
    try:
        if image.format == "EPS":
            raise DataError(
                place, f"{describe(media)} is PostScript, a program that Ghostscript runs; expected an image"
            )
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow would make all values above 255 white.
            raise DataError(
                place, f"{describe(media)} has pixels of the kind {image.mode!r}, expected 8 bits per color"
            )
        check_pixels(*image.size, media, place)
    except DataError:
        image.close()
        raise
    return image


def check_pixels(width: int, height: int, media: Media | str, place: str) -> None:
    """Raise DataError for an image with too many pixels, which may be made to exhaust memory.

    `media` is the image or its description.
    """
    if width * height > MOST_PIXELS:
        name = media if isinstance(media, str) else describe(media)
        raise DataError(
            place, f"{name} is too large: {width} x {height} pixels, expected at most {MOST_PIXELS:,} pixels"
        )

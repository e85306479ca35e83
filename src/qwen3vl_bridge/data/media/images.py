"""Pictures: which file or bytes a conversation means, how large it is, its pixels.

What lives here: where media may come from, and everything that opens a picture. What may not: videos (`videos.py`),
files by address (`url_cache.py`), resizing and patches (the processor's).
"""

from __future__ import annotations

import base64
import io
import struct
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qwen3vl_bridge.data.errors import DataError

from PIL import ExifTags, Image, ImageOps
from PIL.PngImagePlugin import PngImageFile

# Pillow warns beyond this many pixels and refuses twice as many, to withstand files made to exhaust memory.
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 2**30
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_PNG_START = 8  # bytes before the first chunk
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may say how a picture is held
_MOST_CHUNKS = 2**16  # a picture of 64 megapixels has some thousands

Media = Path | bytes


@dataclass(frozen=True)
class FrameList:
    """A video that comes as pictures, sampled already.

    Attributes:
        frames: the pictures, all of one size.
        fps: how many of them are a second.
    """

    frames: tuple[Media, ...]
    fps: float


Video = Media | FrameList


@dataclass(frozen=True)
class MediaAccess:
    """Where pictures and videos may come from, whatever records say.

    Attributes:
        roots: folders that paths are relative to and may not leave: a path is looked up in each, in their order, and a
            link in one may lead into another. None where there may be no paths.
        addresses: gives the file of an address and the place where that stands, as `UrlCache` does; None for the
            user's own folder of what was downloaded.
    """

    roots: tuple[Path, ...] = ()
    addresses: Callable[[str, str], Path] | None = None

    @classmethod
    def of(
        cls, root: str | Path | Sequence[str | Path] | None, addresses: Callable[[str, str], Path] | None = None
    ) -> MediaAccess:
        """As settings have it; arguments as for the class, and one root may be by itself.

        Raises:
            ValueError: something that is no folder's name.
        """
        return cls(_roots(root), addresses)

    def downloaded(self, address: str, place: str) -> Path:
        """The file of an address; raises as `UrlCache`."""
        if self.addresses is not None:
            return self.addresses(address, place)
        from qwen3vl_bridge.data.media.url_cache import UrlCache

        return UrlCache()(address, place)


# A folder, several, or None for none or the source's own.
MediaRoot = str | Path | Sequence[str | Path] | MediaAccess | None


def _roots(given: Any) -> tuple[Path, ...]:
    each = () if given is None else given if isinstance(given, list | tuple) else (given,)
    if wrong := [root for root in each if not isinstance(root, str | Path)]:
        raise ValueError(f"media_root has {wrong[0]!r}, expected a folder, or a list of folders")
    return tuple(map(Path, each))


def media_access(given: MediaRoot, default: Path | None) -> MediaAccess:
    """What a source was given, as an access.

    Args:
        given: an access, or its root, or several.
        default: the root where none is given.

    Raises:
        DataError: there is no such folder.
    """
    access = given if isinstance(given, MediaAccess) else MediaAccess.of(given)
    roots = access.roots or _roots(default)
    for root in roots:
        if not root.is_dir():
            raise DataError(str(root), "there is no such folder, expected the media root")
    return replace(access, roots=roots)


def find(name: str, root: Path | MediaAccess, place: str) -> Media:
    """What a conversation calls `name`. What an address holds was downloaded before; nothing is now.

    Args:
        name: path relative to a root, or absolute and inside one; an address; or the contents
            themselves, "data:...;base64,...".
        root: folder that no path may leave, by `..` or by a link; or an access, which may have several.
        place: where the name stands, for messages.

    Raises:
        DataError: an address whose download was given up, a path that leaves the roots, no such file, or damaged
            contents.
        Unreachable: an address of which nothing was downloaded.
    """
    access = root if isinstance(root, MediaAccess) else MediaAccess((root,))
    if name.startswith("data:"):
        return _contents(name, place)
    if name.lower().startswith(("http://", "https://")):
        return access.downloaded(name, place)
    if "://" in name:
        raise DataError(place, f"found the address {name[:80]!r}, expected the path of a file")
    if not access.roots:
        raise DataError(place, f"found the path {name[:80]!r}, and no media_root that it is relative to")
    return _file(name, access.roots, place)


def _contents(name: str, place: str) -> bytes:
    head, comma, contents = name.partition(",")
    if not comma or not head.endswith(";base64"):
        raise DataError(place, f"found {name[:40]!r}, expected 'data:...;base64,' and contents")
    try:
        return base64.b64decode(contents, validate=True)
    except ValueError as error:
        raise DataError(place, f"found contents that are no base64 ({error})") from error


def _file(name: str, roots: tuple[Path, ...], place: str) -> Path:
    try:
        inside, outside = [root.resolve() for root in roots], None
        for root in roots:
            path = (root / name).resolve()
            found, allowed = path.is_file(), any(path.is_relative_to(one) for one in inside)
            if found and allowed:
                return path
            if not allowed and (found or outside is None):
                outside = root, path
            if found:
                break  # the first that is there is meant, and not another of the same name
        if outside is not None:
            root, path = outside
            raise DataError(
                place,
                f"{name!r} is {path}, expected a path inside the media root {_listed(roots)}; if that place is "
                f"meant, name it too: media_root=[{','.join(map(str, (*roots, _left_to(name, root, inside))))}]",
            )
        raise DataError(place, f"{name!r} is {_listed(root / name for root in inside)}, and there is no such file")
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a loop of links
        raise DataError(place, f"found {name[:80]!r}, expected the path of a file ({error})") from error


def _left_to(name: str, root: Path, roots: list[Path]) -> Path:
    """Which folder a path is in that leaves the roots: the one that a link leads to, if it is by a link."""
    path = root / name
    if ".." not in Path(name).parts and not Path(name).is_absolute():
        steps = [*reversed(path.parents), path][len(root.parts) :]
        path = next(step for step in steps if not any(step.resolve().is_relative_to(one) for one in roots))
    path = path.resolve()
    return path if path.is_dir() else path.parent


def _listed(paths: Iterable[Path]) -> str:
    return " or ".join(map(str, paths))


def describe(media: Media) -> str:
    """A file's path, and the address that it was downloaded from, if it was; or how many bytes came in its stead."""
    if not isinstance(media, Path):
        return f"a picture or video of {len(media):,} bytes"
    try:
        return f"{media} (downloaded from {address_file(media).read_text('utf-8')})"
    except (OSError, ValueError):
        return str(media)


def address_file(downloaded: Path) -> Path:
    """Where the address of a downloaded file is written down."""
    return downloaded.with_name(f"{downloaded.name}.address")


def is_picture(file: Path) -> bool:
    """Whether a file begins as a picture does, be it too large to be opened."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            Image.open(file).close()
    except Image.DecompressionBombError:
        return True
    except Exception:  # each of Pillow's decoders has its own
        return False
    return True


def image_size(image: Media, place: str) -> tuple[int, int]:
    """Height and width of a picture as `load_image` gives it, read from the file's header.

    Raises:
        DataError: as `load_image`, as far as the header tells.
    """
    with _opened(image, place) as opened:
        width, height = opened.size
        try:
            sideways = _exif(opened).get(ExifTags.Base.Orientation) in _SIDEWAYS
        except Exception as error:  # of some formats it reads the whole file
            raise DataError(place, f"{describe(image)} does not decode as a picture: {error}") from error
    return (width, height) if sideways else (height, width)


def _exif(opened: Image.Image) -> Image.Exif:
    """What a picture says of itself, without its pixels where it is known without them.

    A PNG may say it behind its pixels, so Pillow decodes it whole unless it has said it before.
    """
    if isinstance(opened, PngImageFile) and _says_no_more(opened):
        return Image.Image.getexif(opened)
    return opened.getexif()


def _says_no_more(opened: PngImageFile) -> bool:
    """Whether a PNG goes on to its end, and has nothing behind its pixels that says how it is held."""
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
    except struct.error:  # it breaks off
        return False
    finally:
        file.seek(before)


def load_image(image: Media, place: str) -> Image.Image:
    """The picture in RGB and upright, as `transformers.image_utils.load_image` gives it.

    A processor that is given a path leaves a photograph on its side as the camera held it; people who wrote about it
    saw it upright.

    Raises:
        DataError: a file that does not decode, or one with too many pixels.
    """
    with _opened(image, place) as opened:
        try:
            return ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # each of Pillow's decoders has its own
            raise DataError(place, f"{describe(image)} does not decode as a picture: {error}") from error


def _opened(media: Media, place: str) -> Image.Image:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(media if isinstance(media, Path) else io.BytesIO(media))
    except Image.DecompressionBombError as error:
        raise DataError(
            place, f"{describe(media)} is too large: {error}; expected at most {MOST_PIXELS:,} pixels"
        ) from error
    except Exception as error:  # each of Pillow's decoders has its own
        raise DataError(place, f"{describe(media)} does not decode as a picture: {error}") from error
    try:
        if image.format == "EPS":
            raise DataError(
                place, f"{describe(media)} is PostScript, a program that Ghostscript runs; expected a picture"
            )
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow makes everything beyond 255 of it white.
            raise DataError(place, f"{describe(media)} has pixels of the kind {image.mode!r}, expected 8 bits a colour")
        check_pixels(*image.size, media, place)
    except DataError:
        image.close()
        raise
    return image


def check_pixels(width: int, height: int, media: Media | str, place: str) -> None:
    """Refuses a picture made to exhaust memory.

    Args:
        width: its width in pixels.
        height: its height.
        media: what it is from, or what messages call that.
        place: where it stands, for messages.

    Raises:
        DataError: it has too many pixels.
    """
    if width * height > MOST_PIXELS:
        name = media if isinstance(media, str) else describe(media)
        raise DataError(
            place, f"{name} is too large: {width} x {height} pixels, expected at most {MOST_PIXELS:,} pixels"
        )

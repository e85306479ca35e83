"""Images: the file or bytes that a conversation refers to, their size and pixels."""

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
_PNG_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # chunks that may have the orientation
_MOST_CHUNKS = 2**16  # an image of 64 megapixels has some thousands
# By Pillow's name of a PNG's samples: the factor by which it converts pixels to 8 bits, but not the transparent value.
_TO_8_BITS = {"L;2": 255 / 3, "L;4": 255 / 15, "RGB;16B": 1 / 256}

Media = Path | bytes


@dataclass(frozen=True)
class FrameList:
    """A video given as a list of sampled frames.

    Attributes:
        frames: the images, all of one size.
        fps: frames per second.
    """

    frames: tuple[Media, ...]
    fps: float


Video = Media | FrameList


@dataclass(frozen=True)
class MediaAccess:
    """Folders and downloads that records may refer to.

    Attributes:
        roots: folders that paths are relative to and must not leave: a path is looked up in each, in order, and
            symbolic links may point from one into another. None if paths are not allowed.
        addresses: returns the downloaded file of a URL at a place in the data, like `UrlCache`; None for the user's
            cache folder.
    """

    roots: tuple[Path, ...] = ()
    addresses: Callable[[str, str], Path] | None = None

    @classmethod
    def of(
        cls, root: str | Path | Sequence[str | Path] | None, addresses: Callable[[str, str], Path] | None = None
    ) -> MediaAccess:
        """Create from settings; arguments as for the class, and a single root need not be in a list.

        Raises:
            ValueError: a value that is not a folder's name.
        """
        return cls(_roots(root), addresses)

    def downloaded(self, address: str, place: str) -> Path:
        """The downloaded file of a URL; raises as `UrlCache`."""
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
    """The access for the argument of a source.

    Args:
        given: an access, or its root, or several.
        default: the root if none is given.

    Raises:
        DataError: the folder does not exist.
    """
    access = given if isinstance(given, MediaAccess) else MediaAccess.of(given)
    roots = access.roots or _roots(default)
    for root in roots:
        if not root.is_dir():
            raise DataError(str(root), "there is no such folder, expected the media root")
    return replace(access, roots=roots)


def find(name: str, root: Path | MediaAccess, place: str) -> Media:
    """The file or bytes that a conversation calls `name`. URLs were downloaded before; nothing is downloaded here.

    Args:
        name: path relative to a root, or absolute and inside one; a URL; or the contents themselves,
            "data:...;base64,...".
        root: folder that no path may leave, by `..` or by a symbolic link; or an access, which may have several.
        place: position of the name in the data, for messages.

    Raises:
        DataError: a URL whose download was given up, a path that leaves the roots or does not exist, or damaged
            contents.
        Unreachable: a URL that was not downloaded.
    """
    access = root if isinstance(root, MediaAccess) else MediaAccess((root,))
    if name.startswith("data:"):
        return _contents(name, place)
    if name.lower().startswith(("http://", "https://")):
        return access.downloaded(name, place)
    if "://" in name:
        raise DataError(place, f"found the URL {name[:80]!r}, expected the path of a file")
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
        raise DataError(place, f"found contents that are not valid base64 ({error})") from error


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
                break  # the first that exists is used, and no other of the same name
        if outside is not None:
            root, path = outside
            wanted = [str(one) for one in (*roots, _folder_outside(name, root, inside))]
            raise DataError(
                place,
                f"{name!r} is {path}, expected a path inside the media root {_listed(roots)}; if that place is "
                f"meant, name it too: media_root=[{','.join(wanted)}] for training, "
                f"{' '.join(f'--media-root {one}' for one in wanted)} for `qwen3vl data`",
            )
        raise DataError(place, f"{name!r} is {_listed(root / name for root in inside)}, and there is no such file")
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null character, a loop of symbolic links
        raise DataError(place, f"found {name[:80]!r}, expected the path of a file ({error})") from error


def _folder_outside(name: str, root: Path, roots: list[Path]) -> Path:
    """The folder of a path outside the roots: the target of a symbolic link, if there is one."""
    path = root / name
    if ".." not in Path(name).parts and not Path(name).is_absolute():
        steps = [*reversed(path.parents), path][len(root.parts) :]
        path = next(step for step in steps if not any(step.resolve().is_relative_to(one) for one in roots))
    path = path.resolve()
    return path if path.is_dir() else path.parent


def _listed(paths: Iterable[Path]) -> str:
    return " or ".join(map(str, paths))


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


def is_picture(file: Path) -> bool:
    """Whether a file begins like an image, even if it is too large to be opened."""
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
    """Height and width of an image as returned by `load_image`, read from the file's header.

    Raises:
        DataError: as for `load_image`, as far as the header shows.
    """
    with _opened(image, place) as opened:
        width, height = opened.size
        try:
            sideways = _exif(opened).get(ExifTags.Base.Orientation) in _SIDEWAYS
        except Exception as error:  # for some formats it reads the whole file
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error
    return (width, height) if sideways else (height, width)


def _exif(opened: Image.Image) -> Image.Exif:
    """Metadata (EXIF) of an image, without decoding if possible.

    A PNG may store it after the pixels; then Pillow decodes the whole image, unless it was found before them.
    """
    if isinstance(opened, PngImageFile) and _says_no_more(opened):
        return Image.Image.getexif(opened)
    return opened.getexif()


def _says_no_more(opened: PngImageFile) -> bool:
    """Whether a PNG is complete, and has no orientation after its pixels."""
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
    """The image in RGB and upright, like `transformers.image_utils.load_image`; of an animation the first frame.

    Rotates by the EXIF orientation, which a processor that is given a path ignores, although the conversation was
    written about the upright image. Composites a transparent image on white, as qwen-vl-utils and vLLM do with RGBA;
    transformers drops the transparency, and black text on a transparent ground becomes black on black.

    Raises:
        DataError: a file that does not decode, or one with too many pixels.
    """
    with _opened(image, place) as opened:
        try:
            if isinstance(opened, PngImageFile):
                _scale_transparent_value(opened)
            return _on_white(ImageOps.exif_transpose(opened))
        except Exception as error:  # each of Pillow's decoders has its own
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error


def _scale_transparent_value(opened: PngImageFile) -> None:
    """Convert the grey or colour that is transparent to 8 bits, as Pillow converts the pixels."""
    factor, value = _TO_8_BITS.get(str(opened.tile[0][3])), opened.info.get("transparency")
    if factor and value is not None:
        scaled = tuple(int(one * factor) for one in value) if isinstance(value, tuple) else int(value * factor)
        opened.info["transparency"] = scaled


def _on_white(image: Image.Image) -> Image.Image:
    """The image in RGB. Opaque pixels are those of Pillow's own conversion, to the bit."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


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
        raise DataError(place, f"{describe(media)} does not decode as an image: {error}") from error
    try:
        if image.format == "EPS":
            raise DataError(
                place, f"{describe(media)} is PostScript, a program that Ghostscript runs; expected an image"
            )
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow would make all values above 255 white.
            raise DataError(place, f"{describe(media)} has pixels of the kind {image.mode!r}, expected 8 bits a colour")
        check_pixels(*image.size, media, place)
    except DataError:
        image.close()
        raise
    return image


def check_pixels(width: int, height: int, media: Media | str, place: str) -> None:
    """Refuse an image made to exhaust memory.

    Args:
        width: its width in pixels.
        height: its height.
        media: its source, or that source's description.
        place: its position in the data, for messages.

    Raises:
        DataError: it has too many pixels.
    """
    if width * height > MOST_PIXELS:
        name = media if isinstance(media, str) else describe(media)
        raise DataError(
            place, f"{name} is too large: {width} x {height} pixels, expected at most {MOST_PIXELS:,} pixels"
        )

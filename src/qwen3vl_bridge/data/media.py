"""Pictures: which file or bytes a conversation means, how large it is, its pixels.

What lives here: everything that opens a picture. What may not: videos (`video.py`), resizing and patches (the
processor's).
"""

from __future__ import annotations

import base64
import io
import warnings
from dataclasses import dataclass
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from .errors import DataError

# Pillow warns beyond this many pixels and refuses twice as many, to withstand files made to exhaust memory.
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 2**30
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height

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


def find(name: str, root: Path, place: str) -> Media:
    """What a conversation calls `name`.

    Args:
        name: path relative to `root`, or absolute and inside it; or the contents themselves, "data:...;base64,...".
        root: folder that no path may leave, by `..` or by a link.
        place: where the name stands, for messages.

    Raises:
        DataError: an address, a path that leaves the root, no such file, or damaged contents.
    """
    if name.startswith("data:"):
        head, comma, contents = name.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DataError(place, f"found {name[:40]!r}, expected 'data:...;base64,' and contents")
        try:
            return base64.b64decode(contents, validate=True)
        except ValueError as error:
            raise DataError(place, f"found contents that are no base64 ({error})") from error
    if "://" in name:
        raise DataError(place, f"found the address {name[:80]!r}, expected the path of a file")
    try:
        path = (root / name).resolve()
        if not path.is_relative_to(root.resolve()):
            raise DataError(place, f"{name!r} is {path}, expected a path inside the media root {root.resolve()}")
        if not path.is_file():
            raise DataError(place, f"{name!r} is {path}, and there is no such file")
    except DataError:
        raise
    except (OSError, ValueError) as error:  # too long, a loop of links, a null character
        raise DataError(place, f"found {name[:80]!r}, expected the path of a file ({error})") from error
    return path


def describe(media: Media) -> str:
    """A file's path, or how many bytes came in its stead."""
    return str(media) if isinstance(media, Path) else f"a picture or video of {len(media):,} bytes"


def image_size(image: Media, place: str) -> tuple[int, int]:
    """Height and width of a picture as `load_image` gives it, read from the file's header.

    Raises:
        DataError: as `load_image`, as far as the header tells.
    """
    with _opened(image, place) as opened:
        width, height = opened.size
        try:
            sideways = opened.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
        except Exception as error:  # of some formats it reads the whole file
            raise DataError(place, f"{describe(image)} does not decode as a picture: {error}") from error
    return (width, height) if sideways else (height, width)


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
    name = describe(media)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(media if isinstance(media, Path) else io.BytesIO(media))
    except Image.DecompressionBombError as error:
        raise DataError(place, f"{name} is too large: {error}; expected at most {MOST_PIXELS:,} pixels") from error
    except Exception as error:  # each of Pillow's decoders has its own
        raise DataError(place, f"{name} does not decode as a picture: {error}") from error
    try:
        if image.mode in ("I", "F") or image.mode.startswith("I;"):
            # Pillow makes everything beyond 255 of it white.
            raise DataError(place, f"{name} has pixels of the kind {image.mode!r}, expected 8 bits a colour")
        check_pixels(*image.size, name, place)
    except DataError:
        image.close()
        raise
    return image


def check_pixels(width: int, height: int, name: str, place: str) -> None:
    """Refuses a picture made to exhaust memory.

    Raises:
        DataError: it has too many pixels.
    """
    if width * height > MOST_PIXELS:
        raise DataError(
            place, f"{name} is too large: {width} x {height} pixels, expected at most {MOST_PIXELS:,} pixels"
        )

"""Pictures on disk: which file a conversation means, how large it is, its pixels.

What lives here: everything that opens a picture. What may not: resizing and patches (the processor's).
"""

from __future__ import annotations

import warnings
from pathlib import Path

from PIL import ExifTags, Image, ImageOps

from .errors import DataError

# Pillow warns beyond this many pixels and refuses twice as many, to withstand files made to exhaust memory.
MOST_PIXELS = Image.MAX_IMAGE_PIXELS or 2**30
_SIDEWAYS = (5, 6, 7, 8)  # EXIF orientations that swap width and height


def find(name: str, root: Path, place: str) -> Path:
    """The file that a conversation calls `name`.

    Args:
        name: path relative to `root`, or absolute and inside it.
        root: folder that no path may leave, by `..` or by a link.
        place: where the name stands, for messages.

    Raises:
        DataError: an address, a path that leaves the root, or no such file.
    """
    if "://" in name or name.startswith("data:"):
        raise DataError(place, f"found the address {name[:80]!r}, expected the path of a file")
    path = (root / name).resolve()
    if not path.is_relative_to(root.resolve()):
        raise DataError(place, f"{name!r} is {path}, expected a path inside the media root {root.resolve()}")
    if not path.is_file():
        raise DataError(place, f"{name!r} is {path}, and there is no such file")
    return path


def image_size(path: Path, place: str) -> tuple[int, int]:
    """Height and width of a picture as `load_image` gives it, read from the file's header.

    Raises:
        DataError: as `load_image`, as far as the header tells.
    """
    with _opened(path, place) as image:
        width, height = image.size
        sideways = image.getexif().get(ExifTags.Base.Orientation) in _SIDEWAYS
    return (width, height) if sideways else (height, width)


def load_image(path: Path, place: str) -> Image.Image:
    """The picture in RGB and upright, as `transformers.image_utils.load_image` gives it.

    A processor that is given a path leaves a photograph on its side as the camera held it; people who wrote about it
    saw it upright.

    Raises:
        DataError: a file that does not decode, or one with too many pixels.
    """
    with _opened(path, place) as image:
        try:
            return ImageOps.exif_transpose(image).convert("RGB")
        except Exception as error:  # each of Pillow's decoders has its own
            raise DataError(place, f"{path} does not decode as a picture: {error}") from error


def _opened(path: Path, place: str) -> Image.Image:
    too_large = f"expected at most {MOST_PIXELS:,} pixels"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(path)
    except Image.DecompressionBombError as error:
        raise DataError(place, f"{path} is too large: {error}; {too_large}") from error
    except Exception as error:  # each of Pillow's decoders has its own
        raise DataError(place, f"{path} does not decode as a picture: {error}") from error
    width, height = image.size
    if width * height > MOST_PIXELS:
        image.close()
        raise DataError(place, f"{path} is too large: {width} x {height} pixels, {too_large}")
    return image

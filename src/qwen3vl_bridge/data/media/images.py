"""Images: their size, read from the header, and their pixels."""

from __future__ import annotations

import io
import struct
import warnings
from pathlib import Path

from qwen3vl_bridge.data.errors import DataError
from qwen3vl_bridge.data.media.media_access import Media, describe

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


def is_picture(file: Path) -> bool:
    """Whether a file begins like an image, even if it is too large to be opened."""
    try:
        _open(file).close()
    except Image.DecompressionBombError:
        return True
    except Exception:  # each of Pillow's decoders has its own
        return False
    return True


def image_size(image: Media, place: str) -> tuple[int, int]:
    """Height and width of an image as returned by `load_image`, read from the file's header; errors as there."""
    with _opened(image, place) as opened:
        width, height = opened.size
        try:
            # Pillow would decode a whole PNG for the metadata after its pixels, also where there are none.
            is_read = isinstance(opened, PngImageFile) and _says_no_more(opened)
            exif = Image.Image.getexif(opened) if is_read else opened.getexif()
            sideways = exif.get(ExifTags.Base.Orientation) in _SIDEWAYS
        except Exception as error:  # for some formats it reads the whole file
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error
    return (width, height) if sideways else (height, width)


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
    transformers drops the transparency, and black text on a transparent ground becomes black on black. A `DataError`
    for a file that does not decode, or one with too many pixels.
    """
    with _opened(image, place) as opened:
        try:
            if isinstance(opened, PngImageFile):
                # Convert the grey or colour that is transparent to 8 bits, as Pillow converts the pixels.
                factor, value = _TO_8_BITS.get(str(opened.tile[0][3])), opened.info.get("transparency")
                if factor and value is not None:
                    is_grey = not isinstance(value, tuple)
                    scaled = int(value * factor) if is_grey else tuple(int(one * factor) for one in value)
                    opened.info["transparency"] = scaled
            upright = ImageOps.exif_transpose(opened)
            if not upright.has_transparency_data:
                return upright.convert("RGB")  # opaque pixels are those of Pillow's own conversion, to the bit
            upright, white = upright.convert("RGBA"), Image.new("RGB", upright.size, "white")
            white.paste(upright, mask=upright.getchannel("A"))
            return white
        except Exception as error:  # each of Pillow's decoders has its own
            raise DataError(place, f"{describe(image)} does not decode as an image: {error}") from error


def _open(media: Media) -> Image.Image:
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        return Image.open(media if isinstance(media, Path) else io.BytesIO(media))


def _opened(media: Media, place: str) -> Image.Image:
    try:
        image = _open(media)
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
    """Refuse an image made to exhaust memory (DataError), with its source or that source's description."""
    if width * height > MOST_PIXELS:
        name = media if isinstance(media, str) else describe(media)
        raise DataError(
            place, f"{name} is too large: {width} x {height} pixels, expected at most {MOST_PIXELS:,} pixels"
        )

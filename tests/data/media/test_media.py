"""Pictures on disk: sizes and pixels as people see them, and what does not decode."""

from qwen3vl_bridge.data import DataError, JsonLines
from qwen3vl_bridge.data.media.images import image_size, load_image

import numpy as np
import pytest
from PIL import Image

from ..conftest import picture, write


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_a_picture_is_upright_and_its_size_is_known_without_it(tmp_path, orientation, mode):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.open(picture(tmp_path / "x.png", 30, 50)).convert(mode).save(tmp_path / "y.png", exif=exif)
    upright = load_image(tmp_path / "y.png", "here")
    assert upright.mode == "RGB" and upright.size == ((30, 50) if (orientation or 1) > 4 else (50, 30))
    assert image_size(tmp_path / "y.png", "here") == upright.size[::-1]


@pytest.mark.parametrize("read_picture", ["length", "call"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not decode as a picture"),
        (b"no picture at all", "does not decode as a picture"),
    ],
)
def test_pictures_that_do_not_decode_are_refused(tmp_path, encoder, content, message, read_picture):
    (tmp_path / "x.png").write_bytes(content)
    refused(tmp_path, encoder, message, read_picture)


@pytest.mark.parametrize("read_picture", ["length", "call"])
def test_a_picture_that_breaks_off_is_refused(tmp_path, encoder, read_picture):
    path = picture(tmp_path / "x.png", 64, 64)
    path.write_bytes(path.read_bytes()[:2000])
    refused(tmp_path, encoder, "x.png does not decode as a picture: ", read_picture)


@pytest.mark.parametrize("read_picture", ["length", "call"])
@pytest.mark.parametrize("limit", [1000, 3000])
def test_a_picture_that_would_fill_the_memory_is_refused(tmp_path, encoder, monkeypatch, limit, read_picture):
    """Pillow itself only warns of up to twice its limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    monkeypatch.setattr("qwen3vl_bridge.data.media.images.MOST_PIXELS", limit)
    picture(tmp_path / "x.png", 64, 64)
    refused(tmp_path, encoder, f"x.png is too large: .* pixels.* expected at most {limit:,} pixels", read_picture)


def refused(folder, encoder, message: str, read_picture: str) -> None:
    question = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
    record = {"messages": [question, {"role": "assistant", "content": "Seven."}]}
    file = JsonLines(write(folder / "train.jsonl", [record]))
    with pytest.raises(DataError, match=message) as caught:
        encoder.size(file[0]) if read_picture == "length" else encoder(file[0])
    assert str(caught.value).startswith("train.jsonl:1: ")


@pytest.mark.parametrize("read_picture", ["length", "call"])
def test_pictures_of_more_than_8_bits_are_refused(tmp_path, encoder, read_picture):
    """Pillow makes white of nearly all of them."""
    Image.fromarray(np.full((64, 64), 30_000, np.uint16)).save(tmp_path / "x.png")
    refused(tmp_path, encoder, "has pixels of the kind 'I.*', expected 8 bits a colour", read_picture)

"""Pictures on disk: which folders they may be in, sizes and pixels as people see them, and what does not decode."""

from qwen3vl_bridge.data import DataError, JsonLines, open_source
from qwen3vl_bridge.data.media.images import MediaAccess, find, image_size, load_image

import numpy as np
import pytest
from PIL import Image

from ..conftest import picture, write


@pytest.fixture
def linked(tmp_path):
    """As LLaVA's data are mostly set up: records in one folder, pictures elsewhere, and links to them."""
    for name in ("mnt/coco/train/1.png", "mnt/gqa/1.png", "mnt/gqa/2.png", "more/2.png", "more/3.png"):
        picture(tmp_path / name, 32, 32)
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/images/coco").symlink_to(tmp_path / "mnt/coco")
    (tmp_path / "data/images/gqa.png").symlink_to(tmp_path / "mnt/gqa/1.png")
    (tmp_path / "data/2.png").symlink_to(tmp_path / "mnt/gqa/2.png")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "lies_in", "missing"),
    [
        ("images/coco/train/1.png", "mnt/coco", "mnt/coco"),  # a folder that is a link
        ("images/gqa.png", "mnt/gqa", "mnt/gqa"),  # a file that is one
        ("../mnt/coco/train/1.png", "mnt", "mnt/coco/train"),
        ("{}/mnt/gqa/1.png", "mnt/gqa", "mnt/gqa"),
    ],
)
def test_a_path_may_leave_a_root_for_another_alone(linked, name, lies_in, missing):
    root, name = linked / "data", name.format(linked)
    with pytest.raises(DataError) as caught:
        find(name, root, "here")
    expected = f"expected a path inside the media root {root}; if that place is meant, name it too"
    assert f", {expected}: media_root=[{root},{linked / missing}]" in str(caught.value)
    for other in (lies_in, missing):  # what the error says to set is enough
        assert find(name, MediaAccess.of([root, linked / other]), "here").is_relative_to(linked / lies_in)
    with pytest.raises(DataError, match=f"expected a path inside the media root {root} or {linked}/more; if"):
        find(name, MediaAccess.of([root, linked / "more"]), "here")


def test_roots_are_looked_in_one_after_the_other(linked):
    def found(name, *roots):
        return find(name, MediaAccess.of([linked / root for root in roots]), "here").relative_to(linked)

    assert str(found("2.png", "more", "mnt/gqa")) == "more/2.png"
    assert str(found("2.png", "mnt/gqa", "more")) == "mnt/gqa/2.png"
    assert str(found("3.png", "data", "mnt/gqa", "more")) == "more/3.png"
    with pytest.raises(DataError, match=f"'4.png' is {linked}/more/4.png or {linked}/data/4.png, and there is no such"):
        found("4.png", "more", "data")
    # The first one that is there is meant: not another of the same name, because it may not be read.
    with pytest.raises(DataError, match=rf"'2.png' is .*gqa/2.png, .*name it too: .*,{linked}/mnt/gqa\]"):
        found("2.png", "data", "more")
    assert str(found("1.png", "data", "mnt/gqa")) == "mnt/gqa/1.png"


def test_relative_roots(linked, monkeypatch):
    monkeypatch.chdir(linked)
    with pytest.raises(DataError, match=rf"inside the media root data; .*media_root=\[data,{linked}/mnt/coco\]"):
        find("images/coco/train/1.png", MediaAccess.of("data"), "here")
    assert find("images/coco/train/1.png", MediaAccess.of(["data", "mnt"]), "here").is_file()
    with pytest.raises(ValueError, match="media_root has 7, expected a folder, or a list of folders"):
        MediaAccess.of(["data", 7])


def test_roots_are_no_part_of_what_data_are(linked):
    question = {"role": "user", "content": [{"type": "image", "image": "images/gqa.png"}]}
    record = {"messages": [question, {"role": "assistant", "content": "Seven."}]}
    file = write(linked / "data/train.jsonl", [record])
    source = open_source(file, [linked / "data", linked / "mnt"])
    assert source[0].images == (linked / "mnt/gqa/1.png",)
    assert source.fingerprint() == open_source(file).fingerprint()
    with pytest.raises(DataError, match="nowhere: there is no such folder, expected the media root"):
        open_source(file, [linked / "data", linked / "nowhere"])


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

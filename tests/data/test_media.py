"""Test media roots, image sizes and pixels, files that do not decode, and files that could run code."""

import base64
import io
import shutil
import struct
import sys
import zlib
from pathlib import Path

from qwen3vl_bridge.core.files import read_object, write_object
from qwen3vl_bridge.data import DataError, load_processor, open_source, videos
from qwen3vl_bridge.data.media import MediaAccess, find_media, image_size, load_image

import av
import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image
from PIL.PngImagePlugin import PngImageFile
from qwen_vl_utils.vision_process import to_rgb

from tests.data.conftest import dialogue, picture, write
from tests.data.test_videos import clip


@pytest.fixture
def linked(tmp_path):
    """Write records in one folder, images in others, and links to them, as usual for LLaVA data."""
    for name in ("mnt/coco/train/1.png", "mnt/gqa/1.png", "mnt/gqa/2.png", "more/2.png", "more/3.png"):
        picture(tmp_path / name, 32, 32)
    (tmp_path / "data/images").mkdir(parents=True)
    (tmp_path / "data/images/coco").symlink_to(tmp_path / "mnt/coco")
    (tmp_path / "data/images/gqa.png").symlink_to(tmp_path / "mnt/gqa/1.png")
    (tmp_path / "data/2.png").symlink_to(tmp_path / "mnt/gqa/2.png")
    return tmp_path


@pytest.mark.parametrize(("name", "lies_in", "missing"), [
    ("images/coco/train/1.png", "mnt/coco", "mnt/coco/train"),  # a folder that is a link
    ("images/gqa.png", "mnt/gqa", "mnt/gqa"),  # a file that is one
    ("../mnt/coco/train/1.png", "mnt", "mnt/coco/train"), ("{}/mnt/gqa/1.png", "mnt/gqa", "mnt/gqa"),
])  # fmt: skip
def test_find_media_raises_if_path_leaves_all_media_roots(linked, name, lies_in, missing):
    root, name = linked / "data", name.format(linked)
    with pytest.raises(DataError) as caught:
        find_media(name, root, "here")
    expected = f"expected a path inside the media root {root}; to allow that folder, add it to the roots"
    assert f": {expected}: dataset.media_root=[{root},{linked / missing}] for training" in str(caught.value)
    for other in (lies_in, missing):  # what the error says to set is enough
        assert find_media(name, MediaAccess.from_settings([root, linked / other]), "here").is_relative_to(
            linked / lies_in
        )
    with pytest.raises(DataError, match=f"expected a path inside the media root {root} or {linked}/more; to allow"):
        find_media(name, MediaAccess.from_settings([root, linked / "more"]), "here")


def test_find_media_searches_media_roots_in_order(linked):
    def found(name, *roots):
        return find_media(name, MediaAccess.from_settings([linked / root for root in roots]), "here").relative_to(
            linked
        )

    assert str(found("2.png", "more", "mnt/gqa")) == "more/2.png"
    assert str(found("2.png", "mnt/gqa", "more")) == "mnt/gqa/2.png"
    assert str(found("3.png", "data", "mnt/gqa", "more")) == "more/3.png"
    with pytest.raises(DataError, match=f"'4.png' is {linked}/more/4.png or {linked}/data/4.png, which does not"):
        found("4.png", "more", "data")
    # The first one that is there is meant: not another of the same name, because it may not be read.
    with pytest.raises(DataError, match=rf"'2.png' is .*gqa/2.png: .*add it to the roots: .*,{linked}/mnt/gqa\] for"):
        found("2.png", "data", "more")
    assert str(found("1.png", "data", "mnt/gqa")) == "mnt/gqa/1.png"


@pytest.mark.parametrize("name", ["loop.png", "loop.png/1.png", "images/round/round/1.png", "images/self/1.png"])
@pytest.mark.parametrize("roots", [["data"], ["data", "more"]])
def test_find_media_raises_if_symlinks_form_a_loop(linked, name, roots):
    (linked / "data/loop.png").symlink_to("pool.png")
    (linked / "data/pool.png").symlink_to("loop.png")
    (linked / "data/images/round").symlink_to(".")
    (linked / "data/images/self").symlink_to("self")
    with pytest.raises(DataError, match=rf"^here: (found '{name}', expected the path of|'{name}' is .*does not exist)"):
        find_media(name, MediaAccess.from_settings([linked / root for root in roots]), "here")


def test_find_media_treats_relative_media_roots_like_absolute_ones(linked, monkeypatch):
    monkeypatch.chdir(linked)
    with pytest.raises(DataError, match=rf"inside the media root data; .*media_root=\[data,{linked}/mnt/coco/train\]"):
        find_media("images/coco/train/1.png", MediaAccess.from_settings("data"), "here")
    assert find_media("images/coco/train/1.png", MediaAccess.from_settings(["data", "mnt"]), "here").is_file()


def test_data_fingerprint_is_independent_of_media_roots(linked):
    record = {"messages": dialogue([{"type": "image", "image": "images/gqa.png"}], "Seven.")}
    file = write(linked / "data/train.jsonl", [record])
    source = open_source(file, [linked / "data", linked / "mnt"])
    assert source[0].images == (linked / "mnt/gqa/1.png",)
    assert source.fingerprint() == open_source(file).fingerprint()
    with pytest.raises(DataError, match="nowhere: there is no such folder, expected the folder of images"):
        open_source(file, [linked / "data", linked / "nowhere"])


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "P"])
@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_load_image_applies_exif_orientation(tmp_path, orientation, mode):
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.open(picture(tmp_path / "x.png", 30, 50)).convert(mode).save(tmp_path / "y.png", exif=exif)
    upright = load_image(tmp_path / "y.png", "here")
    assert upright.mode == "RGB" and upright.size == ((30, 50) if (orientation or 1) > 4 else (50, 30))
    assert image_size(tmp_path / "y.png", "here") == upright.size[::-1]


def file_of(image: Image.Image, kind: str, **how) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **how)
    return file.getvalue()


def shape_of(channels: int):
    return st.tuples(st.integers(1, 5), st.integers(1, 5), st.just(channels))


LOSSLESS = {"PNG": {}, "TIFF": {}, "WEBP": {"lossless": True, "exact": True}, "AVIF": {"quality": 100},
            "JPEG2000": {}, "TGA": {}}  # fmt: skip


@pytest.mark.parametrize("kind", LOSSLESS)
@given(pixels=arrays.arrays(np.uint8, shape_of(4)))
def test_load_image_blends_transparent_pixels_onto_white(kind, pixels):
    file = file_of(Image.fromarray(pixels, "RGBA"), kind, **LOSSLESS[kind])
    opened = Image.open(io.BytesIO(file))
    stored = np.asarray(opened.convert("RGBA"))  # AVIF stores colours approximately
    assert kind == "AVIF" or np.array_equal(stored, pixels)
    colours, alpha = stored[..., :3].astype(int), stored[..., 3:].astype(int)
    found = load_image(file, "here")
    assert found.mode == "RGB" and image_size(file, "here") == found.size[::-1] == pixels.shape[:2]
    assert np.array_equal(found, np.rint((colours * alpha + 255 * (255 - alpha)) / 255))
    assert np.array_equal(found, to_rgb(opened.convert("RGBA")))


@pytest.mark.parametrize("kind", ["PNG", "JPEG2000", "TGA"])
@given(pixels=arrays.arrays(np.uint8, shape_of(2)))
def test_load_image_blends_transparent_gray_pixels_onto_white(kind, pixels):
    image = Image.merge("LA", [Image.fromarray(pixels[..., channel]) for channel in (0, 1)])
    found = np.asarray(load_image(file_of(image, kind), "here"))
    grey, alpha = pixels[..., :1].astype(int), pixels[..., 1:].astype(int)
    assert np.array_equal(found, np.rint((grey * alpha + 255 * (255 - alpha)) / 255).repeat(3, axis=-1))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(depth: int, kind: int, row: list[int], transparent: bytes = b"", palette: bytes = b"") -> bytes:
    """Return a PNG of one row with a bit depth and a color type; the row is given as stored bytes."""
    samples = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind]
    header = struct.pack(">IIBBBBB", len(row) * 8 // (depth * samples), 1, depth, kind, 0, 0, 0)
    optional = b"".join(chunk(*one) for one in ((b"PLTE", palette), (b"tRNS", transparent)) if one[1])
    pixels = chunk(b"IDAT", zlib.compress(bytes([0, *row])))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + optional + pixels + chunk(b"IEND", b"")


RED_GREEN_BLUE = bytes([255, 0, 0, 0, 255, 0, 0, 0, 255])


@pytest.mark.parametrize(("file", "expected"), [
    (png(1, 0, [0b0101_0101], b"\0\0"), [255] * 8), (png(1, 0, [0b0101_0101], b"\0\1"), [0, 255] * 4),
    (png(2, 0, [0b0001_1011], b"\0\2"), [0, 85, 255, 255]), (png(4, 0, [0x09, 0xAF], b"\0\x09"), [0, 255, 170, 255]),
    (png(8, 0, [0, 9, 10], b"\0\x09"), [0, 255, 10]),
    (png(8, 2, [0, 9, 10, 9, 9, 9], b"\0\0\0\x09\0\x0a"), [255, [9, 9, 9]]),
    (png(16, 2, [0x34, 0] * 3 + [0, 0x34] * 3, b"\0\x34" * 3), [0x34, 255]),
    (png(16, 2, [0x12, 0x34] * 3 + [0xFF] * 6 + [0] * 6, b"\x12\x34" * 3), [255, 255, 0]),
    (png(2, 3, [0b0001_1000], b"\0\x80", RED_GREEN_BLUE), [255, [127, 255, 127], [0, 0, 255], 255]),
    (png(16, 4, [0x12, 0x34, 0, 0, 0x80, 0, 0xFF, 0xFF]), [255, 0x80]),
    (png(16, 6, [0, 0] * 4 + [0x80, 0] * 3 + [0xFF, 0xFF]), [255, 0x80]),
])  # fmt: skip
def test_load_image_blends_png_transparency_of_any_bit_depth_onto_white(file, expected):
    assert np.array_equal(load_image(file, "here"), [[np.broadcast_to(one, 3) for one in expected]])


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_load_image_returns_first_frame_of_animation_on_white(kind):
    clear, other = Image.new("RGBA", (6, 4), (0, 0, 0, 0)), Image.new("RGBA", (6, 4), (0, 0, 255, 128))
    clear.paste("red", (0, 0, 2, 4))
    clear.putpixel((2, 0), (0, 255, 0, 255))
    how = {"save_all": True, "append_images": [other, clear], "duration": 40, "disposal": 2}
    file = file_of(clear, kind, **how, **({"lossless": True} if kind == "WEBP" else {}))
    assert Image.open(io.BytesIO(file)).n_frames > 1
    found = np.asarray(load_image(file, "here"))
    assert (found[:, :2] == (255, 0, 0)).all() and (found[1:, 2:] == 255).all() and (found[:, 3:] == 255).all()


OPAQUE = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"), "GIF": ("L", "P"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB"), "JPEG": ("L", "RGB", "CMYK", "YCbCr"),
    "WEBP": ("RGB", "RGBA"), "BMP": ("1", "L", "P", "RGB", "RGBA"), "ICO": ("RGB", "RGBA"),
}  # fmt: skip


@pytest.mark.one_case_in(5)
@pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind, modes in OPAQUE.items() for mode in modes])
@given(pixels=arrays.arrays(np.uint8, st.just((16, 16, 3))))
def test_load_image_of_opaque_image_matches_pillow_rgb_conversion(kind, mode, pixels):
    image = Image.fromarray(pixels)
    file = file_of(Image.merge("LAB", image.split()) if mode == "LAB" else image.convert(mode), kind)
    assert np.array_equal(load_image(file, "here"), Image.open(io.BytesIO(file)).convert("RGB"))


def test_encoder_blends_transparent_image_onto_white_in_every_source(tmp_path, encoder, read):
    ink = np.random.default_rng(0).integers(0, 2, (64, 64), np.uint8) * 255
    Image.merge("LA", [Image.new("L", (64, 64)), Image.fromarray(ink)]).save(tmp_path / "clear.png")
    Image.fromarray(255 - ink).save(tmp_path / "white.png")
    contents = (tmp_path / "clear.png").read_bytes()
    assert np.array_equal(load_image(contents, "here"), Image.open(tmp_path / "white.png").convert("RGB"))

    def sample(medium, kind="image", **beside):
        return encoder(read(dialogue([{"type": kind, kind: medium, **beside}], "Seven.")))

    expected = sample("white.png").pixel_values
    assert len(expected.unique()) == 2
    assert torch.equal(sample("clear.png").pixel_values, expected)
    assert torch.equal(sample(f"data:;base64,{base64.b64encode(contents).decode()}").pixel_values, expected)
    frames = [sample([f"{name}.png"] * 3, "video", sample_fps=2).pixel_values_videos for name in ("clear", "white")]
    assert torch.equal(*frames)
    record = {"messages": dialogue("<image>", "Seven."), "image": {"bytes": contents, "path": "clear.png"}}
    table = datasets.Dataset.from_list([record])
    table.to_parquet(tmp_path / "train.parquet")
    table.save_to_disk(tmp_path / "saved")
    for path in (tmp_path / "train.parquet", tmp_path / "saved"):
        assert torch.equal(encoder(open_source(path)[0]).pixel_values, expected)


def sideways_png(where: str, how: bytes, folder: Path) -> Path:
    """Return a PNG with an orientation before or after its pixels."""
    exif = Image.Exif()
    exif[0x0112] = 6
    held = exif.tobytes()
    said = {
        b"eXIf": held.removeprefix(b"Exif\0\0"),
        b"tEXt": b"Raw profile type exif\0\nexif\n%8d\n%s\n" % (len(held), held.hex().encode()),
        b"zTXt": b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n%8d\n%s\n" % (len(held), held.hex().encode())),
        b"iTXt": b'XML:com.adobe.xmp\0\0\0\0\0<x tiff:Orientation="6"/>',
    }
    whole = picture(folder / "x.png", 30, 50).read_bytes()
    place = whole.index({"before": b"IDAT", "behind": b"IEND"}[where]) - 4
    (folder / "x.png").write_bytes(whole[:place] + chunk(how, said[how]) + whole[place:])
    return folder / "x.png"


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("how", [b"eXIf", b"tEXt", b"zTXt", b"iTXt"])
def test_load_image_applies_png_orientation_in_any_metadata_chunk(tmp_path, where, how):
    path = sideways_png(where, how, tmp_path)
    assert load_image(path, "here").size == (30, 50)
    assert image_size(path, "here") == (50, 30) == image_size(path.read_bytes(), "here")


def test_image_size_of_png_does_not_decode_pixels(tmp_path, monkeypatch):
    path = picture(tmp_path / "x.png", 300, 500)
    assert path.read_bytes().count(b"IDAT") > 1
    Image.open(path).save(tmp_path / "frames.png", save_all=True, append_images=[Image.new("RGB", (500, 300))])
    with monkeypatch.context() as patch:
        patch.setattr(PngImageFile, "load", lambda self: pytest.fail("decoded"))
        for file in (path, tmp_path / "frames.png"):
            assert image_size(file, "here") == (300, 500) == image_size(file.read_bytes(), "here")


def test_image_size_raises_if_png_is_truncated(tmp_path):
    whole = picture(tmp_path / "x.png", 40, 60).read_bytes()

    def read_whole(content: bytes) -> bool:
        try:
            Image.open(io.BytesIO(content)).load()
        except Exception:
            return False
        return True

    refused = 0
    for length in (*range(0, len(whole) - 40, 61), *range(len(whole) - 40, len(whole) + 1)):
        if read_whole(whole[:length]):
            assert image_size(whole[:length], "here") == (40, 60)
            continue
        refused += 1
        with pytest.raises(DataError, match=r"^here: an image or video of .* does not decode as an image"):
            image_size(whole[:length], "here")
    assert refused > 50


@pytest.mark.parametrize("chunks", [b"", chunk(b"blAb", b""), chunk(b"blAb", b"") * 2**17, b"\xff" * 90])
def test_image_size_of_png_with_unusual_chunks_matches_load_image(tmp_path, chunks):
    whole = picture(tmp_path / "x.png", 30, 50).read_bytes()
    place = whole.index(b"IEND") - 4
    content = whole[:place] + chunks + whole[place:]
    assert image_size(content, "here") == load_image(content, "here").size[::-1] == (30, 50)


def broken(kind: str, file: Path) -> None:
    if kind == "cut":
        file.write_bytes(picture(file, 64, 64).read_bytes()[:2000])
    elif kind == "16 bits":  # Pillow makes white of nearly all of them
        Image.fromarray(np.full((64, 64), 30_000, np.uint16)).save(file)
    elif kind == "large":
        picture(file, 64, 64)
    else:
        file.write_text(kind)


@pytest.mark.parametrize("method", ["size", "__call__"])
@pytest.mark.parametrize(("kind", "limit", "message"), [
    ("", None, "does not decode as an image"), ("no picture at all", None, "does not decode as an image"),
    ("cut", None, "x.png does not decode as an image: "),
    ("16 bits", None, "has pixels of the kind 'I.*', expected 8 bits per color"),
    # Pillow itself only warns of up to twice its limit.
    *(("large", n, f"x.png is too large: .* pixels.* expected at most {n:,} pixels") for n in (1000, 3000)),
])  # fmt: skip
def test_encoder_raises_if_image_is_undecodable_or_too_large(
    tmp_path, encoder, read, monkeypatch, kind, limit, message, method
):
    if limit is not None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        monkeypatch.setattr("qwen3vl_bridge.data.media.MOST_PIXELS", limit)
    broken(kind, tmp_path / "x.png")
    conversation = read(dialogue([{"type": "image", "image": "x.png"}], "Seven."))
    with pytest.raises(DataError, match=f"^train.jsonl:1: .*{message}"):
        getattr(encoder, method)(conversation)


PLAYLIST = (
    "#EXTM3U\n#EXT-X-VERSION:3\n#EXT-X-TARGETDURATION:1\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:0.4,\n{}\n#EXT-X-ENDLIST\n"
)
CONCAT = "ffconcat version 1.0\nfile 'other.ts'\n"
DASH = """<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"
mediaPresentationDuration="PT0.4S"><Period><AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1">
<BaseURL>{}</BaseURL></Representation></AdaptationSet></Period></MPD>"""
# FFmpeg listened on a port for this one, until it gave up.
SESSION = (
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9999 RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)


@pytest.fixture
def secret(tmp_path):
    for name in ("outside/secret.ts", "root/other.ts"):
        path = tmp_path / name
        path.parent.mkdir()
        clip(path, 4, size=(64, 64))
    return tmp_path / "outside/secret.ts"


def test_sample_frames_reads_mpeg_ts_video_file(secret, processor):
    assert videos.sample_frames(secret, processor.video_processor, "here").size == (64, 64)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("name", "text"), [
    ("a.m3u8", PLAYLIST), ("a.mp4", PLAYLIST), ("a.ffconcat", CONCAT), ("a.mkv", CONCAT), ("a.mpd", DASH),
    ("a.sdp", SESSION), ("a.mov", SESSION),
])  # fmt: skip
def test_sample_frames_raises_for_playlist_without_opening_its_files(secret, processor, name, text, as_bytes):
    path = secret.parents[1] / "root" / name
    path.write_text(text.format(secret))
    found = find_media(name, path.parent, "here")
    with pytest.raises(DataError, match=r"does not decode as a video: .*expected one of the kinds mov,") as caught:
        videos.sample_frames(path.read_bytes() if as_bytes else found, processor.video_processor, "here")
    # What FFmpeg says before it has opened anything: the kind is not allowed, or not known.
    assert type(caught.value.__cause__) in (av.error.ArgumentError, av.error.InvalidDataError)


@pytest.mark.parametrize("read", [image_size, load_image])
def test_load_image_raises_for_postscript_without_running_ghostscript(tmp_path, monkeypatch, read):
    """Pillow passes PostScript to Ghostscript, if that is installed; here it is a script that leaves a trace."""
    ghostscript, trace = tmp_path / "bin/gs", tmp_path / "trace"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {trace}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    Image.new("RGB", (32, 32)).save(tmp_path / "x.eps")
    picture = (tmp_path / "x.eps").rename(tmp_path / "x.png")
    with pytest.raises(DataError, match=r"here: .*x\.png is PostScript, a program that Ghostscript runs"):
        read(picture, "here")
    assert not trace.exists()
    with pytest.raises(OSError), Image.open(picture) as opened:  # as Pillow would have
        opened.load()
    assert trace.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_load_processor_does_not_run_remote_code(untied_folder, tmp_path, monkeypatch, file):
    folder = shutil.copytree(untied_folder, tmp_path / "model")
    there = read_object(folder / file) if (folder / file).exists() else {}
    named = {"AutoConfig": "evil.X", "AutoProcessor": "evil.X", "AutoTokenizer": ["evil.X", "evil.X"]}
    write_object(folder / file, there | {"auto_map": named, "tokenizer_class": "X", "processor_class": "X"})
    (folder / "evil.py").write_text("import sys\nsys.evil_was_run = True\nclass X: pass\n")
    monkeypatch.setattr("builtins.input", lambda *question: "y")
    try:
        load_processor(folder)
    except DataError as error:
        assert "found no processor" in str(error)
    assert not hasattr(sys, "evil_was_run")


def test_image_size_error_shows_first_of_undecodable_bytes():
    with pytest.raises(DataError, match=r"does not decode as an image: these bytes are no image \(b'no pictu'...\)"):
        image_size(b"no picture at all", "here")

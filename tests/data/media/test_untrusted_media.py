"""Files made to have FFmpeg, Pillow or transformers open or run something else than the file itself."""

from __future__ import annotations

import shutil
import sys

from qwen3vl_bridge.data import DataError, load_processor
from qwen3vl_bridge.data.media import videos
from qwen3vl_bridge.data.media.images import image_size, load_image
from qwen3vl_bridge.data.media.media_access import find
from qwen3vl_bridge.io.files import read_object, write_object

import av
import numpy as np
import pytest
from PIL import Image

PLAYLIST = """#EXTM3U
#EXT-X-VERSION:3
#EXT-X-TARGETDURATION:1
#EXT-X-MEDIA-SEQUENCE:0
#EXTINF:0.4,
{}
#EXT-X-ENDLIST
"""
CONCAT = "ffconcat version 1.0\nfile 'other.ts'\n"
DASH = """<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"
mediaPresentationDuration="PT0.4S"><Period><AdaptationSet mimeType="video/mp4"><Representation id="1" bandwidth="1">
<BaseURL>{}</BaseURL></Representation></AdaptationSet></Period></MPD>"""
# FFmpeg listened on a port for this one, until it gave up.
SESSION = """v=0
o=- 0 0 IN IP4 127.0.0.1
s=x
c=IN IP4 127.0.0.1
t=0 0
m=video 9999 RTP/AVP 96
a=rtpmap:96 H264/90000
"""


@pytest.fixture
def secret(tmp_path):
    """A video outside the media root, and one inside."""
    for name in ("outside/secret.ts", "root/other.ts"):
        path = tmp_path / name
        path.parent.mkdir()
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
            frames = [av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24") for _ in range(4)]
            container.mux([packet for frame in [*frames, None] for packet in stream.encode(frame)])
    return tmp_path / "outside/secret.ts"


def test_the_video_itself_is_read(secret, processor):
    assert videos.sample(secret, processor.video_processor, "here").size == (64, 64)


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize(("name", "text"), [
    ("a.m3u8", PLAYLIST), ("a.mp4", PLAYLIST), ("a.ffconcat", CONCAT), ("a.mkv", CONCAT), ("a.mpd", DASH),
    ("a.sdp", SESSION), ("a.mov", SESSION),
])  # fmt: skip
def test_a_video_opens_no_other_file_and_no_port(secret, processor, name, text, as_bytes):
    path = secret.parents[1] / "root" / name
    path.write_text(text.format(secret))
    found = find(name, path.parent, "here")
    with pytest.raises(DataError, match=r"does not decode as a video: .*expected one of the kinds mov,") as caught:
        videos.sample(path.read_bytes() if as_bytes else found, processor.video_processor, "here")
    # What FFmpeg says before it has opened anything: the kind is not allowed, or not known.
    assert type(caught.value.__cause__) in (av.error.ArgumentError, av.error.InvalidDataError)


@pytest.mark.parametrize("read", [image_size, load_image])
def test_postscript_is_run_by_nobody(tmp_path, monkeypatch, read):
    """Pillow gives it to Ghostscript, if that is installed: here, a script that leaves a trace."""
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
def test_code_that_a_model_brings_is_not_run_by_its_processor(untied_folder, tmp_path, monkeypatch, file):
    """Nor asked about, which a "y" on standard input would answer."""
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

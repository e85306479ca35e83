"""Images and videos: downloading, what was downloaded, decoding."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.data.media.images", name)

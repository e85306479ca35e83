"""Inspection of data as the model receives them: summary, text and HTML reports."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.data.inspection.summary", name)

"""Ranks: our collectives, and who encodes for whom where vision has ranks of its own."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.parallel.collectives", name)

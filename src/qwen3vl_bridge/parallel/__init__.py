"""Collectives, and the assignment of vision replicas to language replicas."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.parallel.collectives", name)

"""Sources of conversations: JSON, Parquet, tables, the hub; splits and fingerprints."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.data.sources.opening", name)

"""WebDatasets, read by energon: records, task encoder, streams, dataset provider."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.data.energon.task_encoder", name)

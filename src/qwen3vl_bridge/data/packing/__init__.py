"""Assignment of samples to rows: sizes, order, best fit, row plans, rows packed before training."""

from qwen3vl_bridge import moved


def __getattr__(name: str):
    return moved.load(__name__, "qwen3vl_bridge.data.packing.best_fit", name)

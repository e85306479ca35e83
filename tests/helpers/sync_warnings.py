"""Count host-device synchronizations on a GPU with `torch.cuda.set_sync_debug_mode`."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from tests.helpers.sync_counter import UPSTREAM, place_in_code

Syncs = Counter[tuple[str, str]]  # (package, line)


@contextlib.contextmanager
def count_syncs(syncs: Syncs) -> Iterator[None]:
    """Count the synchronizations in the block; without a GPU torch reports none."""

    def note(message: Warning | str, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            package, line, _ = place_in_code()
            syncs[package, line] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def own_syncs(syncs: Syncs) -> Syncs:
    """Return synchronizations outside of megatron-core and Megatron-Bridge, or without a known line."""
    return Counter({line: times for line, times in syncs.items() if line[0] not in UPSTREAM})

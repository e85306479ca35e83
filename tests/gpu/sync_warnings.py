"""Where the host waits for the device, as torch's own detector says (`torch.cuda.set_sync_debug_mode`)."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator

import torch

from tests.host_waits.counter import UPSTREAM, place_in_code

Waits = Counter[tuple[str, str]]  # (package, line)


@contextlib.contextmanager
def count_waits(waits: Waits) -> Iterator[None]:
    """Add the waits in the body; without a GPU torch reports none."""

    def note(message: Warning | str, *_: object) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            package, line, _ = place_in_code()
            waits[package, line] += 1

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


def of_us(waits: Waits) -> Waits:
    """All but megatron-core's and Megatron-Bridge's: what no line is known of too, such as a gradient made in C++."""
    return Counter({line: times for line, times in waits.items() if line[0] not in UPSTREAM})

"""Waits, and the line that each is of."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import qwen3vl_bridge

import torch

PACKAGES = {
    "ours": f"{Path(qwen3vl_bridge.__file__).parent}/",  # not any folder of this name, as clones have
    "megatron-core": "/megatron/core/",
    "Megatron-Bridge": "/megatron/bridge/",
    "transformers": "/transformers/",
}
UPSTREAM = ("megatron-core", "Megatron-Bridge")
_HERE = str(Path(__file__).parent / "counter.py")
_NO_FRAMES_OF_OURS = "/compat/cpu.py"  # which is not there on a GPU


class Wait(NamedTuple):
    """A place where the host waits.

    Attributes:
        package: one of `PACKAGES`, or "others".
        place: file:line in it.
        function: file:function, which stays the same while lines move.
        what: it waits for.
    """

    package: str
    place: str
    function: str
    what: str


class Seen(NamedTuple):
    """What was seen in a while.

    Attributes:
        found: how often each wait.
        mixed: operations of tensors on the GPU with tensors on the host, which a GPU would refuse.
    """

    found: dict[Wait, int]
    mixed: dict[Wait, int]

    def of(self, package: str) -> dict[str, int]:
        """What was found in a package: "file:line what" and how often."""
        return {f"{one.place} {one.what}": n for one, n in sorted(self.found.items()) if one.package == package}

    def of_us(self) -> dict[Wait, int]:
        """What was found neither in megatron-core nor in Megatron-Bridge: ours, and what our lines cause elsewhere.

        A wait is attributed to the innermost line, which is transformers' where we call a function of it.
        """
        return {wait: n for wait, n in self.found.items() if wait.package not in UPSTREAM}

    def total(self, package: str) -> int:
        """How many waits a package has."""
        return sum(self.of(package).values())


def place_in_code() -> tuple[str, str, str]:
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if found := _in_package(name, frame.f_lineno, frame.f_code.co_name):
            return found
        if frame.f_code.co_name == "_engine_run_backward":  # no line of a package below: C++ computes gradients
            break
        frame = frame.f_back
    else:
        return "others", "the caller", "the caller"
    node = torch._C._current_autograd_node()
    lines = (node.metadata.get("traceback_") or []) if node is not None else []
    for line in reversed(lines):
        name, _, rest = line.strip().removeprefix('File "').partition('", line ')
        number, _, function = rest.partition("\n")[0].partition(", in ")
        if found := _in_package(name, number, function):
            return found[0], f"{found[1]}, its gradient", f"{found[2]}, its gradient"
    return "others", "a gradient", "a gradient"


def in_a_gradient() -> bool:
    """Whether C++ computes a gradient, and makes a tensor where the others are."""
    if torch._C._current_autograd_node() is None:
        return False
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_HERE, torch.__path__[0])):
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _in_package(name: str, line: Any, function: str) -> tuple[str, str, str] | None:
    if name.endswith(_NO_FRAMES_OF_OURS):
        return None
    for package, folder in PACKAGES.items():
        if folder in name:
            file = name.rpartition(folder)[2]
            return package, f"{file}:{line}", f"{file}:{function}"
    return None

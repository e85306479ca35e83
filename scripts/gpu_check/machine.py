"""What the machine has: versions, the GPU, and kernels that are there or missing.

What lives here: looking. What may not: measuring.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform

from .results import Finding, Place

_NEEDED = ("torch", "torchvision", "numpy", "pandas", "pyarrow", "scipy", "transformers", "megatron.core")
_USED_WHERE_THERE = ("triton", "transformer_engine", "apex", "flash_attn", "fla", "causal_conv1d")


def look(place: Place) -> list[Finding]:
    """Versions of what is needed, which of the optional kernels are there, and the GPU."""
    found = [Finding("Python", platform.python_version())]
    for name in _NEEDED:
        try:
            module = importlib.import_module(name)
            found.append(Finding(name, str(getattr(module, "__version__", "there")), "can be imported", True))
        except ImportError as error:
            found.append(Finding(name, str(error), "can be imported", False))
    there = [name for name in _USED_WHERE_THERE if importlib.util.find_spec(name) is not None]
    found.append(Finding("optional kernels", ", ".join(there) or "none"))
    return found + _gpu(place)


def _gpu(place: Place) -> list[Finding]:
    import torch

    if place.device == "cpu":
        return [Finding("device", "CPU")]
    if not torch.cuda.is_available():
        return [Finding("CUDA", "torch sees no GPU", "a GPU", False)]
    properties = torch.cuda.get_device_properties(0)
    return [
        Finding("GPU", f"{properties.name}, {properties.total_memory / 2**30:.1f} GiB", "a GPU", True),
        Finding("CUDA, NCCL", f"{torch.version.cuda}, {torch.cuda.nccl.version()}"),
    ]

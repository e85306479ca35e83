"""Use expandable segments in torch's CUDA allocator, unless the user has set allocator options."""

import os
import sys

VARIABLE, SETTING = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
NEWER_VARIABLE = "PYTORCH_ALLOC_CONF"  # overrides VARIABLE


def is_configured() -> bool:
    """Return True if an environment variable sets options of torch's allocator."""
    return VARIABLE in os.environ or NEWER_VARIABLE in os.environ


def use_expandable_segments() -> None:
    """Set the environment variable for expandable segments, unless allocator options are set already.

    torch reads the variable when CUDA is initialized. Importing Megatron-Bridge imports modelopt, which initializes
    CUDA before a recipe's `env_vars` are set. If CUDA is initialized already, this function changes nothing.
    """
    torch = sys.modules.get("torch")  # not imported here: it takes a second
    is_too_late = torch is not None and torch.cuda.is_initialized()
    if not is_configured() and not is_too_late:
        os.environ[VARIABLE] = SETTING

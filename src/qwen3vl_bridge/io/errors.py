"""The one exception of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """Bad input: something about a checkpoint, a path or an option is invalid.

    Its message names the thing, what was found and what was expected; the command line prints only the message.
    """

"""The one exception of this package.

What lives here: `CheckpointError`. What may not: anything else; every module below may import this one.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """Bad input: something about a checkpoint, a path or an option is invalid.

    Its message names the thing, what was found and what was expected; the command line prints only the message.
    """

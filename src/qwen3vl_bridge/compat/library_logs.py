"""Hides log messages of other libraries that do not help users."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

_CHATTY = ("megatron", "torch.utils.cpp_extension")
# Megatron-Bridge sets the level of its loggers again when a run starts. The first logs a traceback for every optional
# import that fails, the others a line for every adapter, whose number we log.
_DISABLED = ("megatron.bridge.utils.import_utils", "megatron.bridge.peft.lora", "megatron.bridge.peft.dora")
# Logs every error that ends a run, with its traceback, before the command shows the error itself.
_FAILED_RUNS = "megatron.bridge.training.pretrain"
# Errors whose message says what to do, an exit that was asked for, and Ctrl-C; the command line reports them without a
# traceback.
_EXPECTED = (ValueError, AssertionError, OSError, SystemExit, KeyboardInterrupt)


def quiet() -> None:
    """Show all of our messages, but only errors of other libraries."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _DISABLED:
        logging.getLogger(name).disabled = True
    logging.getLogger(_FAILED_RUNS).addFilter(_is_unexpected)
    logging.getLogger("qwen3vl_bridge").setLevel(logging.INFO)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def without_prints() -> contextlib.AbstractContextManager:
    """Drop what is printed to standard output within: Megatron-Bridge's configuration of 250 lines and its progress.

    Ours goes to standard error, validation losses included.
    """
    return contextlib.redirect_stdout(_Nowhere())


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Log filter that drops messages about errors that the command line reports itself, and those about Megatron-Bridge
    failing to clean up after them a queue of asynchronous saves that it has never begun.
    """
    error = record.exc_info[1] if record.exc_info else None
    after = error.__context__ if isinstance(error, AttributeError) else None
    return not isinstance(error, _EXPECTED) and not isinstance(after, _EXPECTED)

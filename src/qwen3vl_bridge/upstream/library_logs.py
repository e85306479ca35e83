"""Hiding log messages of other libraries that do not help users.

Used: the names of their loggers and modules. Delete a name when its messages help, or are gone. Megatron-Bridge has no
setting to log less: it sets the levels of its loggers when a run starts.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings

from qwen3vl_bridge.upstream.worker_errors import lost_worker

_CHATTY = ("megatron", "torch.utils.cpp_extension")
# Patterns of the modules that cause warnings; of the compiler's warnings, a module is known by its file.
_WARNING = r"(.*[/.])?(megatron|modelopt|torch|transformers)\b|<frozen importlib"
# Megatron-Bridge sets the level of its loggers again when a run starts. The first logger writes a traceback for every
# optional import that fails, the others a line for every adapter. We log the number of adapters instead.
_DISABLED = ("megatron.bridge.utils.import_utils", "megatron.bridge.peft.lora", "megatron.bridge.peft.dora")
# Logs every error that ends a run, with its traceback, before the command shows the error itself.
_FAILED_RUNS = "megatron.bridge.training.pretrain"
# Errors whose message says what to do, an exit that was asked for, and Ctrl-C; the command line reports them without a
# traceback.
_EXPECTED = (ValueError, AssertionError, OSError, SystemExit, KeyboardInterrupt)


def quiet() -> None:
    """Show all messages of this package, but only errors of other libraries, in the whole process."""
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    quiet_libraries()
    logging.getLogger("qwen3vl_bridge").setLevel(logging.INFO)


def quiet_libraries() -> None:
    """Hide warnings of the libraries that a run uses. The logging of the user's script is not changed."""
    warnings.filterwarnings("ignore", module=_WARNING)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for name in _DISABLED:
        logging.getLogger(name).disabled = True
    logging.getLogger(_FAILED_RUNS).addFilter(_is_unexpected)
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def without_prints() -> contextlib.AbstractContextManager:
    """Discard standard output inside the `with` block: Megatron-Bridge's configuration (250 lines) and its progress.

    This package prints to standard error.
    """
    return contextlib.redirect_stdout(_Nowhere())


class _Nowhere(io.TextIOBase):
    def write(self, text: str, /) -> int:
        return len(text)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Return False for a log message about an error that the command line reports itself, so that it is dropped.

    After such an error Megatron-Bridge may fail to close a queue of asynchronous saves that it has never opened.
    For messages about this failure, return False as well.
    """
    error = record.exc_info[1] if record.exc_info else None
    after = error.__context__ if isinstance(error, AttributeError) else None
    expected = (isinstance(one, _EXPECTED) or (one and lost_worker(one)) for one in (error, after))
    return not any(expected)

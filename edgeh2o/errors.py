"""Errors that a user can cause. Each message names the cause and the cure.

The command line prints the message without a traceback and exits with ``exit_code``.
"""

from __future__ import annotations

import errno

# Exit code of a command that Ctrl-C ended, as shells have it: 128 + SIGINT.
EXIT_INTERRUPTED = 130


class EdgeH2OError(Exception):
    """Base of every error that edgeh2o raises on purpose."""

    exit_code = 1


class FormatError(EdgeH2OError, ValueError):
    """A model file, or its metadata, is malformed or of a kind that is not supported."""


class UsageError(EdgeH2OError, ValueError):
    """An option, a prompt or an environment variable has a value that cannot be used."""

    exit_code = 2


class ContextLengthError(UsageError):
    """A prompt of ``n_tokens``, perhaps more, is longer than the context of ``limit``."""

    def __init__(self, n_tokens: int, limit: int, message: str = "") -> None:
        default = f"the prompt has at least {n_tokens} tokens and the context holds {limit}"
        super().__init__(message or f"{default}; shorten it")
        self.n_tokens, self.limit = n_tokens, limit

    def __reduce__(self) -> tuple[type[ContextLengthError], tuple[int, int, str]]:
        """To pass from process to process: by default of what the message says."""
        return type(self), (self.n_tokens, self.limit, str(self))


class ResourceError(EdgeH2OError):
    """The machine lacks what the request needs: memory, context, a readable file."""


class BusyError(EdgeH2OError):
    """The model is being used by another thread, or by the caller of this one."""


# What dynamic loaders say where no addresses are left for a library, and Python and C++ where none
# are left for the stack of a thread.
_UNMAPPED = ("failed to map segment", "cannot allocate memory", "cannot map zero-fill pages")
_NO_THREAD = ("can't start new thread", "resource temporarily unavailable")


def is_shortage(error: BaseException | None) -> bool:
    """Whether an exception, or one that it came from, says that memory or addresses are short.

    MemoryError does; so do those of libraries that cannot be mapped and threads that cannot start.
    """
    for _ in range(100):  # chains may be circles
        if error is None:
            return False
        text = str(error).lower()
        if (
            isinstance(error, MemoryError)
            or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
            or (isinstance(error, (ImportError, OSError)) and any(p in text for p in _UNMAPPED))
            or (isinstance(error, RuntimeError) and any(part in text for part in _NO_THREAD))
        ):
            return True
        error = error.__cause__ or error.__context__
    return False

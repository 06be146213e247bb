"""What a backend fails at (no memory left, a kernel, a device that is gone), said in an error of ours.

Invariant: an error of ours passes through unchanged (some of them are also ``RuntimeError`` or ``OSError``), and what no
memory, kernel or device can bring about stays the exception it was, so that it is seen as the bug it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from personalpeft.errors import PersonalPeftError, ServingFailed, format_origin

log = logging.getLogger(__name__)

FAULTS = (MemoryError, OSError, RuntimeError)

# Of the host and of each kind of device; torch says both in a ``RuntimeError`` like any other.
_NO_MEMORY = ("out of memory", "allocate memory")
_LESS = "Close what else takes memory, or open the model with fewer rows or slots."


@contextmanager
def map_model_errors(message: str, *, hint: str = "", less: str = _LESS) -> Iterator[None]:
    """Turns what the model fails at inside into ``failure(...)``, and logs it without its text. Call nothing inside that is not ours."""
    try:
        yield
    except PersonalPeftError:
        raise
    except FAULTS as error:
        log.error("%s %s", message, format_origin(error))
        raise to_serving_error(message, error, hint=hint, less=less) from error


def to_serving_error(
    message: str, cause: Exception, *, hint: str = "", less: str = _LESS
) -> PersonalPeftError:
    """The error that ``message`` says, a sentence, with its cause; a cause of ours is said itself. ``less`` is the hint where no
    memory was left.
    """
    if isinstance(cause, PersonalPeftError):
        return cause
    if no_memory := _is_no_memory(cause):
        message = f"{message.removesuffix('.')}: no memory was left."
    error = ServingFailed(
        message, hint=less if no_memory else hint or "Try again; the log has the details."
    )
    error.__cause__ = cause
    return error


def _is_no_memory(cause: Exception) -> bool:
    said = str(cause).casefold()
    return isinstance(cause, MemoryError) or any(words in said for words in _NO_MEMORY)

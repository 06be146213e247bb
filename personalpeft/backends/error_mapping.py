"""Map a model's failures (memory, a kernel, a lost device) to one error of this library.

Invariant: errors of this library pass unchanged, although some are ``RuntimeError`` or ``OSError``.
All other errors keep their type, so that they are seen as bugs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from personalpeft.errors import PersonalPeftError, ServingFailed, format_origin

log = logging.getLogger(__name__)

FAULTS = (MemoryError, OSError, RuntimeError)

# Torch reports missing memory, of the host or a device, as a plain ``RuntimeError``.
_NO_MEMORY = ("out of memory", "allocate memory")
_MEMORY_HINT = "Close other programs, or open the model with fewer rows or slots."


@contextmanager
def map_model_errors(
    message: str, *, hint: str = "", memory_hint: str = _MEMORY_HINT
) -> Iterator[None]:
    """Log what the model raises, without its text, and raise ``to_serving_error`` of it.

    Only model code may run inside.

    Args:
        message: What failed, a sentence.
        hint: What to do.
        memory_hint: What to do if there was not enough memory.

    Raises:
        ServingFailed: The model raised one of ``FAULTS``.
    """
    try:
        yield
    except PersonalPeftError:
        raise
    except FAULTS as error:
        log.error("%s %s", message, format_origin(error))
        raise to_serving_error(message, error, hint=hint, memory_hint=memory_hint) from error


def to_serving_error(
    message: str, cause: Exception, *, hint: str = "", memory_hint: str = _MEMORY_HINT
) -> PersonalPeftError:
    """Return the error for a failure of the model.

    Args:
        message: What failed, a sentence.
        cause: The exception. An error of this library is returned as it is.
        hint: What to do.
        memory_hint: What to do if there was not enough memory.
    """
    if isinstance(cause, PersonalPeftError):
        return cause
    hint = hint or "Try again; the log has the details."
    text = str(cause).casefold()
    out_of_memory = isinstance(cause, MemoryError) or any(words in text for words in _NO_MEMORY)
    if out_of_memory:
        message, hint = f"{message.removesuffix('.')}: no memory was left.", memory_hint
    error = ServingFailed(message, hint=hint, out_of_memory=out_of_memory)
    error.__cause__ = cause
    return error

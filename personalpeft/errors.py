"""Every error that a user can cause, and the table from error to exit code and HTTP status.

Each leaf is a ``PersonalPeftError`` and also the builtin that a caller would expect. So both
``except PersonalPeftError`` and ``except LookupError`` work. The message says what is wrong,
``hint`` what to do. Invariant: an operation that raises one has changed nothing.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from traceback import walk_tb
from typing import NamedTuple


class PersonalPeftError(Exception):
    """The base class of all errors of this package. ``hint`` is one sentence on what to do."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InvalidInput(PersonalPeftError, ValueError):
    """A value is not allowed: an empty prompt, a rating of 3, a card of the wrong type."""


class InvalidId(InvalidInput):
    """A user or layer id does not follow the grammar."""


class PromptTooLong(InvalidInput):
    """The prompt and the requested reply exceed the base's context by ``excess`` tokens."""

    def __init__(self, message: str, *, hint: str = "", excess: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.excess = excess


class CardError(InvalidInput):
    """A model card has a mistake; the message names file, line and key."""


class AdapterError(InvalidInput):
    """An adapter file is damaged, hostile or for another base; the message names file and fault."""


class PersonalFileError(InvalidInput):
    """A ``.personal`` file, a learn bundle or its result is damaged, hostile or too new.

    Nothing was imported.
    """


class NotFound(PersonalPeftError, LookupError):
    """A user, turn, signal, layer, revision or base does not exist; the hint names the nearest."""


class Forgotten(NotFound):
    """The item with this id was erased; the message has the date.

    Also raised for a reply that began before its user erased something: it is not kept.
    """


class NothingCause(StrEnum):
    """Why there is nothing to learn."""

    NO_FEEDBACK = "no_feedback"
    NOT_FOR_LAYER = "not_for_layer"
    """There are signals, and none is for this layer."""
    NOTHING_NEW = "nothing_new"
    ALL_HELD_OUT = "all_held_out"
    NO_CAPACITY = "no_capacity"
    TOO_LONG = "too_long"
    """The new signals do not fit the base's context, or change a reply only behind the cut."""
    NOT_LIVE = "not_live"
    """The current lessons were built, and that was refused, withdrawn or rolled back."""


class NothingToLearn(PersonalPeftError, LookupError):
    """No signal is new since the last ``learn``. ``cause`` is the reason.

    ``signals`` are the ids of those that are too long, or for which the layer has no capacity.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        cause: NothingCause = NothingCause.NOTHING_NEW,
        signals: Collection[str] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.cause = cause
        self.signals = tuple(sorted(signals))


class BaseMismatch(PersonalPeftError, ValueError):
    """A revision was built on another base than the open one."""


class BuildMismatch(PersonalPeftError, ValueError):
    """A learn bundle is for another build format, recipe or retrieval model than this machine's."""


class LedgerMoved(PersonalPeftError, RuntimeError):
    """A learn's result does not fit: a head moved, or something was forgotten or retracted.

    The result is to be dropped. Also raised for a result that was recorded before.
    """


class Busy(PersonalPeftError, TimeoutError):
    """Another process or thread holds a lock that this needs; the message names it.

    ``retry_after`` is after how many seconds to try again, if that is known.
    """

    def __init__(self, message: str, *, hint: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class QueueFull(Busy):
    """Too many requests wait: of all users together, or of this one. ``limit`` may, if known."""

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        retry_after: float | None = None,
        limit: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint, retry_after=retry_after)
        self.limit = limit


class DeadlineExceeded(PersonalPeftError, TimeoutError):
    """A reply was not complete in time. If it had begun, its text is kept as a cancelled turn."""


class ServingFailed(PersonalPeftError, RuntimeError):
    """The model failed during a reply or a learn (a bug, no memory left), or was closed.

    ``out_of_memory`` is set where no memory was left.
    """

    def __init__(self, message: str, *, hint: str = "", out_of_memory: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.out_of_memory = out_of_memory


class Cancelled(PersonalPeftError, InterruptedError):
    """The caller cancelled. Finished work is kept and can be resumed."""


class HomeError(PersonalPeftError, OSError):
    """The home folder cannot be used: read-only, full, not a home, or from a newer version."""


class Damaged(PersonalPeftError, OSError):
    """Something in the home does not match its digest."""


class WeightsError(PersonalPeftError, OSError):
    """The base's weights are missing or do not match its card."""


class MissingPackage(PersonalPeftError, ImportError):
    """An optional package is needed and not installed."""


class PluginError(PersonalPeftError, RuntimeError):
    """A plugin failed or broke its contract; the message names the plugin and the call."""


class ErrorCodes(NamedTuple):
    """The exit code and the HTTP status of an error."""

    exit_code: int
    http_status: int


ERROR_CODES: dict[type[PersonalPeftError], ErrorCodes] = {
    PersonalPeftError: ErrorCodes(1, 500),
    InvalidInput: ErrorCodes(2, 400),
    InvalidId: ErrorCodes(2, 400),
    PromptTooLong: ErrorCodes(2, 400),
    CardError: ErrorCodes(2, 400),
    AdapterError: ErrorCodes(2, 422),
    PersonalFileError: ErrorCodes(2, 422),
    NotFound: ErrorCodes(3, 404),
    Forgotten: ErrorCodes(3, 410),
    NothingToLearn: ErrorCodes(4, 409),
    BaseMismatch: ErrorCodes(5, 409),
    BuildMismatch: ErrorCodes(15, 409),
    LedgerMoved: ErrorCodes(14, 409),
    Busy: ErrorCodes(6, 423),
    QueueFull: ErrorCodes(6, 429),
    HomeError: ErrorCodes(7, 507),
    Damaged: ErrorCodes(8, 500),
    WeightsError: ErrorCodes(9, 503),
    MissingPackage: ErrorCodes(10, 501),
    DeadlineExceeded: ErrorCodes(11, 504),
    ServingFailed: ErrorCodes(12, 503),
    PluginError: ErrorCodes(13, 502),
    Cancelled: ErrorCodes(130, 499),
}


def get_error_type(error: PersonalPeftError) -> type[PersonalPeftError]:
    """Return the public class of an error: its own or its nearest base class with codes."""
    return next(each for each in type(error).__mro__ if each in ERROR_CODES)


def get_error_codes(error: PersonalPeftError) -> ErrorCodes:
    """Return the exit code and HTTP status of an error."""
    return ERROR_CODES[get_error_type(error)]


def format_origin(error: BaseException) -> str:
    """Return what a log may hold of an error: its id, its type and its causes', and their lines.

    Messages are left out, since they may hold private text. Equal lines give an equal id.
    """
    return f"[{error_id(error)}] {_format_lines(error)}"


def error_id(error: BaseException) -> str:
    """Return the id in ``format_origin``, so that a response can point to the log."""
    return hashlib.sha256(_format_lines(error).encode()).hexdigest()[:8]


def _format_lines(error: BaseException) -> str:
    parts: list[str] = []
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        passed = ((frame.f_code, line) for frame, line in walk_tb(cause.__traceback__))
        lines = [f"\n  {code.co_filename}:{line} in {code.co_qualname}" for code, line in passed]
        parts.append(f"{type(cause).__name__}, raised at{''.join(lines)}")
        context = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ or context
    return "\ncaused by ".join(parts)


@contextmanager
def map_write_errors(path: Path, *, hint: str = "Choose another place.") -> Iterator[None]:
    """Raise ``InvalidInput`` for an ``OSError`` inside, of a path that a user chose."""
    try:
        yield
    except PersonalPeftError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written: {error.strerror or error}.", hint=hint
        ) from error


def suggest_nearest(
    wanted: str, known: Iterable[str], *, what: str, newest_first: bool = False
) -> str:
    """Return a hint with the known name that is closest to a wrong one, or with some of them.

    Args:
        wanted: The wrong name.
        known: The names that exist.
        what: What they name, as in "user".
        newest_first: Whether they are ids, which sort by time.
    """
    names = list(known)
    begun = sorted((name for name in names if wanted and name.startswith(wanted)), key=len)
    close = begun or difflib.get_close_matches(wanted, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if not names:
        return f"There is no {what} yet."
    shown = ", ".join(sorted(names, reverse=newest_first)[:5])
    return f"Known: {shown}{', …' if len(names) > 5 else ''}."

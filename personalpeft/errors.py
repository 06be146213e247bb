"""Every error that a user can cause, in one place, with one table from error to exit code and HTTP status.

Each leaf is a ``PersonalPeftError`` and also the builtin that a caller would expect, so both ``except
PersonalPeftError`` and ``except LookupError`` work. The message says what is wrong; ``hint`` says what to do about it.
Raising one has changed nothing.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable
from traceback import walk_tb
from typing import NamedTuple


class PersonalPeftError(Exception):
    """The base class of all errors of this package. ``hint`` is a way out, in one sentence."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


class InvalidInput(PersonalPeftError, ValueError):
    """A value outside what is allowed: an empty prompt, a rating of 3, a card of the wrong type."""


class InvalidId(InvalidInput):
    """A user or layer id that the grammar does not allow."""


class PromptTooLong(InvalidInput):
    """The prompt and the reply asked for do not fit into the base's context."""


class CardError(InvalidInput):
    """A base's card has a mistake; the message names file, line and key."""


class AdapterError(InvalidInput):
    """An adapter file that is damaged, hostile or not for this base; the message names the file and the fault."""


class PersonalFileError(InvalidInput):
    """A ``.personal`` file that is damaged, hostile or too new; nothing of it was taken in."""


class NotFound(PersonalPeftError, LookupError):
    """No user, turn, signal, layer, revision or base of that name; the hint names the nearest."""


class Forgotten(NotFound):
    """What bears this id was forgotten at its user's wish; the message says when. Also a reply that was begun before its user forgot
    something, and ended after it: it is not kept.
    """


class NothingToLearn(PersonalPeftError, LookupError):
    """``learn`` was called and no signal has come since the last time."""


class BaseMismatch(PersonalPeftError, ValueError):
    """A revision was built on another base than the one that is open."""


class Busy(PersonalPeftError, TimeoutError):
    """Somebody else holds what this needs (the writer's lock, a learn). The message says which; ``retry_after`` is in how
    many seconds it is worth trying again, where that can be known.
    """

    def __init__(self, message: str, *, hint: str = "", retry_after: float | None = None) -> None:
        super().__init__(message, hint=hint)
        self.retry_after = retry_after


class QueueFull(Busy):
    """More wait for a reply than may: all users' together, or one user's share."""


class DeadlineExceeded(PersonalPeftError, TimeoutError):
    """The reply was not complete in the time that it was given. What came until then is kept as a cancelled turn."""


class ServingFailed(PersonalPeftError, RuntimeError):
    """The model could not go on with a reply or a learn (a bug, no memory left), or has been closed."""


class Cancelled(PersonalPeftError, InterruptedError):
    """The caller asked to stop. What was done until then is kept and can be resumed."""


class HomeError(PersonalPeftError, OSError):
    """The home folder cannot be used: read-only, full, not ours, or from a newer version."""


class Damaged(PersonalPeftError, OSError):
    """Something in the home is not what its digest says."""


class WeightsError(PersonalPeftError, OSError):
    """The base's weights are missing or are not the ones that the card names."""


class MissingPackage(PersonalPeftError, ImportError):
    """An optional package is needed for this and not installed."""


class PluginError(PersonalPeftError, RuntimeError):
    """A plugin failed or broke its word. The message says which one, and at what."""


class Outcome(NamedTuple):
    """What an error becomes outside Python."""

    exit_code: int
    http_status: int


OUTCOMES: dict[type[PersonalPeftError], Outcome] = {
    PersonalPeftError: Outcome(1, 500),
    InvalidInput: Outcome(2, 400),
    InvalidId: Outcome(2, 400),
    PromptTooLong: Outcome(2, 400),
    CardError: Outcome(2, 400),
    AdapterError: Outcome(2, 422),
    PersonalFileError: Outcome(2, 422),
    NotFound: Outcome(3, 404),
    Forgotten: Outcome(3, 410),
    NothingToLearn: Outcome(4, 409),
    BaseMismatch: Outcome(5, 409),
    Busy: Outcome(6, 423),
    QueueFull: Outcome(6, 429),
    HomeError: Outcome(7, 507),
    Damaged: Outcome(8, 500),
    WeightsError: Outcome(9, 503),
    MissingPackage: Outcome(10, 501),
    DeadlineExceeded: Outcome(11, 504),
    ServingFailed: Outcome(12, 503),
    PluginError: Outcome(13, 502),
    Cancelled: Outcome(130, 499),
}


def kind_of(error: PersonalPeftError) -> type[PersonalPeftError]:
    """The class that callers know an error by: its own, or the nearest above it that has an outcome. What a backend tells apart
    among its own errors is its own affair.
    """
    return next(each for each in type(error).__mro__ if each in OUTCOMES)


def outcome(error: PersonalPeftError) -> Outcome:
    """Exit code and HTTP status of an error: those of its kind."""
    return OUTCOMES[kind_of(error)]


def where_raised(error: BaseException) -> str:
    """Return what a log may say of an error: an id, its kind and its causes', and the lines that they passed.

    Their texts are left out, since they may hold private words. The id is the same whenever the same lines are passed.
    """
    return f"[{error_id(error)}] {_lines_of(error)}"


def error_id(error: BaseException) -> str:
    """Return the id by which ``where_raised`` names an error, so that an answer can point to the log."""
    return hashlib.sha256(_lines_of(error).encode()).hexdigest()[:8]


def _lines_of(error: BaseException) -> str:
    parts: list[str] = []
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen:
        seen.append(following)
        passed = ((frame.f_code, line) for frame, line in walk_tb(following.__traceback__))
        lines = [f"\n  {code.co_filename}:{line} in {code.co_qualname}" for code, line in passed]
        parts.append(f"{type(following).__name__}, raised at{''.join(lines)}")
        hidden = None if following.__suppress_context__ else following.__context__
        following = following.__cause__ or hidden
    return "\ncaused by ".join(parts)


def nearest(wanted: str, known: Iterable[str], *, what: str) -> str:
    """A hint that names the known thing closest to what was asked for."""
    names = list(known)
    begun = sorted((name for name in names if wanted and name.startswith(wanted)), key=len)
    close = begun or difflib.get_close_matches(wanted, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    if not names:
        return f"There is no {what} yet."
    shown = ", ".join(sorted(names)[:5])
    return f"Known: {shown}{', …' if len(names) > 5 else ''}."

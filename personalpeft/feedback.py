"""What a person says, or an app sees, checked and kept as a signal, and how it is taken back; each function as the ``User``
method of its name.

Invariant: a signal is durable when its id is returned; what else comes of it is looked at afterwards, and cannot fail it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from personalpeft.chat.reply import Reply, turn_of
from personalpeft.chat.validation import check_written
from personalpeft.errors import InvalidInput, NotFound, PersonalPeftError
from personalpeft.ids import check_skill, check_source
from personalpeft.learning.data.assignment import IMPLICIT_RATINGS, TRAINABLE_KEY
from personalpeft.learning.gate.probation import review_probation_locked
from personalpeft.memory.items import about_fact, check_text
from personalpeft.services import Services
from personalpeft.store.base import Ledger
from personalpeft.types import APP, Signal, SignalKind, Turn


def feedback(
    services: Services, user: str, reply: Reply | Turn | str, source: str, **said: Any
) -> str:
    """``said`` are the kinds of feedback by name, None for those that were not given."""
    given = [(what, value) for what, value in said.items() if value is not None]
    if len(given) != 1:
        raise InvalidInput(
            "Feedback says exactly one thing." if given else "There is no feedback in this.",
            hint="Give one of rating, edit, prefer, comment or reward; call again for another.",
        )
    check_source(source)
    turn = turn_of(services.store, user, reply)
    kind, payload = _signal_of(turn, *given[0])
    signal = _said(services, turn, kind, payload, source)
    look(services, user)
    return signal


def observe(services: Services, user: str, reply: Reply | Turn | str, seen: str) -> str | None:
    if not isinstance(seen, str) or seen not in IMPLICIT_RATINGS:
        raise InvalidInput(
            f"{seen!a} is nothing to observe.", hint=f"Give one of {', '.join(IMPLICIT_RATINGS)}."
        )
    turn = turn_of(services.store, user, reply)
    if services.observing == "off":
        return None
    payload = {
        "value": IMPLICIT_RATINGS[seen],
        "how": seen,
        **({TRAINABLE_KEY: True} if services.observing == "learned" else {}),
    }
    return _said(services, turn, SignalKind.RATING, payload, APP)


def teach(
    services: Services, user: str, prompt: str, answer: str, skill: str | None, source: str
) -> str:
    if skill is not None:
        check_skill(skill)
    check_source(source)
    payload = {
        "prompt": check_written(prompt, what="prompt"),
        "answer": check_written(answer, what="answer"),
        "skill": skill,
    }
    return services.store.ledger.add_signal(
        user, SignalKind.DEMONSTRATION, payload, source=source
    ).id


def remember(
    services: Services,
    user: str,
    text: str,
    questions: Sequence[str],
    answer: str | None,
    source: str,
) -> str:
    check_source(source)
    payload: dict[str, Any] = {
        "text": check_text(text, what="fact"),
        **about_fact(questions, answer),
    }
    return services.store.ledger.add_signal(user, SignalKind.FACT, payload, source=source).id


def retract(services: Services, user: str, named: Sequence[str]) -> tuple[Signal, ...]:
    if not named:
        raise InvalidInput("Nothing is named to take back.", hint="Give the id of a signal.")
    ledger = services.store.ledger
    signals = {signal.id: signal for signal in (ledger.signal(user, each) for each in named)}
    counting = {signal.id for signal in ledger.signals(user)}
    for signal in signals:
        if signal not in counting:
            raise _off_already(ledger, user, signal, counting)
    ledger.retract(user, *signals)
    look(services, user)
    return tuple(signals.values())


def look(services: Services, user: str) -> None:
    """Whether what was just said ends a probation. What was said is durable already, so nothing of this may fail it:
    whoever learns next looks too.
    """
    with suppress(PersonalPeftError):
        review_probation_locked(services.store, user, services.clock.now)


def _said(
    services: Services, turn: Turn, kind: SignalKind, payload: dict[str, Any], source: str
) -> str:
    """What repeats the last word of a source on a turn is that signal: a thumb that is pressed twice, and a request that is sent
    again, are one act.
    """
    said = [
        each
        for each in services.store.ledger.signals(turn.user, turn=turn.id)
        if each.source == source
    ]
    if said and (said[-1].kind, said[-1].payload) == (kind, payload):
        return said[-1].id
    return services.store.ledger.add_signal(
        turn.user, kind, payload, turn=turn.id, source=source
    ).id


def _off_already(ledger: Ledger, user: str, signal: str, counting: Collection[str]) -> NotFound:
    """Why a signal counts no more, for who wants to take it back: a later one stands there, or it was taken back."""
    heirs = {
        each.supersedes: each.id for each in ledger.signals(user, current=False) if each.supersedes
    }
    newest = signal
    while newest in heirs:
        newest = heirs[newest]
    again = "say it again if it is to count after all."
    if newest == signal:
        return NotFound(f"{signal} was taken back already.", hint=again.capitalize())
    return NotFound(
        f"{signal} counts no more: {newest} came in its place.",
        hint=f"Take {newest} back instead."
        if newest in counting
        else f"That was taken back as well; {again}",
    )


def _signal_of(turn: Turn, what: str, value: Any) -> tuple[SignalKind, dict[str, Any]]:
    match what:
        case "rating":
            if value not in (-1, 1) or isinstance(value, bool):
                raise InvalidInput(
                    f"A rating of {value!r} is neither 1 nor -1.",
                    hint="1 is a thumb up, -1 a thumb down.",
                )
            return SignalKind.RATING, {"value": int(value)}
        case "reward":
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not -1 <= value <= 1
            ):
                raise InvalidInput(
                    f"A reward of {value!r} is not a number from -1 to 1.", hint="0 says nothing."
                )
            return SignalKind.REWARD, {"value": float(value)}
        case "comment":
            return SignalKind.COMMENT, {"text": check_text(value, what="comment")}
    text = check_written(value, what="edit" if what == "edit" else "preferred text")
    if text.strip() == turn.reply.strip():
        raise InvalidInput(
            "That is the reply as it is.",
            hint="Change something in it, or rate it 1 if it is good.",
        )
    return (SignalKind.EDIT if what == "edit" else SignalKind.PREFERENCE), {"text": text}

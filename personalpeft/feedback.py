"""Record feedback as signals, and retract it.

Invariant: a signal is durable when its id is returned. What follows from it, such as the end of a
probation, happens afterwards and cannot fail it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

from personalpeft.arguments import (
    check_choice,
    check_flags,
    check_list,
    check_number,
    check_types,
)
from personalpeft.chat.implicit_feedback import IMPLICIT_RATINGS
from personalpeft.chat.reply import Reply, resolve_turn
from personalpeft.chat.validation import check_prompt, check_text
from personalpeft.errors import InvalidInput, NotFound, PersonalPeftError
from personalpeft.ids import LAST, check_skill_name, check_source
from personalpeft.learning.gate.probation import review_probation_with_lease
from personalpeft.memory.conflicts import superseded_facts
from personalpeft.memory.items import check_fact_questions, check_item_text
from personalpeft.services import Services
from personalpeft.store.ledger import Ledger
from personalpeft.types import (
    APP_SOURCE,
    TRAINS,
    Demonstration,
    Json,
    Signal,
    SignalKind,
    Turn,
    is_number,
)


def feedback(
    services: Services,
    user: str,
    reply: Reply | Turn | str,
    source: str,
    train: bool | None,
    **values: Any,
) -> str:
    """Implement ``User.feedback``, which documents the arguments.

    ``values`` holds each kind of feedback, None where it is not given.
    """
    given = [(name, value) for name, value in values.items() if value is not None]
    if len(given) != 1:
        raise InvalidInput(
            f"Exactly one kind of feedback is needed, got {len(given)}.",
            hint="Give one of rating, edit, prefer, comment or reward; call again for another.",
        )
    check_source(source)
    turn = resolve_turn(services.store, user, reply)
    kind, payload = _parse(turn, *given[0])
    payload |= training_payload(services, user, train)
    signal = append_once(services, turn, kind, payload, source)
    review_probation(services, user)
    return signal


def record_implicit_feedback(
    services: Services, user: str, reply: Reply | Turn | str, event: str, train: bool | None
) -> str | None:
    """Implement ``User.record_implicit_feedback``, which documents the arguments."""
    check_choice("event", event, IMPLICIT_RATINGS)
    forbids = training_payload(services, user, train)
    turn = resolve_turn(services.store, user, reply)
    if services.implicit_feedback == "off":
        return None
    payload: dict[str, Any] = {"value": IMPLICIT_RATINGS[event], "how": event}
    if services.implicit_feedback == "learned":
        payload |= {TRAINS: True, **forbids}
    return append_once(services, turn, SignalKind.RATING, payload, APP_SOURCE)


def teach_many(
    services: Services,
    user: str,
    demonstrations: Iterable[Demonstration],
    skill: str | None,
    source: str,
    train: bool | None,
) -> tuple[str, ...]:
    """Implement ``User.teach_many``, which documents the arguments."""
    if skill is not None:
        check_skill_name(skill)
    check_source(source)
    check_list("demonstrations", demonstrations)
    common = {"skill": skill, **training_payload(services, user, train)}
    payloads = [{**_parse_demonstration(each), **common} for each in demonstrations]
    return services.store.ledger.add_signals(
        user, SignalKind.DEMONSTRATION, payloads, source=source
    )


def _parse_demonstration(each: Demonstration) -> dict[str, Any]:
    """Return what the payload of a demonstration says of its texts and group."""
    check_types("User.teach_many", demonstration=(each, Demonstration))
    *before, last = check_prompt(each.prompt)
    if last.role != "user":
        raise InvalidInput(
            "A demonstration must answer a message of the user, not of a tool.",
            hint="End the prompt with a message of the user.",
        )
    payload: dict[str, Any] = {
        "prompt": last.content,
        "answer": check_text(each.answer, what="answer"),
    }
    if before:
        payload["before"] = [message.to_list() for message in before]
    if each.group is not None:
        payload["group"] = check_text(each.group, what="group")
    return payload


def remember(
    services: Services,
    user: str,
    text: str,
    questions: Sequence[str],
    answer: str | None,
    source: str,
    train: bool | None,
) -> str:
    """Implement ``User.remember``, which documents the arguments."""
    check_source(source)
    payload = {
        "text": check_item_text(text, what="fact"),
        **check_fact_questions(questions, answer),
        **training_payload(services, user, train),
    }
    ledger = services.store.ledger
    # One transaction, so that of two requests at once the second finds the fact of the first.
    with services.store.database.write_transaction():
        older = _find_repeated_fact(ledger, user, payload, source)
        if older is not None and older.payload == payload and _still_holds(ledger, older):
            return older.id
        supersedes = older.id if older is not None else None
        fact = ledger.add_signal(
            user, SignalKind.FACT, payload, source=source, supersedes=supersedes
        )
    return fact.id


def _find_repeated_fact(ledger: Ledger, user: str, payload: Json, source: str) -> Signal | None:
    """Return the newest fact of the source that a new one repeats, or None.

    The new one has its text, and at least its questions and answer.
    """
    for fact in reversed(ledger.facts_with_text(user, payload["text"])):
        has_questions = set(fact.payload.get("questions") or ()) <= set(payload["questions"])
        has_answer = fact.payload.get("answer") in (None, payload["answer"])
        if fact.source == source and has_questions and has_answer:
            return fact
    return None


def _still_holds(ledger: Ledger, fact: Signal) -> bool:
    """Return whether no later fact may have replaced a fact. Then repeating it says nothing new."""
    facts = ledger.signals(fact.user, kinds=(SignalKind.FACT,))
    if fact.id == facts[-1].id:
        return True
    # A later fact without questions may be another value, which nothing else tells.
    return bool(fact.payload.get("answer")) and fact.id not in superseded_facts(facts)


def retract(
    services: Services, user: str, ids: Sequence[str], *, training_only: bool
) -> tuple[Signal, ...]:
    """Implement ``User.retract``, which documents the arguments."""
    check_flags(training_only=training_only)
    if not ids:
        raise InvalidInput("No signal was named.", hint="Give the id of a signal.")
    ledger = services.store.ledger
    current = [signal.id for signal in ledger.signals(user)]
    ids = [current[-1] if each == LAST and current else each for each in ids]
    signals = {signal.id: signal for signal in (ledger.signal(user, each) for each in ids)}
    for signal in signals.values():
        if signal.id not in current:
            raise _not_current(ledger, user, signal.id, current)
        if training_only and signal.forbids_training:
            raise NotFound(
                f"{signal.id} is not trained on already.",
                hint="To disable it altogether, retract it as a whole.",
            )
    ledger.retract(user, *signals, training_only=training_only)
    review_probation(services, user)
    return tuple(ledger.signal(user, signal) for signal in signals)


def training_payload(services: Services, user: str, train: bool | None) -> dict[str, Any]:
    """Return what the payload of a new signal says about training: nothing where it is allowed.

    ``train`` is what the caller says of this signal; None is the setting of runtime and user.
    Raises ``InvalidInput``.
    """
    if train is None:
        train = services.allows_training(user)
    check_types("User.feedback", train=(train, bool))
    return {} if train else {TRAINS: False}


def append_once(
    services: Services, turn: Turn, kind: SignalKind, payload: dict[str, Any], source: str
) -> str:
    """Append a signal unless it repeats the source's latest one on the turn. Return its id.

    So a thumb pressed twice, or a request sent again, is one act, also at the same moment.
    """
    ledger = services.store.ledger
    with services.store.database.write_transaction():
        known = [each for each in ledger.signals(turn.user, turn=turn.id) if each.source == source]
        if known and (known[-1].kind, known[-1].payload) == (kind, payload):
            return known[-1].id
        return ledger.add_signal(turn.user, kind, payload, turn=turn.id, source=source).id


def review_probation(services: Services, user: str) -> None:
    """End probations that a new signal decides. Errors are ignored: a learn reviews too."""
    with suppress(PersonalPeftError):
        review_probation_with_lease(services, user)


def _not_current(ledger: Ledger, user: str, signal: str, current: Collection[str]) -> NotFound:
    """Return the error for retracting a signal that was retracted or superseded."""
    successors = {
        each.supersedes: each.id for each in ledger.signals(user, current=False) if each.supersedes
    }
    newest = signal
    while newest in successors:
        newest = successors[newest]
    if newest in current:
        return NotFound(f"{signal} was superseded by {newest}.", hint=f"Retract {newest} instead.")
    return NotFound(
        f"{signal} does not count: {newest} is retracted.",
        hint="Give it again to restore what was retracted.",
    )


def _parse(turn: Turn, name: str, value: Any) -> tuple[SignalKind, dict[str, Any]]:
    """Return the kind and payload of one feedback argument."""
    match name:
        case "rating":
            if not is_number(value) or value not in (-1, 1):
                raise InvalidInput(
                    f"rating must be 1 or -1, got {value!r}.",
                    hint="1 is a thumb up, -1 a thumb down.",
                )
            return SignalKind.RATING, {"value": int(value)}
        case "reward":
            check_number("reward", value, -1, 1)
            return SignalKind.REWARD, {"value": float(value)}
        case "comment":
            return SignalKind.COMMENT, {"text": check_item_text(value, what="comment")}
    text = check_text(value, what="edit" if name == "edit" else "preferred text")
    if text.strip() == turn.reply.strip():
        raise InvalidInput(
            "The text is the same as the reply.",
            hint="Change it, or rate the reply 1. An earlier edit of it must be retracted first.",
        )
    return (SignalKind.EDIT if name == "edit" else SignalKind.PREFERENCE), {"text": text}

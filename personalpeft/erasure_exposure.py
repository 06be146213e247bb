"""Measure how far the items of one erasure are memorized, before it and after it.

Invariant: texts of items are in memory only, and are in no result.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft.learning.evaluate.exposure import (
    UNSEEN,
    Exposure,
    MatchedSecret,
    Secret,
    find_secret,
    match_secret,
    measure_exposure,
    words_of,
)
from personalpeft.learning.layers import trained_on
from personalpeft.services import Services
from personalpeft.stacks import live_stack
from personalpeft.types import (
    Json,
    Message,
    Progress,
    Signal,
    SignalKind,
    Stack,
    Turn,
    canonical_json,
)

_T = TypeVar("_T")

MAX_SECRETS = 4
"""How many answers are measured, since each takes some hundred passes of the model."""
# Each is compared with all remaining texts.
_MAX_TRIED = 4 * MAX_SECRETS


class ExposureMeasure:
    """How far the live stack has memorized the items of one erasure, before and after.

    The texts are in memory only, from ``measure_before`` to the end of ``measure_after``.
    """

    def __init__(
        self, services: Services, user: str, progress: Progress, cancelled: Callable[[], bool]
    ) -> None:
        self._services, self._user = services, user
        self._progress, self._cancelled = progress, cancelled
        self._matched: list[MatchedSecret] = []
        self._before: list[Exposure] = []
        self._not_measured = ""

    def measure_before(
        self,
        items: Sequence[Turn | Signal],
        revisions: Collection[str],
        remaining: Callable[[Turn | Signal], Sequence[str]],
    ) -> None:
        """Choose what is measured, and measure it under the live stack.

        ``remaining`` returns the other texts of the user that one of the items is compared with.
        Raises ``Cancelled``. Another error is stated as the reason why there is no measure.
        """
        try:
            stack = live_stack(self._services, self._user)
            live = {entry.revision for entry in stack.entries} & set(revisions)
            if not live:
                self._not_measured = "no live revision was built from it"
                return
            secrets = self._find_secrets(items, live, remaining)
            if not secrets:
                self._not_measured = "no answer of it has a word that occurs nowhere else"
                return
            words = words_of([text for item, _ in secrets for text in remaining(item)])
            rng = random.Random(self._services.clock.entropy(16))
            with self._services.model.learning():
                for _, secret in self._each("Matching", secrets):
                    engine = self._services.learning_engine
                    matched = match_secret(engine, secret, words, stack.base, rng)
                    self._matched += [matched] if matched else []
            if not self._matched:
                self._not_measured = "there are too few other texts of its form"
            self._before = self._measure(stack, "Measuring before")
        except Cancelled:
            raise
        except PersonalPeftError as error:
            self._not_measured = f"{type(error).__name__} before the erasure"

    def measure_after(self, stack: Stack | None = None) -> Json:
        """Measure the same under the stack that is live now, and return both.

        ``stack`` is what answers now, where the user is gone.
        """
        if not self._before:
            return _not_measured(self._not_measured)
        try:
            stack = stack or live_stack(self._services, self._user)
            after = self._measure(stack, "Measuring after")
        except PersonalPeftError as error:
            return _not_measured(f"{type(error).__name__} after the erasure")
        finally:
            # Caches hold the prompts.
            self._services.drop_user_caches(self._user)
            matched, self._matched = self._matched, []
        results = [
            {"item": each.secret.item, "before": _to_json(before), "after": _to_json(now)}
            for each, before, now in zip(matched, self._before, after, strict=True)
        ]
        return {**_not_measured(""), "results": results}

    def _find_secrets(
        self,
        items: Sequence[Turn | Signal],
        live: Collection[str],
        remaining: Callable[[Turn | Signal], Sequence[str]],
    ) -> list[tuple[Turn | Signal, Secret]]:
        store, user = self._services.store, self._user
        trained = {
            signal
            for each in live
            for signal in trained_on(store, store.catalog.revision(user, each))
        }
        # What the revision was trained on first. A turn and its feedback may have the same answer.
        answers: dict[str, tuple[Turn | Signal, tuple[Message, ...], str]] = {}
        for item in sorted(items, key=lambda each: each.id not in trained):
            for messages, answer in self._answers(item):
                key = canonical_json([answer, *(each.to_list() for each in messages)])
                answers.setdefault(key, (item, messages, answer))
        found = []
        for item, messages, answer in islice(answers.values(), _MAX_TRIED):
            secret = find_secret(item.id, messages, answer, remaining(item))
            found += [(item, secret)] if secret else []
            if len(found) == MAX_SECRETS:
                break
        return found

    def _answers(self, item: Turn | Signal) -> Iterable[tuple[tuple[Message, ...], str]]:
        """Yield the answers of an item, each after its prompt."""
        if isinstance(item, Turn):
            yield item.messages, item.reply
            return
        payload = item.payload
        if item.kind is SignalKind.FACT:
            answer = payload.get("answer") or payload["text"]
            for question in payload.get("questions") or ():
                yield (Message("user", question),), answer
        elif item.kind is SignalKind.DEMONSTRATION:
            before = tuple(Message.from_list(each) for each in payload.get("before", ()))
            yield (*before, Message("user", payload["prompt"])), payload["answer"]
        elif item.turn is not None and item.kind is not SignalKind.COMMENT:
            turn = self._services.store.ledger.turn(self._user, item.turn)
            yield turn.messages, str(payload.get("text", turn.reply))

    def _measure(self, stack: Stack, stage: str) -> list[Exposure]:
        found = []
        with self._services.model.learning():
            for matched in self._each(stage, self._matched):
                engine = self._services.learning_engine
                found.append(measure_exposure(engine, self._user, matched, stack, self._cancelled))
        return found

    def _each(self, stage: str, items: Sequence[_T]) -> Iterator[_T]:
        """Yield items and report the progress. Raises ``Cancelled``."""
        for number, item in enumerate(items):
            self._progress(stage, number / len(items))
            if self._cancelled():
                break
            yield item
        if self._cancelled():
            raise Cancelled("Cancelled while it was measured.", hint="Give the command again.")


def _not_measured(reason: str) -> Json:
    return {"unseen": UNSEEN, "results": [], "not_measured": reason}


def _to_json(exposure: Exposure) -> Json:
    return {
        "rank": exposure.rank,
        "bits": exposure.bits,
        "auc": exposure.auc,
        "extracted": exposure.is_extracted,
    }

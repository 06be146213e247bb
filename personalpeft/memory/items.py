"""A user's rules and facts, and how they get into a prompt.

Invariants: the ledger is asked at every call, so what was said, edited or removed counts from the next prompt on; an item takes one line
of the prompt, between quotation marks that it cannot close, under a heading that calls it the user's words; what is added never counts more
than the budget; the same ledger and messages give the same prompt.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from personalpeft.errors import Busy, HomeError, InvalidInput, NotFound
from personalpeft.memory.conflicts import outdated
from personalpeft.memory.similarity import Region
from personalpeft.memory.types import Embedder, Item, ItemKind, Recall, Vectors
from personalpeft.types import Message, Signal, SignalKind

if TYPE_CHECKING:
    from personalpeft.store.base import Catalog, Ledger

LONGEST_TEXT = 2000
MOST_FACTS = 3

_KIND_OF: Mapping[SignalKind, ItemKind] = {SignalKind.COMMENT: "rule", SignalKind.FACT: "fact"}

# Place and wording were measured on SmolLM2-135M-Instruct (greedy, facts found by MiniLM): 3 sets of 12 facts with 24 questions each, and
# 12 questions about other things with the nearest fact forced in (3 x 10 right without any fact). This form: 42 of 72 facts answered, 32 of
# 36 others right. The same place with the facts as a list: 27 to 29, 29 to 30. Before the question, in the user's message: 26 to 30, 20 to
# 24, and a fact leaked into 1 to 3 of the other answers. The third set was written after this kind of line had been chosen on the first
# two: 13 of 24 there, against 4 to 8. In place of the base's own system text, not after it, a form like this got 49 (16, 13, 20) and
# 31; not done, since a user's first fact would then change what every learned layer was built under.
# Rules as here: "Answer in Spanish" obeyed in 10 of 12, "in one short sentence" in 11 of 12. The latter cost facts: 27 of 72 were still
# answered with the rules first, 16 with the facts first.
_RULES_HEADING = "The user asked earlier, in their own words:"
_FACTS_HEADING = "What you know about the user, in the user's own words:"

# The last two user messages read as one find the fact that a follow-up ("And since when?") is about, and after a change of subject the fact
# that it is no longer about. Over 24 follow-ups and 48 changes (MiniLM): 24 and 42 found one at the plain threshold, 20 and 12 at 0.2 more.
_CONTEXT_DISCOUNT = 0.2

# So many rules in a row that do not fit mean a full budget; without it each chat would count tokens for every comment ever made.
_MISSES_OF_A_FULL_BUDGET = 8


def check_text(text: object, *, what: str) -> str:
    """The text of a fact or comment without the space around it, or ``InvalidInput``.

    Refused: what is not text, shows nothing, is longer than ``LONGEST_TEXT`` characters or holds control characters (tabs and line
    ends are fine) or half a surrogate pair. ``what`` names the thing in the message, as in "comment".
    """
    if not isinstance(text, str):
        raise InvalidInput(
            f"The {what} is not text but {type(text).__name__}.", hint="Give a string."
        )
    text = text.strip()
    if all(unicodedata.category(character)[0] in "CZ" for character in text):
        raise InvalidInput(f"The {what} is empty.", hint="Say something in it.")
    if len(text) > LONGEST_TEXT:
        raise InvalidInput(
            f"The {what} has {len(text)} characters; at most {LONGEST_TEXT} are allowed.",
            hint="Split it into several, each about one thing.",
        )
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            raise InvalidInput(
                f"The {what} holds the character U+{ord(character):04X}.", hint="Send plain text."
            )
    return text


def about_fact(questions: Sequence[str], answer: str | None) -> dict[str, Any]:
    """What is kept of the questions that a fact answers, and of the answer. Raises ``InvalidInput`` as ``check_text`` does, and for
    an answer without a question."""
    if isinstance(questions, str) or not isinstance(questions, Iterable):
        raise InvalidInput(
            "The questions are no list of texts.",
            hint="Give a list of questions, also of a single one.",
        )
    questions = list(questions)
    checked = {
        "questions": [check_text(question, what="question") for question in questions],
        "answer": None if answer is None else check_text(answer, what="answer"),
    }
    if answer is not None and not questions:
        raise InvalidInput(
            "There is an answer and no question.", hint="Give the questions that it answers too."
        )
    return checked


class Memory:
    """What acts at once: the rules and facts of every user, read from the ledger.

    Safe to use from several threads if ledger, catalog and embedder are. The embedder is first used when a user with facts chats.
    """

    def __init__(self, ledger: Ledger, catalog: Catalog, embedder: Embedder) -> None:
        self._ledger = ledger
        self._catalog = catalog
        self.embedder = embedder

    def items(self, user: str, kind: ItemKind | None = None) -> tuple[Item, ...]:
        """The items that act now, oldest first: no fact that gives way to another (``telling``). Raises ``NotFound`` for a user that is not
        there.
        """
        current = self._current(user)
        gone = outdated([signal for signal in current if signal.kind is SignalKind.FACT])
        return tuple(
            _item(each)
            for each in current
            if each.id not in gone and kind in (None, _KIND_OF[each.kind])
        )

    def edit(
        self,
        user: str,
        item_id: str,
        text: str,
        *,
        questions: Sequence[str] | None = None,
        answer: str | None = None,
    ) -> Item:
        """Says an item anew: a new entry of the same kind that supersedes the old one. A fact's questions and answer were made for the
        old text and go with it; where a new answer to them is given and no other questions, these stay. Raises
        ``InvalidInput`` for what ``check_text`` refuses and for questions to a rule, ``NotFound`` for no item that acts now."""
        payload = {"text": check_text(text, what="text")}
        old = self._acting(user, item_id)
        if old.kind is SignalKind.FACT:
            if questions is None:
                questions = old.payload.get("questions") or () if answer is not None else ()
            payload |= about_fact(questions, answer)
        elif questions or answer:
            raise InvalidInput(
                "A rule answers no questions.", hint="Say it anew without questions and answer."
            )
        return _item(
            self._ledger.add_signal(user, old.kind, payload, turn=old.turn, supersedes=old.id)
        )

    def remove(self, user: str, item_id: str) -> None:
        """Switches an item off; the history keeps it. Raises ``NotFound`` for no item that acts now."""
        self._ledger.retract(user, self._acting(user, item_id).id)

    def recall(
        self,
        user: str,
        messages: Sequence[Message],
        *,
        budget_tokens: int,
        count: Callable[[str], int],
        system: str | None = None,
        known: Collection[str] = (),
    ) -> Recall:
        """The messages with the user's rules and the facts that are near to them, at the end of the system message.

        Rules come first, newest preferred where the budget is short; then at most ``MOST_FACTS`` facts, nearest first. The same text
        comes once. ``count`` says how many tokens a text has; the added text, with the blank line before it, has at most ``budget_tokens``.
        Where that holds no item, nothing is added. ``system`` is what the base says first in a chat without a system message: it
        goes before what is added to such a chat, and is not charged to the budget. What is ``known`` to whoever answers is not
        looked up, nor a fact that gives way to another.
        """
        current = self._current(user)
        rules = [
            each for each in current if each.kind is SignalKind.COMMENT and each.id not in known
        ]
        facts = [signal for signal in current if signal.kind is SignalKind.FACT]
        hidden = {*known, *outdated(facts)}
        facts = [fact for fact in facts if fact.id not in hidden]

        def fits(rules: Sequence[Signal], facts: Sequence[Signal]) -> bool:
            return count("\n\n" + _block(rules, facts)) <= budget_tokens

        kept: list[Signal] = []
        misses = 0
        for rule in _without_repeats(reversed(rules)):
            if misses == _MISSES_OF_A_FULL_BUDGET:
                break
            if fits([rule, *kept], ()):
                kept.insert(0, rule)
                misses = 0
            else:
                misses += 1
        found: list[Signal] = []
        for fact in _without_repeats(self._near(user, facts, messages))[:MOST_FACTS]:
            if fits(kept, [*found, fact]):
                found.append(fact)
        if not kept and not found:
            return Recall(tuple(messages), ())
        used = tuple(signal.id for signal in (*kept, *found))
        return Recall(_with_system_text(messages, _block(kept, found), system), used)

    def render_with_item(
        self, user: str, item_id: str, messages: Sequence[Message], *, system: str | None = None
    ) -> tuple[Message, ...]:
        """The messages as they are heard with one item looked up, as ``recall`` puts it. Raises ``NotFound``."""
        item = self._acting(user, item_id)
        is_rule = item.kind is SignalKind.COMMENT
        return _with_system_text(
            messages, _block([item] if is_rule else [], [] if is_rule else [item]), system
        )

    def similarity(self, region: Region, messages: Sequence[Message]) -> float:
        """The cosine of what is asked with what is nearest to it in a region; -1 where nothing is asked."""
        asked = _asked(messages)
        return _closeness(region.vectors, self.embedder.embed(asked)) if asked else -1.0

    def vectors(self, user: str, texts: Mapping[str, Sequence[str]]) -> dict[str, Vectors]:
        """By signal id, one row for each of its texts, in their order. The catalog's cache holds these rows end to end; what is missing
        is embedded."""
        known = self._catalog.vectors(user, self.embedder.name)
        size = self.embedder.embed([]).shape[1]
        missing = [
            each
            for each in texts
            if each not in known or known[each].size != len(texts[each]) * size
        ]
        made: dict[str, Vectors] = {}
        if missing:
            rows = iter(self.embedder.embed([text for each in missing for text in texts[each]]))
            made = {each: np.concatenate([next(rows) for _ in texts[each]]) for each in missing}
            # A cache that cannot be written now (home busy or read-only, fact forgotten meanwhile) is no reason not to answer.
            with suppress(Busy, HomeError, NotFound):
                self._catalog.add_vectors(user, self.embedder.name, made)
        return {
            each: (made[each] if each in made else known[each]).reshape(-1, size) for each in texts
        }

    def _current(self, user: str) -> tuple[Signal, ...]:
        return self._ledger.signals(user, kinds=tuple(_KIND_OF))

    def _acting(self, user: str, item_id: str) -> Signal:
        signal = self._ledger.signal(user, item_id)
        if all(item.id != signal.id for item in self.items(user)):
            raise NotFound(
                f"{signal.id} is not a rule or fact that acts now.",
                hint="It may have been edited, removed or contradicted since, or be another kind of feedback; list the items to see"
                " what acts.",
            )
        return signal

    def _near(
        self, user: str, facts: Sequence[Signal], messages: Sequence[Message]
    ) -> list[Signal]:
        """The facts that pass the embedder's threshold, nearest first; of equals the newest first."""
        asked = _asked(messages)
        if not facts or not asked:
            return []
        queries = self.embedder.embed(asked)
        vectors = self.vectors(user, {fact.id: _texts(fact) for fact in facts})
        cosine = {fact: _closeness(rows, queries) for fact, rows in vectors.items()}
        near = [fact for fact in reversed(facts) if cosine[fact.id] >= self.embedder.near]
        return sorted(near, key=lambda fact: -cosine[fact.id])


def _item(signal: Signal) -> Item:
    return Item(signal.id, _KIND_OF[signal.kind], signal.payload["text"], signal.at)


def _asked(messages: Sequence[Message]) -> list[str]:
    """What the user asks, alone and, where they said something before, after that; nothing where they ask nothing."""
    asked = [message.content for message in messages if message.role == "user"][-2:]
    if not asked or not asked[-1].strip():
        return []
    return [asked[-1], "\n".join(asked)][: len(asked)]


def _closeness(rows: Vectors, queries: Vectors) -> float:
    """The cosine of what is asked with the nearest row."""
    cosines = (rows @ queries.T).max(axis=0)
    # The last is in context, or the same as the first.
    return max(float(cosines[0]), float(cosines[-1]) - _CONTEXT_DISCOUNT)


def _texts(fact: Signal) -> list[str]:
    """What a fact can be found by: its text and the questions it came with."""
    return [fact.payload["text"], *(fact.payload.get("questions") or ())]


def _without_repeats(signals: Iterable[Signal]) -> list[Signal]:
    """Of signals with the same line, the first."""
    first: dict[str, Signal] = {}
    for signal in signals:
        first.setdefault(_line(signal), signal)
    return list(first.values())


def _line(signal: Signal) -> str:
    """An item as one line between marks. A line end or a quotation mark of its own would let it speak outside of them."""
    text = "".join(
        " " if unicodedata.category(each) == "Cc" else each for each in signal.payload["text"]
    )
    return '"' + " ".join(text.split()).replace('"', "'") + '"'


def _block(rules: Sequence[Signal], facts: Sequence[Signal]) -> str:
    parts = []
    if rules:
        parts.append("\n".join([_RULES_HEADING, *(f"- {_line(rule)}" for rule in rules)]))
    if facts:
        parts.append(
            "\n".join([_FACTS_HEADING, *(f"The user said: {_line(fact)}" for fact in facts)])
        )
    return "\n\n".join(parts)


def _with_system_text(
    messages: Sequence[Message], text: str, system: str | None
) -> tuple[Message, ...]:
    for place, message in enumerate(messages):
        if message.role == "system":
            joined = replace(message, content=f"{message.content}\n\n{text}")
            return (*messages[:place], joined, *messages[place + 1 :])
    return (Message("system", f"{system}\n\n{text}" if system else text), *messages)

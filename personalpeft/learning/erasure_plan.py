"""What goes when a person takes something back for good, and what cannot go. Pure, but for reading the ledger.

- An item goes with what it stood in the place of: earlier wordings of a fact, an earlier opinion of the same reply. A turn
  goes with everything that was said of it.
- Whatever was said with it in view loses the words that it may have from there. A reply that was given with a forgotten
  fact in the prompt, or in a conversation that carried a forgotten turn, is emptied; the question stays, and the
  conversation that it carried is cut by what is forgotten or emptied. A reply of a revision that is destroyed, and one
  that was given under a forgotten rule, is emptied where it says one of the item's *own words*. So does what was written
  about an emptied reply go, where it says one.
- Own words are those that the person says nowhere else and that the model said nowhere before. What the person said
  elsewhere in the same words stands, and is named.
- A revision goes that was built from any of this, or on one that was, as its parent or below it; and one of a layer that
  read the item when it decided what to learn. So a layer that stands, and what is built on it, never saw the item.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.base_models.tool_calls import read_calls
from personalpeft.errors import InvalidInput
from personalpeft.store.store import Store
from personalpeft.store.types import Erasure
from personalpeft.types import (
    Json,
    Message,
    Revision,
    Signal,
    SignalKind,
    ToolCall,
    Turn,
    canonical_digest,
)

_LESSONS = frozenset(
    {
        SignalKind.EDIT,
        SignalKind.PREFERENCE,
        SignalKind.RATING,
        SignalKind.REWARD,
        SignalKind.DEMONSTRATION,
    }
)


@dataclass(frozen=True, slots=True)
class RemainingMention:
    """Something that says the same and was not asked to be forgotten."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """What goes, and what of the person's own words stands all the same."""

    removal: Erasure
    remaining: tuple[RemainingMention, ...]


@dataclass(frozen=True, slots=True)
class _Passage:
    """A question and an answer to it, as a later turn may carry them."""

    question: str
    answers: frozenset[str]
    messages: tuple[Message, ...] = ()

    def begins(self, messages: Sequence[Message], at: int) -> bool:
        if messages[at].role != "user" or messages[at].content != self.question:
            return False
        if at + 1 == len(messages) or messages[at + 1].role != "assistant":
            return False
        said = messages[at + 1]
        # An answer that calls tools comes back as its calls and the text beside them.
        answered = said.content in self.answers or any(
            _calls(said) == read_calls(each) for each in self.answers
        )
        return answered or tuple(messages[: at + 1]) == self.messages


def find_item(store: Store, user: str, item: str) -> Turn | Signal:
    """The turn or signal (a fact, a rule, an edit, …) of an id or an unambiguous beginning of one. Raises ``NotFound``,
    ``Forgotten``, ``InvalidInput``.
    """
    if not isinstance(item, str) or item[:2] not in ("t_", "s_"):
        raise InvalidInput(
            f"{ascii(item)[:80]} is not the id of a turn or of something that was said.",
            hint="Ids of turns begin with t_, those of feedback, facts and rules with s_; lessons and turns list them.",
        )
    return store.ledger.turn(user, item) if item[0] == "t" else store.ledger.signal(user, item)


def plan_erasure(store: Store, user: str, item: str) -> ErasurePlan:
    """What goes with an item. Raises as ``named``."""
    return _Case(store, user, find_item(store, user, item)).decided()


class _Case:
    """One item and all that the ledger has beside it."""

    def __init__(self, store: Store, user: str, item: Turn | Signal) -> None:
        self._signals = store.ledger.signals(user, current=False)
        self._turns = tuple(reversed(store.ledger.turns(user)))
        self._by_turn = {turn.id: turn for turn in self._turns}
        self._revisions = store.catalog.revisions(user)
        self._item = item
        self._gone_turns = frozenset({item.id} if isinstance(item, Turn) else ())
        self._gone = frozenset({item.id} if isinstance(item, Signal) else ())
        self._emptied: dict[str, tuple[Message, ...]] = {}
        self._tainted: frozenset[str] = frozenset()

    def decided(self) -> ErasurePlan:
        before = None
        # Each round can only add: what goes may take something else with it.
        while before != (before := (self._gone, self._tainted, tuple(self._emptied))):
            self._widen()
            self._emptied = self._in_view() | self._emptied
            self._tainted = frozenset(self._built_from())
            own = self._own_words()
            self._emptied |= {
                turn.id: turn.messages for turn in self._turns if self._gives_away(turn, own)
            }
            self._gone |= {
                s.id for s in self._signals if s.turn in self._emptied and own & _words(*_texts(s))
            }
        own = self._own_words()
        removal = Erasure(
            self._gone_turns,
            self._gone,
            self._tainted,
            dict(self._emptied),
            lambda said: _rewritten(said, self._gone, own),
        )
        return ErasurePlan(removal, tuple(self._standing()))

    def _widen(self) -> None:
        gone = {s.id for s in self._signals if s.turn in self._gone_turns} | self._gone
        older = {s.supersedes for s in self._signals if s.id in gone and s.supersedes}
        while not older <= gone:
            gone |= older
            older = {s.supersedes for s in self._signals if s.id in gone and s.supersedes}
        self._gone = frozenset(gone)

    def _in_view(self) -> dict[str, tuple[Message, ...]]:
        """Turns whose reply was given with something in view that goes, with the messages that each keeps."""
        facts = {s.id for s in self._signals if s.id in self._gone and s.kind is SignalKind.FACT}
        seen: dict[str, tuple[Message, ...]] = {}
        passages: list[_Passage] = []
        for turn in self._turns:
            said = [
                str(s.payload["text"])
                for s in self._signals
                if s.turn == turn.id and "text" in s.payload
            ]
            if turn.id in self._gone_turns:
                passages.append(_passage(turn, [turn.reply, *said], whole=True))
                continue
            kept = _without(turn.messages, passages)
            if kept != turn.messages or facts & set(turn.used) or turn.id in self._emptied:
                seen[turn.id] = kept
                passages.append(_passage(turn, [turn.reply] if turn.reply else []))
            texts = [
                str(s.payload["text"])
                for s in self._on(turn)
                if s.id in self._gone and "text" in s.payload
            ]
            if texts:
                passages.append(_passage(turn, texts))
        return seen

    def _on(self, turn: Turn) -> list[Signal]:
        return [signal for signal in self._signals if signal.turn == turn.id]

    def _built_from(self) -> Iterable[str]:
        """The revisions that saw it."""
        touched = self._gone_turns | self._emptied.keys()
        used = {signal for turn in self._turns if turn.id in touched for signal in turn.used}
        saw = self._gone | used | {s.id for s in self._signals if s.turn in touched}
        tainted: set[str] = set()
        for revision in self._revisions:
            if _is_given(revision):
                continue
            under = {revision.parent, *(entry.revision for entry in revision.below)}
            if saw & revision.signals.keys() or under & tainted or self._was_read_by(revision):
                tainted.add(revision.id)
                yield revision.id

    def _was_read_by(self, revision: Revision) -> bool:
        """Whether the plan of a build looked at a signal that goes, even where it made no lesson of it."""
        return any(
            signal.at <= revision.at and self._concerns(signal, revision)
            for signal in self._signals
            if signal.id in self._gone
        )

    def _concerns(self, signal: Signal, revision: Revision) -> bool:
        layer = _layer_of(signal)
        if revision.layer != "memory":
            return layer == revision.layer
        # A memory speaks in the manner of the style below it, and learns facts by the turns in which they helped.
        turn = self._by_turn.get(signal.turn or "")
        return (
            layer == "memory"
            or (layer == "style" and bool(revision.below))
            or bool(turn and turn.used)
        )

    def _own_words(self) -> set[str]:
        gone = [
            text for signal in self._signals if signal.id in self._gone for text in _texts(signal)
        ]
        elsewhere = []
        for turn in self._turns:
            if turn.id in self._gone_turns:
                gone.append(turn.messages[-1].content)
                continue
            elsewhere += [
                m.content
                for m in self._emptied.get(turn.id, turn.messages)
                if m.role != "assistant"
            ]
            if turn.id not in self._emptied and not self._answered_by_tainted(turn):
                elsewhere.append(turn.reply)
        about_others = (
            s for s in self._signals if s.id not in self._gone and s.turn not in self._emptied
        )
        elsewhere += [text for signal in about_others for text in _texts(signal)]
        return _words(*gone) - _words(*elsewhere)

    def _answered_by_tainted(self, turn: Turn) -> bool:
        return any(entry.revision in self._tainted for entry in turn.stack.entries)

    def _gives_away(self, turn: Turn, own: Collection[str]) -> bool:
        if turn.id in self._gone_turns or turn.id in self._emptied:
            return False
        could = self._answered_by_tainted(turn) or bool(self._gone & set(turn.used))
        return could and bool(_words(turn.reply) & set(own))

    def _standing(self) -> Iterable[RemainingMention]:
        """What else the person said in the very words."""
        item = self._item
        gone = [item.messages[-1].content] if isinstance(item, Turn) else _texts(item)
        wanted = [text for text in map(_plain, gone) if _words(text)]
        for turn in self._turns:
            kept = self._emptied.get(turn.id, turn.messages)
            if turn.id not in self._gone_turns and _says(wanted, [m.content for m in kept]):
                yield RemainingMention(turn.id, "its messages say the same words")
        for signal in self._signals:
            if signal.id not in self._gone and _says(wanted, _texts(signal)):
                yield RemainingMention(signal.id, f"this {signal.kind} says the same words")


def _passage(turn: Turn, answers: Sequence[str], *, whole: bool = False) -> _Passage:
    return _Passage(turn.messages[-1].content, frozenset(answers), turn.messages if whole else ())


def _calls(said: Message) -> tuple[str, tuple[ToolCall, ...]] | None:
    """As ``read_calls`` would have read it; None for a message without calls."""
    return (
        (said.content, tuple(ToolCall(c.name, c.arguments) for c in said.tool_calls))
        if said.tool_calls
        else None
    )


def _without(messages: tuple[Message, ...], passages: Sequence[_Passage]) -> tuple[Message, ...]:
    kept: list[Message] = []
    at = 0
    while at < len(messages):
        if any(passage.begins(messages, at) for passage in passages):
            at += 2
            # What a tool answered goes with the call.
            while at < len(messages) and messages[at].role == "tool":
                at += 1
        else:
            kept.append(messages[at])
            at += 1
    return tuple(kept)


def _is_given(revision: Revision) -> bool:
    """Whether somebody gave it, so that nothing of this home is in it."""
    return revision.inputs == canonical_digest({"imported": revision.digest})


def _layer_of(signal: Signal) -> str:
    """The layer that may learn of a signal; empty where none does."""
    if signal.kind is SignalKind.FACT:
        return "memory"
    if signal.kind not in _LESSONS:
        return ""
    skill = signal.payload.get("skill")
    compared = str(signal.payload.get("layer", ""))
    return f"skill.{skill}" if skill else compared if compared.startswith("skill.") else "style"


def _texts(signal: Signal) -> list[str]:
    """All that a signal says in words."""
    payload = signal.payload
    said = [payload.get(key) for key in ("text", "prompt", "answer")]
    return [text for text in (*said, *(payload.get("questions") or ())) if isinstance(text, str)]


def _words(*texts: str) -> set[str]:
    """The words that can tell something: of three letters or more, or with a digit in them."""
    return {
        word
        for text in texts
        for word in re.findall(r"\w+", text.casefold())
        if len(word) > 2 or any(map(str.isdigit, word))
    }


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _says(wanted: Sequence[str], texts: Iterable[str]) -> bool:
    return any(each in text for text in map(_plain, texts) for each in wanted)


def _rewritten(said: Json, gone: Collection[str], own: Collection[str]) -> Json:
    """A report or scores without what they say of the signals that go, and without examples that say own words."""

    def of_gone(name: object) -> bool:
        return isinstance(name, str) and name.partition("/")[0] in gone

    def gives_away(example: object) -> bool:
        return isinstance(example, Mapping) and bool(_words(*map(str, example.values())) & set(own))

    def rewrite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: [rewrite(each) for each in inner if not gives_away(each)]
                if key == "examples"
                else rewrite(inner)
                for key, inner in value.items()
                if not of_gone(key)
            }
        if isinstance(value, list):
            return [
                rewrite(each)
                for each in value
                if not of_gone(each)
                and not (isinstance(each, Mapping) and of_gone(each.get("signal")))
            ]
        return value

    rewritten: Json = rewrite(said)
    return rewritten

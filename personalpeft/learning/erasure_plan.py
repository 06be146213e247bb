"""Plan an erasure: what is erased with some items, and which mentions remain. Reads the ledger only.

- With an item its predecessors are erased: earlier wordings of a fact, earlier feedback on the same
  reply. With a turn, all feedback on it is erased. With a layer, all that it was taught is erased,
  and all its revisions.
- A reply is redacted if its prompt had an erased fact, or its conversation an erased turn. The
  question stays. The conversation before it loses what is erased or redacted.
- Other replies are redacted if they have something that they can only have from the item. This
  applies to replies of an erased revision or under an erased rule. Feedback on a redacted reply is
  erased if it has something of the item. ``revealing_text`` decides it, for every language.
- What the user said elsewhere in the same words remains, and is reported.
- A revision is erased if it was built from any of this. So is one with an erased revision as its
  parent or below it, and one whose plan read the item. So no remaining layer saw the item.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from personalpeft.base_models.tool_calls import read_calls
from personalpeft.errors import InvalidInput, NotFound, suggest_nearest
from personalpeft.ids import LAYER_NAME
from personalpeft.learning.candidate import copied_from, imported_inputs
from personalpeft.learning.data.lesson_assignment import layer_of
from personalpeft.learning.revealing_text import RevealingText, comparable, has_words
from personalpeft.store.id_lookup import is_ending
from personalpeft.store.store import Store
from personalpeft.store.types import Erasure
from personalpeft.types import (
    Json,
    Message,
    Revision,
    Signal,
    SignalKind,
    ToolCall,
    ToolFormat,
    Turn,
)


@dataclass(frozen=True, slots=True)
class RemainingMention:
    """Another item that contains the same words and remains, and where it has them."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class ErasurePlan:
    """What is erased, and which mentions remain.

    ``items`` are the erased turns and signals. ``elsewhere`` are the remaining texts.
    """

    erasure: Erasure
    remaining: tuple[RemainingMention, ...]
    items: tuple[Turn | Signal, ...] = ()
    elsewhere: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A question and its possible answers, as a later conversation may contain them.

    ``messages`` is the conversation up to the question, where any answer to it counts.
    """

    question: str
    answers: frozenset[str]
    messages: tuple[Message, ...] = ()

    def is_at(self, messages: Sequence[Message], index: int) -> bool:
        """Return whether a conversation contains the exchange at an index."""
        if messages[index].role != "user" or messages[index].content != self.question:
            return False
        if index + 1 == len(messages) or messages[index + 1].role != "assistant":
            return False
        answer = messages[index + 1]
        # An answer with tool calls comes back as its calls and its text.
        calls = _calls_of(answer)
        is_answer = answer.content in self.answers or any(
            calls == read_calls(each, tool_format)
            for each in self.answers
            for tool_format in ToolFormat
        )
        return is_answer or tuple(messages[: index + 1]) == self.messages


@dataclass(frozen=True, slots=True)
class ErasureTarget:
    """What to forget: turns and signals by their full ids, or a whole layer. ``name`` is shown."""

    name: str
    turns: frozenset[str] = frozenset()
    signals: frozenset[str] = frozenset()
    layer: str | None = None

    @property
    def items(self) -> frozenset[str]:
        """The ids of the turns and signals."""
        return self.turns | self.signals


def find_target(store: Store, user: str, item: str) -> ErasureTarget:
    """Return the turn, signal or layer that an item names.

    Args:
        store: The open home.
        user: The user.
        item: The name of a layer, or an unambiguous beginning or ending of an id.

    Raises:
        NotFound: There is none.
        Forgotten: It was erased.
        InvalidInput: It is no such id, or ambiguous.
    """
    if isinstance(item, str) and LAYER_NAME.fullmatch(item):
        taught = {
            signal.id
            for signal in store.ledger.signals(user, current=False)
            if layer_of(signal) == item
        }
        known = [layer.name for layer in store.catalog.layers(user)]
        if item not in known and not taught:
            raise NotFound(
                f"{user} has no layer {item}.", hint=suggest_nearest(item, known, what="layer")
            )
        return ErasureTarget(item, signals=frozenset(taught), layer=item)
    ledger, prefix = store.ledger, str(item)[:2]
    if isinstance(item, str) and is_ending(item):
        for find in (ledger.signal, ledger.turn):
            with suppress(NotFound):
                return _target_of(find(user, item))
    if not isinstance(item, str) or prefix not in ("t_", "s_"):
        raise InvalidInput(
            f"An item must be the id of a turn or a signal, or a layer, got {ascii(item)[:80]}.",
            hint="Ids of turns begin with t_, those of feedback, facts and rules with s_; signals"
            " and turns list them. A layer is style, memory or skill.<name>.",
        )
    return _target_of((ledger.turn if prefix == "t_" else ledger.signal)(user, item))


def _target_of(entry: Turn | Signal) -> ErasureTarget:
    ids = frozenset({entry.id})
    if isinstance(entry, Turn):
        return ErasureTarget(entry.id, turns=ids)
    return ErasureTarget(entry.id, signals=ids)


def plan_erasure(store: Store, user: str, target: ErasureTarget) -> ErasurePlan:
    """Return what is erased with a target.

    Args:
        store: The open home.
        user: The user.
        target: What to forget.
    """
    return _ErasurePlanner(store, user, target).plan()


class _ErasurePlanner:
    """One target, the rest of the ledger, and the erasures found so far."""

    def __init__(self, store: Store, user: str, target: ErasureTarget) -> None:
        self._signals = store.ledger.signals(user, current=False)
        self._facts = frozenset(s.id for s in self._signals if s.kind is SignalKind.FACT)
        self._turns = tuple(reversed(store.ledger.turns(user)))
        self._by_turn = {turn.id: turn for turn in self._turns}
        self._revisions = store.catalog.revisions(user)
        self._target = target
        self._erased_turns = target.turns
        self._erased = target.signals
        self._redacted: dict[str, tuple[Message, ...]] = {}
        self._erased_revisions: frozenset[str] = frozenset()

    def plan(self) -> ErasurePlan:
        before = None
        # Repeat to a fixed point: one erasure may cause another.
        while before != (before := (self._erased, self._erased_revisions, tuple(self._redacted))):
            self._erase_predecessors()
            self._redacted = self._redact_contexts() | self._redacted
            self._erased_revisions = self._find_revisions()
            revealing = RevealingText(*self._texts())
            self._redacted |= {
                turn.id: turn.messages for turn in self._turns if self._reveals(turn, revealing)
            }
            self._erased |= {
                signal.id
                for signal in self._signals
                if signal.turn in self._redacted and revealing.is_in(texts_of(signal))
            }
        erased, (erased_texts, elsewhere) = self._erased, self._texts()
        revealing = RevealingText(erased_texts, elsewhere)
        if self._revisions:
            # Their reports have examples, which are judged when the caller excludes other writers.
            revealing.prepare()
        erasure = Erasure(
            self._erased_turns,
            erased,
            self._erased_revisions,
            dict(self._redacted),
            frozenset({self._target.layer} if self._target.layer else ()),
            lambda body: _redact(body, erased, revealing),
        )
        items: tuple[Turn | Signal, ...] = (
            *(turn for turn in self._turns if turn.id in self._erased_turns),
            *(signal for signal in self._signals if signal.id in erased),
        )
        return ErasurePlan(erasure, tuple(self._find_mentions()), items, tuple(elsewhere))

    def _erase_predecessors(self) -> None:
        erased = {each.id for each in self._signals if each.turn in self._erased_turns}
        erased |= self._erased
        # Newest first, so that one pass reaches every predecessor.
        for signal in reversed(self._signals):
            if signal.id in erased and signal.supersedes:
                erased.add(signal.supersedes)
        self._erased = frozenset(erased)

    def _redact_contexts(self) -> dict[str, tuple[Message, ...]]:
        """Return the turns that had something erased in view, with the messages that each keeps."""
        facts = self._erased & self._facts
        redacted: dict[str, tuple[Message, ...]] = {}
        exchanges: list[_Exchange] = []
        for turn in self._turns:
            question = turn.messages[-1].content
            texts = {
                each.id: str(each.payload["text"])
                for each in self._signals
                if each.turn == turn.id and "text" in each.payload
            }
            if turn.id in self._erased_turns:
                answers = frozenset((turn.reply, *texts.values()))
                exchanges.append(_Exchange(question, answers, turn.messages))
                continue
            kept = _without(turn.messages, exchanges)
            if kept != turn.messages or facts & set(turn.used) or turn.id in self._redacted:
                redacted[turn.id] = kept
                exchanges.append(_Exchange(question, frozenset(filter(None, [turn.reply]))))
            erased_texts = frozenset(text for id, text in texts.items() if id in self._erased)
            if erased_texts:
                exchanges.append(_Exchange(question, erased_texts))
        return redacted

    def _find_revisions(self) -> frozenset[str]:
        """Return the revisions that saw anything erased."""
        touched = self._erased_turns | self._redacted.keys()
        # A memory learns a fact from the turns that it helped.
        facts = {fact for t in self._turns if t.id in touched for fact in t.used} & self._facts
        seen = self._erased | facts | {each.id for each in self._signals if each.turn in touched}
        erased: set[str] = set()
        for revision in self._revisions:
            if revision.layer == self._target.layer:
                is_erased = True
            elif revision.inputs == imported_inputs(revision.digest):
                # Nothing of this home is in it, unless it is a copy of another layer.
                is_erased = copied_from(revision) in erased
            else:
                under = {revision.parent, *(entry.revision for entry in revision.below)}
                saw_any = seen & revision.signals.keys() or under & erased
                is_erased = bool(saw_any) or self._was_read_by(revision)
            if is_erased:
                erased.add(revision.id)
        return frozenset(erased)

    def _was_read_by(self, revision: Revision) -> bool:
        """Return whether the plan of a build read an erased signal, lesson or not."""
        # In the order of the ledger too, since a clock may have been set back in between.
        numbers = [n for n, each in enumerate(self._signals) if each.id in revision.signals]
        newest = max(numbers, default=-1)
        return any(
            (number < newest or signal.at <= revision.at) and self._concerns(signal, revision)
            for number, signal in enumerate(self._signals)
            if signal.id in self._erased
        )

    def _concerns(self, signal: Signal, revision: Revision) -> bool:
        layer = layer_of(signal)
        if layer == revision.layer:
            return True
        if revision.layer != "memory":
            return False
        # A memory learns facts from turns that they helped. It is regularised to replies of the
        # style below it.
        turn = self._by_turn.get(signal.turn or "")
        return (layer == "style" and bool(revision.below)) or bool(
            turn and self._facts.intersection(turn.used)
        )

    def _texts(self) -> tuple[list[str], list[str]]:
        """Return the texts that are erased, and those that remain."""
        erased, elsewhere = list[str](), list[str]()
        for signal in self._signals:
            if signal.id in self._erased:
                erased += texts_of(signal)
            elif signal.turn not in self._redacted:
                elsewhere += texts_of(signal)
        for turn in self._turns:
            if turn.id in self._erased_turns:
                erased.append(turn.messages[-1].content)
                continue
            messages = self._redacted.get(turn.id, turn.messages)
            elsewhere += [each.content for each in messages if each.role != "assistant"]
            if turn.id not in self._redacted and not self._is_from_erased(turn):
                elsewhere.append(turn.reply)
        return erased, elsewhere

    def _is_from_erased(self, turn: Turn) -> bool:
        return any(entry.revision in self._erased_revisions for entry in turn.stack.entries)

    def _reveals(self, turn: Turn, revealing: RevealingText) -> bool:
        if turn.id in self._erased_turns or turn.id in self._redacted:
            return False
        may_know = self._is_from_erased(turn) or bool(self._erased & set(turn.used))
        return may_know and revealing.is_in([turn.reply])

    def _find_mentions(self) -> Iterator[RemainingMention]:
        """Yield the remaining turns and signals that contain the text of one of the items."""
        target = self._target
        texts = [t.messages[-1].content for t in self._turns if t.id in target.turns]
        for signal in self._signals:
            if signal.id in target.signals:
                texts += texts_of(signal)
        wanted = list({comparable(text) for text in texts if has_words(text)})
        for turn in self._turns:
            kept = self._redacted.get(turn.id, turn.messages)
            if turn.id not in self._erased_turns and _contains(wanted, [m.content for m in kept]):
                yield RemainingMention(turn.id, "its messages say the same words")
        for signal in self._signals:
            if signal.id not in self._erased and _contains(wanted, texts_of(signal)):
                yield RemainingMention(signal.id, f"this {signal.kind} says the same words")


def _calls_of(message: Message) -> tuple[str, tuple[ToolCall, ...]] | None:
    """Return what ``read_calls`` would return; None for a message without calls."""
    if not message.tool_calls:
        return None
    return message.content, tuple(ToolCall(c.name, c.arguments) for c in message.tool_calls)


def _without(messages: tuple[Message, ...], exchanges: Sequence[_Exchange]) -> tuple[Message, ...]:
    kept: list[Message] = []
    index = 0
    while index < len(messages):
        if any(exchange.is_at(messages, index) for exchange in exchanges):
            index += 2
            # The result of a tool goes with the call.
            while index < len(messages) and messages[index].role == "tool":
                index += 1
        else:
            kept.append(messages[index])
            index += 1
    return tuple(kept)


def texts_of(signal: Signal) -> list[str]:
    """Return all words that a signal contains."""
    payload = signal.payload
    texts = [payload.get(key) for key in ("text", "prompt", "answer")]
    texts += [message[1] for message in payload.get("before", ())]
    return [text for text in (*texts, *(payload.get("questions") or ())) if isinstance(text, str)]


def texts_beside(items: Iterable[Turn | Signal], item: Turn | Signal) -> list[str]:
    """Return what the user said in other items, except those of the same turn."""

    def turn_of(each: Turn | Signal) -> str:
        return each.id if isinstance(each, Turn) else each.turn or each.id

    others = (each for each in items if turn_of(each) != turn_of(item))
    return [
        text
        for each in others
        for text in ([each.messages[-1].content] if isinstance(each, Turn) else texts_of(each))
    ]


def _contains(wanted: Sequence[str], texts: Iterable[str]) -> bool:
    return any(each in text for text in map(comparable, texts) for each in wanted)


def _redact(body: Json, erased: Collection[str], revealing: RevealingText) -> Json:
    """Return a report or scores without erased signals, and without texts that reveal them."""

    def is_erased(each: object) -> bool:
        name = each.get("signal") if isinstance(each, Mapping) else each
        return isinstance(name, str) and name.partition("/")[0] in erased

    def reveals(example: object) -> bool:
        texts = map(str, example.values()) if isinstance(example, Mapping) else ()
        return revealing.is_in(texts)

    def redact(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {
                key: [redact(each) for each in inner if not reveals(each)]
                # A reason has a name for which lessons judged, under the same key.
                if key in ("examples", "removed") and isinstance(inner, list)
                else redact(inner)
                for key, inner in value.items()
                if not is_erased(key)
            }
        if isinstance(value, list):
            return [redact(each) for each in value if not is_erased(each)]
        return value

    redacted: Json = redact(body)
    return redacted

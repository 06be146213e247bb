"""A user's rules and facts, and how they enter a prompt.

Invariants: every call asks the ledger for changes, so one applies to the next prompt. The added text
never exceeds the budget. The same ledger and messages give the same prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from personalpeft.arguments import check_list
from personalpeft.chat.validation import check_text
from personalpeft.errors import Busy, HomeError, InvalidInput, NotFound
from personalpeft.ids import LAST
from personalpeft.lru_cache import LRUCache
from personalpeft.memory.conflicts import superseded_facts
from personalpeft.memory.languages import ENGLISH, find_language
from personalpeft.memory.rendering import PromptItems, quote_line
from personalpeft.memory.types import AugmentedPrompt, Embedder, Item, ItemKind, Vectors
from personalpeft.types import TRAINS, Message, Signal, SignalKind

if TYPE_CHECKING:
    from personalpeft.store.catalog import Catalog
    from personalpeft.store.ledger import Ledger, SignalsMark

MAX_ITEM_LENGTH = 2000
MAX_FACTS = 3

_KIND_OF: Mapping[SignalKind, ItemKind] = {SignalKind.COMMENT: "rule", SignalKind.FACT: "fact"}

# The last two user messages together find the fact of a follow-up ("And since when?"). After a
# change of subject they find a stale fact. Measured with cosines of MiniLM over 24 follow-ups and 48
# changes: the plain threshold found a fact in 24 and 42. One higher by 0.2 found one in 20 and 12.
_CONTEXT_DISCOUNT = 0.2

# Cosine of two embeddings of one text, up to rounding.
_SAME_TEXT = 0.9999

# A fact less similar than the nearest by this much is about something else. Measured with MiniLM on
# 24 facts and 72 questions: as many found the right fact, with less than half as many others.
_MAX_DISTANCE_FROM_NEAREST = 0.2

# Facts as similar as this to the nearest one, and about as near to the question, may be later values
# of it. In five pairs ("I live in Leeds.", "I moved to Hull last month.") the least is 0.19.
_MIN_SIMILARITY_OF_VALUES = 0.15
_MAX_DISTANCE_OF_VALUES = 0.15

# So many misses in a row mean a full budget. Without a limit, each chat counts the tokens of every
# comment ever made.
_MAX_MISSES = 8

# Users whose items are kept in memory. To read and compare thousands of facts takes half a second.
_MAX_KNOWN_USERS = 64


def check_item_text(text: object, *, what: str) -> str:
    """Return the text of a rule or fact without surrounding space.

    Raises ``InvalidInput`` for a text that is empty or longer than ``MAX_ITEM_LENGTH`` characters.
    Of control characters only tabs and line ends are allowed. ``what`` names it in the message.
    """
    text = text.strip() if isinstance(text, str) else text
    return check_text(text, what=what, max_length=MAX_ITEM_LENGTH, is_plain=True)


def check_fact_questions(questions: Sequence[str], answer: str | None) -> dict[str, Any]:
    """Return the payload for the questions and answer of a fact. Raises ``InvalidInput``."""
    check_list("questions", questions)
    checked = {
        "questions": [check_item_text(question, what="question") for question in questions],
        "answer": None if answer is None else check_item_text(answer, what="answer"),
    }
    if answer is not None and not checked["questions"]:
        raise InvalidInput(
            "An answer needs at least one question.", hint="Give the questions that it answers."
        )
    return checked


class Memory:
    """The rules and facts of every user, read from the ledger.

    Thread-safe if ledger, catalog and embedder are. The embedder is first used when a user who has
    facts chats.
    """

    def __init__(self, ledger: Ledger, catalog: Catalog, embedder: Embedder) -> None:
        self._ledger = ledger
        self._catalog = catalog
        self.embedder = embedder
        self._known: LRUCache[str, tuple[SignalsMark, tuple[Signal, ...]]] = LRUCache(
            _MAX_KNOWN_USERS
        )

    def items(self, user: str) -> tuple[Item, ...]:
        """Return the items in effect, oldest first. Raises ``NotFound``."""
        return tuple(map(_item, self._in_effect(user)))

    def edit(
        self,
        user: str,
        item_id: str,
        text: str,
        *,
        questions: Sequence[str] | None = None,
        answer: str | None = None,
        train: bool = True,
    ) -> Item:
        """Supersede an item with a new one of the same kind, and return it.

        Args:
            user: Id of the user.
            item_id: Id of the item, or the beginning of one.
            text: The new text.
            questions: For a fact, the questions that it answers. None drops the old ones, or keeps
                them if an ``answer`` is given.
            answer: For a fact, the answer to the questions.
            train: Whether layers may be trained on it, where they may be on the old one.

        Raises:
            InvalidInput: A text is invalid, or a rule was given questions.
            NotFound: No item in effect has this id.
        """
        payload: dict[str, Any] = {"text": check_item_text(text, what="text")}
        old = self._signal(user, item_id)
        if old.kind is SignalKind.FACT:
            if questions is None:
                questions = old.payload.get("questions") or () if answer is not None else ()
            payload |= check_fact_questions(questions, answer)
        elif questions or answer:
            raise InvalidInput(
                "A rule cannot have questions or an answer.", hint="Edit its text only."
            )
        if not train or old.forbids_training:
            payload[TRAINS] = False
        return _item(
            self._ledger.add_signal(user, old.kind, payload, turn=old.turn, supersedes=old.id)
        )

    def retract(self, user: str, item_id: str) -> None:
        """Retract an item; the ledger keeps it. Raises ``NotFound``."""
        self._ledger.retract(user, self._signal(user, item_id).id)

    def add_to_prompt(
        self,
        user: str,
        messages: Sequence[Message],
        *,
        budget_tokens: int,
        count_tokens: Callable[[str], int],
        system: str | None = None,
    ) -> AugmentedPrompt:
        """Add the user's rules to the system message, and relevant facts before the last question.

        When the budget is short, newer rules are preferred, and rules to facts. At most
        ``MAX_FACTS`` facts are added, nearest first. Of those that may be values of one thing the
        newest stands next to the question. Repeated texts are added once.

        Args:
            user: Id of the user.
            messages: The conversation.
            budget_tokens: The most tokens of the added text, with the blank line before it.
            count_tokens: Returns the number of tokens of a text.
            system: The base's default system text. It precedes the rules in a conversation without
                a system message, and does not count towards the budget.

        Returns:
            The new messages and the ids of the added items.
        """
        signals = self._in_effect(user)
        rules = [each for each in signals if each.kind is SignalKind.COMMENT]
        facts = [each for each in signals if each.kind is SignalKind.FACT]

        found, values, language = self._relevant_facts(user, facts, messages)

        def fits(
            rules: Sequence[Signal], facts: Sequence[Signal], *, demonstrated: bool = True
        ) -> bool:
            items = PromptItems(rules, facts, language if demonstrated else None)
            return count_tokens(items.added_text) <= budget_tokens

        chosen_rules: list[Signal] = []
        misses = 0
        for rule in _without_repeats(reversed(rules)):
            if misses == _MAX_MISSES:
                break
            if fits([rule, *chosen_rules], ()):
                chosen_rules.insert(0, rule)
                misses = 0
            else:
                misses += 1
        chosen_facts: list[Signal] = []
        relevant = list(islice(_without_repeats(found), MAX_FACTS))
        # A short context has room for a fact, and none for demonstrations.
        demonstrated = any(fits(chosen_rules, [fact]) for fact in relevant)
        for fact in relevant:
            if fits(chosen_rules, [*chosen_facts, fact], demonstrated=demonstrated):
                chosen_facts.append(fact)
        if not chosen_rules and not chosen_facts:
            return AugmentedPrompt(tuple(messages), ())
        ids = tuple(signal.id for signal in (*chosen_rules, *chosen_facts))
        newest_first = [fact for fact in reversed(facts) if fact.id in values]
        shown = [
            *(fact for fact in newest_first if fact in chosen_facts),
            *(fact for fact in chosen_facts if fact.id not in values),
        ]
        items = PromptItems(chosen_rules, shown, language if demonstrated else None)
        return AugmentedPrompt(items.add_to(messages, system), ids, items.demonstrated)

    def similarity(
        self, vectors: Vectors, messages: Sequence[Message], *, are_facts: bool = False
    ) -> float:
        """Return the similarity of the request to the nearest row of ``[n, size]`` vectors.

        -1 for messages without a request, and 1 for one in the words of a row. With ``are_facts``
        it is how clearly one of these facts is asked for.
        """
        queries = self.embedder.embed(_queries(messages))
        if not len(queries):
            return -1.0
        if (vectors @ queries[0]).max() >= _SAME_TEXT:
            return 1.0
        similarities, asking = self._similarities(vectors, queries)
        return float((asking if are_facts else similarities).max())

    def finds_any(self, user: str, facts: Sequence[Signal], questions: Sequence[str]) -> list[bool]:
        """Return for each question whether one of the facts is relevant to it."""
        if not facts or not questions:
            return [False] * len(questions)
        vectors = self.cached_vectors(user, {fact.id: fact_texts(fact) for fact in facts})
        similarities = self.embedder.similarity(
            self.embedder.embed(questions), np.concatenate(list(vectors.values()))
        )
        return [bool(row.max() >= self.embedder.min_similarity) for row in similarities]

    def cached_vectors(self, user: str, texts: Mapping[str, Sequence[str]]) -> dict[str, Vectors]:
        """Return the vectors of texts by signal id, one row a text. The catalog caches them."""
        cached = self._catalog.vectors(user, self.embedder.name)
        size = self.embedder.embed([]).shape[1]
        missing = [
            each
            for each in texts
            if each not in cached or cached[each].size != len(texts[each]) * size
        ]
        computed: dict[str, Vectors] = {}
        if missing:
            rows = iter(self.embedder.embed([text for each in missing for text in texts[each]]))
            computed = {each: np.concatenate([next(rows) for _ in texts[each]]) for each in missing}
            # The cache may not be writable: the home is busy or read-only, or a fact was forgotten.
            with suppress(Busy, HomeError, NotFound):
                self._catalog.add_vectors(user, self.embedder.name, computed)
        return {
            each: (computed[each] if each in computed else cached[each]).reshape(-1, size)
            for each in texts
        }

    def evict_user(self, user: str) -> None:
        """Drop the cached items of a user."""
        self._known.drop(lambda known: known == user)

    def _in_effect(self, user: str) -> tuple[Signal, ...]:
        """Return the rules and facts in effect, oldest first. Raises ``NotFound``."""
        # Before the signals, so that one that arrives between the two is read again.
        mark = self._ledger.signals_mark(user)
        known = self._known.get(user)
        if known is not None and known[0] == mark:
            return known[1]
        signals = self._ledger.signals(user, kinds=tuple(_KIND_OF))
        hidden = superseded_facts([each for each in signals if each.kind is SignalKind.FACT])
        signals = tuple(each for each in signals if each.id not in hidden)
        self._known.put(user, (mark, signals))
        return signals

    def _signal(self, user: str, item_id: str) -> Signal:
        items = self.items(user)
        if item_id == LAST and items:
            item_id = items[-1].id
        signal = self._ledger.signal(user, item_id)
        if all(item.id != signal.id for item in items):
            raise NotFound(
                f"{signal.id} is not a rule or fact in effect.",
                hint="It may be edited, removed or superseded, or another kind of feedback. List "
                "the items to see those in effect.",
            )
        return signal

    def _relevant_facts(
        self, user: str, facts: Sequence[Signal], messages: Sequence[Message]
    ) -> tuple[list[Signal], Set[str], str | None]:
        """Return the relevant facts, which may be values of one thing, by id, and the language.

        The nearest comes first; of equals the newest. The language is that of the request. It is
        None where the request may be on the topic of a fact only: then demonstrations of short
        answers would harm the reply.
        """
        texts = _queries(messages)
        if not facts or not texts:
            return [], frozenset(), None
        queries = self.embedder.embed(texts)
        vectors = self.cached_vectors(user, {fact.id: fact_texts(fact) for fact in facts})
        similarities, asking = self._similarities(np.concatenate(list(vectors.values())), queries)
        ends = np.cumsum([len(rows) for rows in vectors.values()])[:-1]
        nearness = {
            fact: float(rows.max())
            for fact, rows in zip(vectors, np.split(similarities, ends), strict=True)
        }
        best = max(nearness, key=lambda fact: nearness[fact])
        least = max(self.embedder.min_similarity, nearness[best] - _MAX_DISTANCE_FROM_NEAREST)
        near = sorted(
            (fact for fact in reversed(facts) if nearness[fact.id] >= least),
            key=lambda fact: -nearness[fact.id],
        )
        if not near:
            return [], frozenset(), None
        # The first row of a fact is that of its text.
        rows = np.stack([vectors[best][0], *(vectors[fact.id][0] for fact in near)])
        alike = self.embedder.similarity(rows[:1], rows[1:])[0]
        values = {
            fact.id
            for fact, similarity in zip(near, alike, strict=True)
            if similarity >= _MIN_SIMILARITY_OF_VALUES
            and nearness[fact.id] >= nearness[best] - _MAX_DISTANCE_OF_VALUES
        }
        # An everyday question is like a stated question by its form, and not like a statement.
        is_clear = asking.max() >= self.embedder.clear_similarity or any(
            rows[0] >= self.embedder.clear_statement_similarity for rows in np.split(asking, ends)
        )
        return near, values, self._language(texts[0], queries[0]) if is_clear else None

    def render_with_signal(
        self, signal: Signal, messages: Sequence[Message], *, system: str | None = None
    ) -> tuple[Message, ...]:
        """Return the messages with one rule or fact, as ``add_to_prompt`` adds it.

        Args:
            signal: A rule or fact.
            messages: The conversation.
            system: The default system text of the base, which precedes rules.
        """
        is_rule = signal.kind is SignalKind.COMMENT
        rules, facts = ([signal], []) if is_rule else ([], [signal])
        language = ENGLISH
        if facts and (texts := _queries(messages)):
            language = self._language(texts[0], self.embedder.embed(texts[:1])[0])
        return PromptItems(rules, facts, language).add_to(messages, system)

    def _language(self, text: str, vector: Vectors) -> str:
        """Return the language of a text, given its vector."""
        # The model of languages takes a second to load, and room on the disk for a moment.
        if not self.embedder.is_english(vector):
            with suppress(OSError):
                return find_language(text)
        return ENGLISH

    def _similarities(self, rows: Vectors, queries: Vectors) -> tuple[Vectors, Vectors]:
        """Return ``[len(rows)]`` twice: how similar a request is to each row, and to asking for it."""
        found = self.embedder.similarity(queries, rows)
        asking = found - self.embedder.impersonal_discount(queries)[:, None]

        def with_context(similarities: Vectors) -> Vectors:
            # The last query has context, or is the first one again.
            nearest: Vectors = np.maximum(similarities[0], similarities[-1] - _CONTEXT_DISCOUNT)
            return nearest

        return with_context(found), with_context(asking)


def fact_texts(fact: Signal) -> list[str]:
    """Return the texts that a fact is found by: its own and its questions."""
    return [fact.payload["text"], *(fact.payload.get("questions") or ())]


def _item(signal: Signal) -> Item:
    return Item(signal.id, _KIND_OF[signal.kind], signal.payload["text"], signal.at)


def _queries(messages: Sequence[Message]) -> list[str]:
    """Return the last user message alone and, if there are two, the last two as one text."""
    texts = [message.content for message in messages if message.role == "user"][-2:]
    if not texts or not texts[-1].strip():
        return []
    return [texts[-1], "\n".join(texts)][: len(texts)]


def _without_repeats(signals: Iterable[Signal]) -> Iterator[Signal]:
    """Yield the first signal of each line."""
    seen = set()
    for signal in signals:
        line = quote_line(signal.payload["text"])
        if line not in seen:
            seen.add(line)
            yield signal

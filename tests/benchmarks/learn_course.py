"""The eight rounds of one persona through the public surface: feedback, learns and questions.

| night | feedback before it | questions after it |
| --- | --- | --- |
| 1 | 12 edits in the style | unseen questions |
| 2 | 12 acts of mixed kinds | unseen questions |
| 3 to 6 | five facts each, with three questions and the answer | unseen phrasings: after 3 and 4 of
these five, after 6 of all twenty |
| 7 | 12 edits: in the new style where it changes, else in the old | unseen questions, where it
changes |
| 8 | five facts again, with their new answers | unseen questions, phrasings of what changed and of
what 3 and 4 taught |

After each round the general probes follow too. A changed style comes with its comment again.
Replies are greedy, sixteen questions at a time. No question is asked twice on the same stack and
items, because the library promises the same text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from benchmarks.personas import Fact, Habit, Persona, mentions, pools
from personalpeft import Reply, User
from personalpeft.errors import InvalidInput, NothingToLearn
from personalpeft.learning.report import LearnReport

NIGHTS = 8
TOGETHER = 16
WAYS: Mapping[str, Mapping[str, Any]] = {
    "base": {"layers": [], "memory": False},
    "retrieval": {"layers": [], "memory": True},
    "adapter": {"memory": False},
    "both": {},
}
"""Ways to ask: the bare base, rules and facts in the prompt, layers alone, and all of it."""

LONG, SHORT, GENERAL = 96, 32, 48
_REPLY = 40
_EDITS, _FACTS = 12, 5
_FACT_NIGHTS = range(3, 7)
_KEPT_NIGHTS = range(3, 5)

Tally: TypeAlias = tuple[int, int]
"""How many, of how many."""
Ask: TypeAlias = Callable[[Sequence[str], int], Sequence[str]]
Example: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Round:
    """The training data of one round as plain prompts and wanted answers, and its learns."""

    examples: tuple[Example, ...]
    learns: tuple[dict[str, Any], ...]


class Evaluator:
    """Asks a course's questions and scores the answers.

    ``ask`` returns answers of limited length. General probes are asked after the last round only,
    unless ``nightly``.
    """

    def __init__(self, ask: Ask, *, nightly: bool = False) -> None:
        self._ask = ask
        self._nightly = nightly
        self.figures: dict[str, Tally] = {}
        self.general: list[Tally] = []
        self._taught: dict[str, bool] = {}

    def evaluate(self, person: Persona, night: int, last: int, known: frozenset[str]) -> None:
        """Score the answers after a round.

        ``known`` are the general probes that the base has right.

        """
        habit = person.later if person.later is not None and night >= 7 else person.habit
        moments = {
            1: "after_12_edits",
            2: "after_24_mixed",
            7: "after_the_change" if person.later else "",
        }
        if moment := moments.get(night):
            held = self._in_habit(habit)
            self.figures[f"adherence.{moment}"] = _tally(held.values())
            if night == 2 and person.later is None:
                self._taught |= held
        if night in _KEPT_NIGHTS:
            self._taught |= self._values_given(_unchanged(facts_of(person, night)))
        if night == 6:
            self.figures["recall"] = _tally(self._values_given(person.facts).values())
        if self._nightly or night == last:
            self.general.append(_tally(self._know(known).values()))
        if night == last:
            self._examine_at_the_end(person, night, habit)

    def _examine_at_the_end(self, person: Persona, night: int, habit: Habit) -> None:
        held = self._in_habit(habit)
        self.figures["adherence.at_the_end"] = _tally(held.values())
        self.figures["locality"] = self.general[-1]
        if night >= NIGHTS:
            self.figures["overwrite"] = _tally(self._new_values_given(person.facts).values())
        taught_facts = [
            fact for n in _KEPT_NIGHTS if n <= night for fact in _unchanged(facts_of(person, n))
        ]
        now = (held if person.later is None else {}) | self._values_given(taught_facts)
        kept = [now[question] for question, was in self._taught.items() if was]
        self.figures["retention"] = _tally(kept)

    def _in_habit(self, habit: Habit) -> dict[str, bool]:
        return self._judge(dict.fromkeys(pools().unseen, habit.holds), LONG)

    def _values_given(self, facts: Iterable[Fact]) -> dict[str, bool]:
        judges = {
            question: partial(mentions, fact.right) for fact in facts for question in fact.unseen
        }
        return self._judge(judges, SHORT)

    def _new_values_given(self, facts: Iterable[Fact]) -> dict[str, bool]:
        """Count answers with the new value and without the old one."""

        def is_new(old: Fact, new: Fact, reply: str) -> bool:
            return mentions(new.right, reply) and not mentions(old.right, reply)

        changed = [(fact, fact.later) for fact in facts if fact.later]
        judges = {
            question: partial(is_new, old, new) for old, new in changed for question in old.unseen
        }
        return self._judge(judges, SHORT)

    def _know(self, known: frozenset[str]) -> dict[str, bool]:
        probes = [each for each in pools().general if each.question in known]
        return self._judge(
            {each.question: partial(mentions, each.right) for each in probes}, GENERAL
        )

    def _judge(self, judges: Mapping[str, Callable[[str], bool]], longest: int) -> dict[str, bool]:
        """Return by question whether its judge accepts the answer."""
        replies = self._ask(list(judges), longest)
        return {
            question: accepts(reply)
            for (question, accepts), reply in zip(judges.items(), replies, strict=True)
        }


class UserSampler:
    """Asks one user in any of the ``WAYS``, many questions at a time.

    ``tokens`` and ``seconds`` are of the replies to unseen questions.
    """

    def __init__(self, user: User) -> None:
        self._user = user
        self._said: dict[tuple[object, ...], str] = {}
        self.tokens = dict.fromkeys(WAYS, 0)
        self.seconds = dict.fromkeys(WAYS, 0.0)

    def way(self, name: str) -> Ask:
        """Return the answering function of one way."""
        return lambda prompts, longest: self._ask(name, prompts, longest)

    def _ask(self, name: str, prompts: Sequence[str], longest: int) -> Sequence[str]:
        how = WAYS[name]
        stack = "" if "layers" in how else self._user.stack().digest
        items = () if how.get("memory") is False else tuple(item.id for item in self._user.items())
        keys = {prompt: (stack, items, prompt, longest) for prompt in prompts}
        fresh = [prompt for prompt, key in keys.items() if key not in self._said]
        began = time.perf_counter()
        replies = chat_all(self._user, fresh, longest, **how)
        if longest == LONG:
            self.seconds[name] += time.perf_counter() - began
            self.tokens[name] += sum(reply.usage.completion_tokens for reply in replies)
        self._said |= {
            keys[prompt]: reply.text for prompt, reply in zip(fresh, replies, strict=True)
        }
        return [self._said[key] for key in keys.values()]


def chat_all(
    user: User,
    prompts: Sequence[str],
    longest: int,
    *,
    temperature: float | None = 0,
    **how: Any,
) -> list[Reply]:
    """Return replies to some questions, sixteen at a time. ``None`` is the base's own sampling."""
    ask = partial(user.chat, temperature=temperature, max_tokens=longest, **how)
    with ThreadPoolExecutor(TOGETHER) as pool:
        return list(pool.map(ask, prompts))


def known_to_base(ask: Ask) -> frozenset[str]:
    """Return the general probes that the bare base has right."""
    general = pools().general
    replies = ask([each.question for each in general], GENERAL)
    return frozenset(
        each.question
        for each, reply in zip(general, replies, strict=True)
        if mentions(each.right, reply)
    )


def facts_of(person: Persona, night: int) -> Sequence[Fact]:
    """Return the five facts of a round."""
    first = (night - _FACT_NIGHTS.start) * _FACTS
    return person.facts[first : first + _FACTS]


def simulate_round(user: User, person: Persona, night: int, seed: int) -> Round:
    """Record a round's feedback and return its learns."""
    prompts = list(pools().everyday)
    random.Random(f"{seed} {person.name}").shuffle(prompts)
    match night:
        case 1:
            examples = edits(user, prompts[:_EDITS], person.habit)
        case 2:
            examples = _mixed(user, prompts[_EDITS : 2 * _EDITS], person)
        case 7:
            if person.later is not None and person.later_comment is not None:
                rule = next(item for item in user.items() if item.text == person.comment)
                user.edit_item(rule.id, person.later_comment)
            examples = edits(user, prompts[2 * _EDITS : 3 * _EDITS], person.later or person.habit)
        case 8:
            examples = _restate_facts(user, person.facts)
        case _:
            examples = state_facts(user, facts_of(person, night))
    return Round(tuple(examples), tuple(_learned(user, report) for report in learn(user)))


def learn(user: User) -> list[LearnReport]:
    """Learn all layers with new signals; return no report where there is none."""
    try:
        report = user.learn()
    except NothingToLearn:
        return []
    return [report, *report.above]


def edits(user: User, pairs: Sequence[Example], habit: Habit) -> list[Example]:
    """Ask each question and edit the reply; return questions and wanted answers."""
    wanted = [(prompt, habit.apply(prompt, answer)) for prompt, answer in pairs]
    for reply, (_, text) in zip(
        chat_all(user, [p for p, _ in wanted], _REPLY), wanted, strict=True
    ):
        give(user, reply, edit=text)
    return wanted


def state_facts(user: User, facts: Iterable[Fact]) -> list[Example]:
    """Record facts with their questions and answers, and return these."""
    examples = []
    for fact in facts:
        user.remember(fact.text, questions=fact.questions, answer=fact.answer)
        examples += [(question, fact.answer) for question in fact.questions]
    return examples


def _restate_facts(user: User, facts: Iterable[Fact]) -> list[Example]:
    """Record facts again with the present answers to their questions, and return these."""
    items = {item.text: item.id for item in user.items()}
    examples = []
    for old, new in ((fact, fact.later) for fact in facts if fact.later):
        user.edit_item(items[old.text], new.text, answer=new.answer)
        examples += [(question, new.answer) for question in new.questions]
    return examples


def _mixed(user: User, pairs: Sequence[Example], person: Persona) -> list[Example]:
    """Record four edits, three preferences, two thumbs, two demonstrations and a comment.

    A thumb is an edit where the reply deserves none.
    """
    habit = person.habit
    user.feedback(user.chat(pairs[-1][0], temperature=0, max_tokens=_REPLY), comment=person.comment)
    wanted = edits(user, pairs[:4], habit)
    preferred = [(prompt, habit.apply(prompt, answer)) for prompt, answer in pairs[4:7]]
    for reply, (_, text) in zip(
        chat_all(user, [p for p, _ in preferred], _REPLY), preferred, strict=True
    ):
        give(user, reply, prefer=text)
    for reply, (prompt, answer) in zip(
        chat_all(user, [p for p, _ in pairs[7:9]], LONG), pairs[7:9], strict=True
    ):
        if habit.holds(reply.text):
            user.feedback(reply, rating=1)
            wanted.append((prompt, reply.text))
        else:
            wanted.append((prompt, habit.apply(prompt, answer)))
            give(user, reply, edit=wanted[-1][1])
    shown = [(prompt, habit.apply(prompt, answer)) for prompt, answer in pairs[9:11]]
    for prompt, text in shown:
        user.teach(prompt, text)
    return [*wanted, *preferred, *shown]


def give(user: User, reply: Reply, **feedback: str) -> None:
    """Give feedback on a reply; a thumbs up where the reply already equals the wanted answer."""
    try:
        user.feedback(reply, **feedback)
    except InvalidInput:
        source = {name: text for name, text in feedback.items() if name == "source"}
        user.feedback(reply, rating=1, **source)


def _learned(user: User, report: LearnReport) -> dict[str, Any]:
    """Return the outcome of a learn, and how many lessons and anchors each step reads."""
    recipe = next(
        (each.recipe for each in user.revisions(report.layer) if each.id == report.revision), {}
    )
    return {
        "layer": report.layer,
        "verdict": str(report.verdict),
        "live": report.live,
        "reason": report.reason,
        "seconds": report.seconds,
        "steps": report.steps,
        "lessons": int(recipe.get("batch_size", 0)),
        "anchors": int(recipe.get("kl_prompts", 0)),
    }


def _unchanged(facts: Iterable[Fact]) -> list[Fact]:
    return [fact for fact in facts if fact.later is None]


def _tally(held: Iterable[bool]) -> Tally:
    held = list(held)
    return sum(held), len(held)

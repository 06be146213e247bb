"""How rules and facts enter a prompt. Pure.

Rules join the system message, under a heading that attributes them to the user. Facts stand before
the last question, in the user's own message. Without rules, demonstrations of a question that is
answered from a fact precede that message. An item takes one line, inside quotation marks that it
cannot close.

Invariant: facts change nothing before the last question. So a prompt begins as that of the turn
before it, up to the question of that turn, and what is cached of those tokens is found again.
"""

from __future__ import annotations

import tomllib
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from personalpeft.memory.languages import ENGLISH
from personalpeft.types import Message, Signal

_RULES_HEADING = "The user asked earlier, in their own words:"
# Measured on SmolLM2-135M-Instruct, greedy, with 24 facts and 72 new questions of two groups of
# people (tests/benchmarks/told_facts.toml). Right answers with "The user said" in the system
# message: 38 and 32. In this form: 63 and 57. A demonstration of not knowing gave 31, and a fact as
# a turn of its own 28 to 38. Demonstrations before an earlier turn gave fewer than here.
_FACT_HEADING = "I said:"


@dataclass(frozen=True, slots=True)
class FewShotExample:
    """A fact of no user, a question that it answers, and the answer."""

    fact: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class PromptItems:
    """The rules and facts that are added to a prompt, in order.

    ``language``: that of the demonstrations that facts come with, some 200 tokens; None without.
    """

    rules: Sequence[Signal]
    facts: Sequence[Signal]
    language: str | None = ENGLISH

    @property
    def added_text(self) -> str:
        """All text that ``add_to`` adds, to count its tokens."""
        parts = [_rules_block(self.rules)] if self.rules else []
        if self.facts:
            parts += [message.content for message in self._demonstrations]
            parts.append(self._facts_block)
        return "".join(f"\n\n{part}" for part in parts)

    @property
    def demonstrated(self) -> bool:
        """Whether ``add_to`` adds demonstrations."""
        return bool(self.facts and self._demonstrations)

    @property
    def _demonstrations(self) -> tuple[Message, ...]:
        # A small base imitates them instead of following a rule. Under a rule that wants Spanish,
        # no answer was Spanish with them (15 of 16 facts right). Most were without (9 of 16 right).
        return _demonstration_turns(self.language) if self.language and not self.rules else ()

    @property
    def _facts_block(self) -> str:
        return _facts_block([fact.payload["text"] for fact in self.facts])

    def add_to(self, messages: Sequence[Message], system: str | None) -> tuple[Message, ...]:
        """Return the messages with the items.

        ``system`` is the base's default system text, which precedes rules in a conversation without
        a system message.
        """
        added = tuple(messages)
        if self.facts:
            last = max(at for at, message in enumerate(added) if message.role == "user")
            text = _before_question(self._facts_block, added[last].content)
            asked = replace(added[last], content=text)
            added = (*added[:last], *self._demonstrations, asked, *added[last + 1 :])
        return _add_system_text(added, _rules_block(self.rules), system) if self.rules else added


def quote_line(text: str) -> str:
    """Quote a text on one line. A line end or quotation mark of its own would let it escape."""
    line = "".join(" " if unicodedata.category(each) == "Cc" else each for each in text)
    return '"' + " ".join(line.split()).replace('"', "'") + '"'


def load_demonstrations(language: str) -> tuple[FewShotExample, ...]:
    """Return the demonstrations in a language, none if it has none."""
    text = (resources.files(__package__) / "demonstrations.toml").read_text("utf-8")
    return tuple(FewShotExample(**each) for each in tomllib.loads(text).get(language, ()))


@cache
def _demonstration_turns(language: str) -> tuple[Message, ...]:
    # A base follows the language of demonstrations more than that of the question.
    return tuple(
        message
        for each in load_demonstrations(language)
        for message in (
            Message("user", _before_question(_facts_block([each.fact]), each.question)),
            Message("assistant", each.answer),
        )
    )


def _rules_block(rules: Sequence[Signal]) -> str:
    lines = (f"- {quote_line(rule.payload['text'])}" for rule in rules)
    return "\n".join([_RULES_HEADING, *lines])


def _facts_block(facts: Sequence[str]) -> str:
    # The nearest fact comes first in ``facts`` and last in the prompt, next to the question.
    return "\n".join(f"{_FACT_HEADING} {quote_line(fact)}" for fact in reversed(facts))


def _before_question(facts: str, question: str) -> str:
    return f"{facts}\n\n{question}"


def _add_system_text(
    messages: tuple[Message, ...], text: str, system: str | None
) -> tuple[Message, ...]:
    for index, message in enumerate(messages):
        if message.role == "system":
            joined = replace(message, content=f"{message.content}\n\n{text}")
            return (*messages[:index], joined, *messages[index + 1 :])
    return (Message("system", f"{system}\n\n{text}" if system else text), *messages)

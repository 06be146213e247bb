"""Facts of six personas (``told_facts.toml``): right answers to unseen questions.

Measured at once by retrieval, and after one learn by the layer alone and with both. ``python -m
benchmarks.told_facts --split held_out --learn`` prints a table, from the folder ``tests``. The
prompt and the training were tuned on the development split; the held-out one only evaluates.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

import personalpeft
from personalpeft import User
from personalpeft.learning.data.general_prompts import QuestionBank
from personalpeft.memory.embedder import MiniLM

_MAX_TOKENS = 24
# A question is distant if it shares at most half of its words with each learned form of its fact.
_MIN_DISTANCE = 0.5
_SPLITS = ("development", "held_out")


@dataclass(frozen=True, slots=True)
class ToldFact:
    """One fact. ``is_stated``: its text alone is retrieved; a learn needs question and answer."""

    text: str
    question: str
    answer: str
    accept: tuple[str, ...]
    unseen: tuple[str, ...]
    is_stated: bool


@dataclass(frozen=True, slots=True)
class FactPersona:
    """One persona and its facts."""

    name: str
    facts: tuple[ToldFact, ...]


@dataclass(frozen=True, slots=True)
class Suite:
    """The personas of a split and common prompts.

    ``general`` questions have the words of a right answer. ``untold`` questions have no fact.
    ``other`` prompts are unrelated to all facts.
    """

    tellers: tuple[FactPersona, ...]
    general: tuple[tuple[str, tuple[str, ...]], ...]
    untold: tuple[str, ...]
    other: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one persona's right answers, and of replies that name a fact unasked.

    ``distant`` of the ``unseen`` questions differ from the forms of the lessons; ``asked_distant``
    counts them.
    """

    unseen: int
    distant: int
    asked_distant: int
    general: int
    untold_leaks: int
    other_leaks: int


def load_suite(split: str) -> Suite:
    """Return the personas and prompts of "development" or "held_out"."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    general = next(each for each in data["general"] if each["split"] == split)
    return Suite(
        tuple(
            FactPersona(
                person["name"],
                tuple(
                    ToldFact(
                        each["text"],
                        each["question"],
                        each["answer"],
                        tuple(each["accept"]),
                        tuple(each["unseen"]),
                        each.get("stated", False),
                    )
                    for each in person["facts"]
                ),
            )
            for person in data["people"]
            if person["split"] == split
        ),
        tuple((each["question"], tuple(each["accept"])) for each in general["questions"]),
        tuple(data["untold"][split]),
        tuple(data["other"][split]),
    )


def names_one(words: Iterable[str], reply: str) -> bool:
    """Return whether a reply has one of the words as a word of its own, in any case."""
    text = reply.casefold()
    return any(re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text) for word in words)


def lexical_distance(question: str, forms: Iterable[str]) -> float:
    """Return the Jaccard distance, over words, of a question from the nearest of the forms."""

    def words(text: str) -> set[str]:
        return set(re.findall(r"\w+", text.casefold()))

    asked = words(question)
    return min(1 - len(asked & words(form)) / len(asked | words(form)) for form in forms)


def find_distant(teller: FactPersona, bank: QuestionBank) -> frozenset[str]:
    """Return the unseen questions that differ from every form of their fact's lessons."""
    return frozenset(
        question
        for fact in teller.facts
        for question in fact.unseen
        if lexical_distance(
            question, [fact.question, *bank.find(fact.text, fact.question).paraphrases]
        )
        >= _MIN_DISTANCE
    )


def tally(
    user: User,
    teller: FactPersona,
    suite: Suite,
    distant: frozenset[str],
    *,
    memory: bool,
    temperature: float | None,
) -> Tally:
    """Ask everything in one batch each and count. ``memory``: whether facts are retrieved."""

    def replies(prompts: Sequence[str]) -> list[str]:
        streams = [
            user.stream(
                prompt, memory=memory, temperature=temperature, max_tokens=_MAX_TOKENS, seed=seed
            )
            for seed, prompt in enumerate(prompts)
        ]
        for stream in streams:
            stream.begin()
        return ["".join(stream) for stream in streams]

    asked = [(question, fact) for fact in teller.facts for question in fact.unseen]
    every_answer = [word for fact in teller.facts for word in fact.accept]
    right = [
        question
        for (question, fact), reply in zip(
            asked, replies([question for question, _ in asked]), strict=True
        )
        if names_one(fact.accept, reply)
    ]
    return Tally(
        unseen=len(right),
        distant=sum(question in distant for question in right),
        asked_distant=len(distant),
        general=sum(
            names_one(accept, reply)
            for (_, accept), reply in zip(
                suite.general, replies([question for question, _ in suite.general]), strict=True
            )
        ),
        untold_leaks=sum(names_one(every_answer, reply) for reply in replies(suite.untold)),
        other_leaks=sum(names_one(every_answer, reply) for reply in replies(suite.other)),
    )


def run(split: str, base: str, temperature: float | None, *, learn: bool) -> None:
    """Print a row for each persona and way of answering."""
    suite = load_suite(split)
    bank = QuestionBank(MiniLM())
    for teller in suite.tellers:
        distant = find_distant(teller, bank)
        with (
            tempfile.TemporaryDirectory() as home,
            personalpeft.open(home, base, backend="torch") as runtime,
        ):
            user = runtime.user(teller.name.lower())
            for fact in teller.facts:
                if fact.is_stated and not learn:
                    user.remember(fact.text)
                else:
                    user.remember(fact.text, questions=[fact.question], answer=fact.answer)
            ways = {"bare": False, "retrieval": True}
            if learn:
                click.echo(f"{teller.name:10}{user.learn('memory').verdict}")
                ways = {"layer": False, "both": True}
            for way, memory in ways.items():
                counts = tally(user, teller, suite, distant, memory=memory, temperature=temperature)
                click.echo(f"{teller.name:10}{way:10}{counts}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.told_facts", description=__doc__)
    parser.add_argument("--split", choices=_SPLITS, default="development")
    parser.add_argument("--base", default="smollm2-135m-instruct")
    parser.add_argument("--temperature", type=float, default=0, help="below 0: that of the card")
    parser.add_argument("--learn", action="store_true", help="learn the facts before asking")
    given = parser.parse_args()
    temperature = None if given.temperature < 0 else given.temperature
    run(given.split, given.base, temperature, learn=given.learn)


if __name__ == "__main__":
    main()

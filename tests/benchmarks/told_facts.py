"""Facts of six personas (``told_facts.toml``): right answers to unseen questions.

Measured at once by retrieval, and after one learn by the layer alone and with both. ``python -m
benchmarks.told_facts --split held_out --learn`` prints a table, from the folder ``tests``. The
prompt and the training were tuned on the development split; the held-out one only evaluates.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.homes import temporary_home
from personalpeft import User
from personalpeft.learning.data.question_bank import QuestionBank
from personalpeft.memory.embedder import MiniLM

_MAX_TOKENS = 24
# A question is distant if it shares at most half of its words with each learned form of its fact.
_MIN_DISTANCE = 0.5
_SPLITS = ("development", "held_out")


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


def load_split(split: str) -> dict[str, Any]:
    """Return what the file has of "development" or "held_out".

    ``people`` have facts. Of one that is ``stated`` the text alone is retrieved; a learn needs
    question and answer. ``general`` questions have the words of a right answer. ``untold``
    questions have no fact. ``other`` prompts are unrelated to all facts.
    """
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    (general,) = (each["questions"] for each in data["general"] if each["split"] == split)
    return {
        "people": [person for person in data["people"] if person["split"] == split],
        "general": general,
        "untold": data["untold"][split],
        "other": data["other"][split],
    }


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


def find_distant(teller: Mapping[str, Any], bank: QuestionBank) -> frozenset[str]:
    """Return the unseen questions that differ from every form of their fact's lessons."""
    return frozenset(
        question
        for fact in teller["facts"]
        for question in fact["unseen"]
        if lexical_distance(
            question, [fact["question"], *bank.find(fact["text"], fact["question"]).paraphrases]
        )
        >= _MIN_DISTANCE
    )


def tally(
    user: User,
    teller: Mapping[str, Any],
    suite: Mapping[str, Any],
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

    def right(questions: Sequence[str], accepted: Sequence[Sequence[str]]) -> list[str]:
        """Return the questions whose reply names one of the words that are accepted for it."""
        answered = zip(questions, accepted, replies(questions), strict=True)
        return [question for question, words, reply in answered if names_one(words, reply)]

    asked = [(question, fact["accept"]) for fact in teller["facts"] for question in fact["unseen"]]
    every_answer = [word for fact in teller["facts"] for word in fact["accept"]]
    unseen = right(*zip(*asked, strict=True))
    general = right(
        *zip(*((each["question"], each["accept"]) for each in suite["general"]), strict=True)
    )
    return Tally(
        unseen=len(unseen),
        distant=sum(question in distant for question in unseen),
        asked_distant=len(distant),
        general=len(general),
        untold_leaks=sum(names_one(every_answer, reply) for reply in replies(suite["untold"])),
        other_leaks=sum(names_one(every_answer, reply) for reply in replies(suite["other"])),
    )


def run(split: str, base: str, temperature: float | None, *, learn: bool) -> None:
    """Print a row for each persona and way of answering."""
    suite = load_split(split)
    bank = QuestionBank(MiniLM())
    for teller in suite["people"]:
        distant = find_distant(teller, bank)
        with temporary_home(base, "torch") as runtime:
            user = runtime.user(teller["name"].lower())
            for fact in teller["facts"]:
                if fact.get("stated") and not learn:
                    user.remember(fact["text"])
                else:
                    user.remember(fact["text"], questions=[fact["question"]], answer=fact["answer"])
            ways = {"bare": False, "retrieval": True}
            if learn:
                click.echo(f"{teller['name']:10}{user.learn('memory').verdict}")
                ways = {"layer": False, "both": True}
            for way, memory in ways.items():
                counts = tally(user, teller, suite, distant, memory=memory, temperature=temperature)
                click.echo(f"{teller['name']:10}{way:10}{counts}")


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

"""Personas for ``bench learn``: the style each wants, the facts each states, and their changes.

All data is in ``personas/``: one file each, and ``pools.toml`` with their common questions. A style
has a checker that needs no judge; a right answer to a fact has one of its words. Tests hold the
invariants. A styled answer passes and the plain one fails. No question contains its answer.
Learning uses no general probe.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.styles import LESSONS, UNSEEN, sentences
from personalpeft.errors import InvalidInput, suggest_nearest

_POOLS = "pools"
# A list's numbers are not the numbers that its text mentions.
_NUMBERING = re.compile(r"^\s*(?:step )?\d+[.):][ \t]+(?=\S)", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Habit:
    """A style of answers.

    ``opening`` and ``closing`` frame the answer; ``{question}`` in the opening is the question.

    ``line`` begins each sentence on a line of its own; ``{number}`` in it counts them.
    ``sentences`` is the maximum number.
    """

    opening: str = ""
    closing: str = ""
    line: str = ""
    sentences: int | None = None

    def apply(self, prompt: str, answer: str) -> str:
        """Return a plain answer in this style."""
        said = sentences(answer)[: self.sentences]
        lines = [self._mark(number) + each for number, each in enumerate(said, 1)]
        body = ("\n" if self.line else " ").join(lines)
        return self.opening.replace("{question}", prompt) + body + self.closing

    def holds(self, reply: str) -> bool:
        """Return whether a reply is in this style."""
        opening = re.escape(self.opening.strip()).replace(re.escape("{question}"), r"[^\n]+")
        began = re.match(opening, reply.strip())
        closing = self.closing.strip()
        if began is None or not reply.strip().endswith(closing):
            return False
        body = reply.strip()[began.end() :].removesuffix(closing).strip()
        lines = [each.strip() for each in body.splitlines() if each.strip()]
        if not lines or (self.sentences is not None and len(sentences(body)) > self.sentences):
            return False
        return all(
            each.startswith(self._mark(number).strip()) for number, each in enumerate(lines, 1)
        )

    def _mark(self, number: int) -> str:
        return self.line.replace("{number}", str(number))


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact of a persona.

    ``questions`` are stated with the ``answer``, ``unseen`` are other phrasings.

    ``later`` is the fact that replaces it.
    """

    text: str
    answer: str
    questions: tuple[str, ...]
    unseen: tuple[str, ...]
    right: tuple[str, ...]
    later: Fact | None = None


@dataclass(frozen=True, slots=True)
class Persona:
    """One persona.

    ``comment`` describes the style; ``later`` and ``later_comment`` replace it, or are None.
    """

    name: str
    habit: Habit
    comment: str
    facts: tuple[Fact, ...]
    later: Habit | None = None
    later_comment: str | None = None


@dataclass(frozen=True, slots=True)
class General:
    """A general probe, and the words of which a right answer has one."""

    question: str
    right: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pools:
    """Common questions:

    ``everyday`` ones with plain answers, ``unseen`` ones and ``general`` probes.
    """

    everyday: tuple[tuple[str, str], ...]
    unseen: tuple[str, ...]
    general: tuple[General, ...]


@cache
def load_personas() -> Mapping[str, Persona]:
    """Load all personas by name."""
    folder = Path(__file__).with_name("personas")
    names = sorted({file.stem for file in folder.glob("*.toml")} - {_POOLS})
    return {name: _person(name, _read(name)) for name in names}


def select_personas(names: Sequence[str]) -> tuple[Persona, ...]:
    """Return the named personas, or all.

    Raises:
        InvalidInput: A name is unknown.
    """
    known = load_personas()
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"There is no persona {name!a}.",
                hint=suggest_nearest(name, known, what="person"),
            )
    return tuple(known[name] for name in dict.fromkeys(names)) or tuple(known.values())


@cache
def pools() -> Pools:
    """Load the common questions."""
    data = _read(_POOLS)
    return Pools(
        everyday=(*LESSONS, *((each["prompt"], each["answer"]) for each in data["everyday"])),
        unseen=(*UNSEEN, *data["unseen"]),
        general=tuple(General(each["question"], tuple(each["right"])) for each in data["general"]),
    )


def mentions(words: Sequence[str], reply: str) -> bool:
    """Return whether a reply has one of the words as a word of its own, in any case."""
    text = _NUMBERING.sub("", reply).casefold()
    return any(re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text) for word in words)


def _read(name: str) -> dict[str, Any]:
    file = Path(__file__).with_name("personas") / f"{name}.toml"
    return tomllib.loads(file.read_text("utf-8"))


def _person(name: str, data: Mapping[str, Any]) -> Persona:
    later = Habit(**data["later"]) if "later" in data else None
    facts = tuple(_fact(each) for each in data["facts"])
    return Persona(
        name, Habit(**data["style"]), data["comment"], facts, later, data.get("later_comment")
    )


def _fact(data: Mapping[str, Any]) -> Fact:
    asked = {key: tuple(data[key]) for key in ("questions", "unseen")}

    def said(words: Mapping[str, Any], later: Fact | None) -> Fact:
        right = tuple(words.get("right", (words["answer"],)))
        return Fact(words["text"], words["answer"], **asked, right=right, later=later)

    return said(data, said(data["later"], None) if "later" in data else None)

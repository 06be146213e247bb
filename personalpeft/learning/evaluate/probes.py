"""The generic questions that ship with the package: anchors to hold to while learning, canaries to ask afterwards, and
what nobody has told.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True)
class RegressionProbe:
    """A general question and the words of which a right answer names one."""

    question: str
    right: tuple[str, ...]

    def is_right(self, reply: str) -> bool:
        """Whether the reply names a right word, in any case and as a word of its own."""
        text = reply.casefold()
        return any(
            re.search(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text) for word in self.right
        )


@dataclass(frozen=True, slots=True)
class UnanswerablePrompt:
    """A question about a person, and the words of the topics that it is about."""

    question: str
    topics: tuple[str, ...]

    def is_answered_in(self, texts: str) -> bool:
        """Whether texts speak of one of its topics, and so perhaps answer it."""
        said = texts.casefold()
        return any(re.search(rf"\b{re.escape(topic)}\b", said) for topic in self.topics)


@dataclass(frozen=True, slots=True)
class GeneralPrompts:
    """All generic questions. ``digest`` is that of the file which says them; ``not_told`` answers what is unknown."""

    digest: str
    regularizer_prompts: tuple[str, ...]
    probes: tuple[RegressionProbe, ...]
    unanswerable_prompts: tuple[UnanswerablePrompt, ...]
    refusal_text: str


@cache
def load_general_prompts() -> GeneralPrompts:
    """Those of the package."""
    text = (resources.files(__package__) / "probes.toml").read_text("utf-8")
    data = tomllib.loads(text)
    canaries = tuple(RegressionProbe(c["question"], tuple(c["right"])) for c in data["canaries"])
    unknown = tuple(UnanswerablePrompt(u["question"], tuple(u["about"])) for u in data["unknown"])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return GeneralPrompts(digest, tuple(data["anchors"]), canaries, unknown, data["not_told"])


def general_prompts() -> tuple[str, ...]:
    """Return every general prompt of the package that a base can answer."""
    generic = load_general_prompts()
    return (*generic.regularizer_prompts, *(canary.question for canary in generic.probes))


def is_degenerate(reply: str) -> bool:
    """Whether a reply is no answer at all: empty, or the same few words over and over."""
    words = reply.split()
    if not words:
        return True
    threes = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(threes) >= 9 and len(set(threes)) <= len(threes) // 3

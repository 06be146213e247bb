"""The general prompts that ship with the package, and the cache of their completions.

Completions of the bases that can be installed as a package ship as well.

Regularizer and everyday prompts are used while training (``data/general_replies.py``). Regression
probes are asked afterwards. Unanswerable prompts ask for what no user has stated.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.learning.train.config import BUILD_FORMAT
from personalpeft.memory.words import split_tokens
from personalpeft.types import Sampling, canonical_digest

MAX_REPLY_TOKENS = 24
"""Limit of a reply to a general prompt."""

BASE_SAMPLING = Sampling(max_tokens=MAX_REPLY_TOKENS)
"""How the bare base completes general prompts, and what a candidate is compared with."""

PROBE_SAMPLING = Sampling(max_tokens=2 * MAX_REPLY_TOKENS)
"""How a layer completes general prompts. A learned style may repeat the question before it answers.
With fewer tokens, cut-off answers would count as wrong."""


@dataclass(frozen=True, slots=True)
class RegressionProbe:
    """A general question, and words of which a right answer contains one."""

    question: str
    right: tuple[str, ...]

    def is_right(self, reply: str) -> bool:
        """Return whether the reply contains a right word, in any case and as a whole word."""
        text = reply.casefold()
        words = (re.escape(word.casefold()) for word in self.right)
        return any(re.search(rf"(?<!\w){word}(?!\w)", text) for word in words)


@dataclass(frozen=True, slots=True)
class UnanswerablePrompt:
    """A question about the user, and the words of its topics."""

    question: str
    topics: tuple[str, ...]

    def is_answered_in(self, texts: str) -> bool:
        """Return whether texts mention one of the topics, and so may answer it."""
        text = texts.casefold()
        return any(re.search(rf"\b{re.escape(topic)}\b", text) for topic in self.topics)


@dataclass(frozen=True, slots=True)
class GeneralPrompts:
    """All general prompts, and the answer to the unanswerable ones. ``digest``: of their file."""

    digest: str
    regularizer_prompts: tuple[str, ...]
    everyday_prompts: tuple[str, ...]
    probes: tuple[RegressionProbe, ...]
    unanswerable_prompts: tuple[UnanswerablePrompt, ...]
    refusal_text: str


@cache
def load_general_prompts() -> GeneralPrompts:
    """Return the general prompts of the package."""
    text = (resources.files(__package__) / "probes.toml").read_text("utf-8")
    data = tomllib.loads(text)
    return GeneralPrompts(
        digest=hashlib.sha256(text.encode()).hexdigest(),
        regularizer_prompts=tuple(data["anchors"]),
        everyday_prompts=tuple(data["everyday"]),
        probes=tuple(
            RegressionProbe(each["question"], tuple(each["right"])) for each in data["canaries"]
        ),
        unanswerable_prompts=tuple(
            UnanswerablePrompt(each["question"], tuple(each["about"])) for each in data["unknown"]
        ),
        refusal_text=data["not_told"],
    )


def general_prompts() -> tuple[str, ...]:
    """Return the general questions of the package that have one right answer."""
    prompts = load_general_prompts()
    return (*prompts.regularizer_prompts, *(probe.question for probe in prompts.probes))


@cache
def load_base_replies() -> dict[str, dict[str, str]]:
    """Return the shipped completions under ``BASE_SAMPLING``: by digest of the base, by prompt."""
    text = (resources.files(__package__) / "base_replies.json").read_text("utf-8")
    replies: dict[str, dict[str, str]] = json.loads(text)
    return replies


def is_degenerate(reply: str) -> bool:
    """Return whether a reply is empty or repeats the same few words."""
    words = split_tokens(reply)
    if not words:
        return True
    trigrams = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
    return len(trigrams) >= 9 and len(set(trigrams)) <= len(trigrams) // 3


def open_completion_cache(engine: Engine, folder: Path) -> CompletionCache:
    """Return the cache of general prompts for an engine, stored below ``folder``.

    The file name is a digest of everything that decides the base's completions.
    """
    generic, backend = load_general_prompts(), engine.backend
    name = canonical_digest(
        [BUILD_FORMAT, backend.base.digest, backend.name, backend.description, generic.digest]
    )
    return CompletionCache(
        engine,
        general_prompts(),
        BASE_SAMPLING,
        folder / "spoken" / f"{name[:32]}.json",
        load_base_replies().get(backend.base.digest, {}),
    )

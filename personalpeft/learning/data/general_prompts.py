"""The general prompts that ship with the package, with their completions.

Regularizer and everyday prompts are used while training (``data/batching.py``). Regression
probes are asked afterwards. Unanswerable prompts ask for what no user has stated. English prompts
serve every user. A user who writes in another language of ``prompts/`` has those as well.

Completions of the bases that can be installed as a package ship as well.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.learning.train.config import BUILD_FORMAT
from personalpeft.memory.words import contains_phrase, split_tokens
from personalpeft.types import Message, Sampling, canonical_digest

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
    right: Sequence[str]

    def is_right(self, reply: str) -> bool:
        """Return whether the reply contains a right word, in any case and as a whole word."""
        return any(contains_phrase(reply, word) for word in self.right)


@dataclass(frozen=True, slots=True)
class UnanswerablePrompt:
    """A question about the user, the words of its topics, and the reply to it."""

    question: str
    topics: Sequence[str]
    refusal: str

    def is_answered_in(self, texts: str) -> bool:
        """Return whether texts mention one of the topics, and so may answer it."""
        return any(contains_phrase(texts, topic) for topic in self.topics)


@dataclass(frozen=True, slots=True)
class GeneralPrompts:
    """General prompts of one or more languages. ``digest``: of their files.

    ``templates``: by language other than English, texts around a ``{question}``.
    """

    digest: str
    regularizer_prompts: tuple[str, ...]
    everyday_prompts: tuple[str, ...]
    probes: tuple[RegressionProbe, ...]
    unanswerable_prompts: tuple[UnanswerablePrompt, ...]
    templates: Mapping[str, tuple[str, ...]]

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages other than English."""
        return tuple(self.templates)

    @property
    def questions(self) -> tuple[str, ...]:
        """Those with one right answer."""
        return (*self.regularizer_prompts, *(probe.question for probe in self.probes))

    @property
    def replied_to(self) -> tuple[str, ...]:
        """Those that a stack replies to, to be held to its replies or to be judged by them."""
        return (*self.questions, *self.everyday_prompts)


@cache
def prompt_languages() -> tuple[str, ...]:
    """Return the languages other than English, as ISO 639-1 codes. All have question forms too."""
    files = (resources.files(__package__) / "prompts").iterdir()
    return tuple(sorted(each.name.removesuffix(".toml") for each in files))


@cache
def load_general_prompts(languages: tuple[str, ...] = ()) -> GeneralPrompts:
    """Return the general prompts in English, and then those of some ``prompt_languages``."""
    english = read_data_file("probes.toml")
    texts = [read_data_file("prompts", f"{language}.toml") for language in languages]
    prompts = [tomllib.loads(english), *map(tomllib.loads, texts)]
    # Of the bytes of the files, which builds store. So their keys keep their former names.
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (english, *texts)]
    return GeneralPrompts(
        digest=canonical_digest(digests) if texts else digests[0],
        regularizer_prompts=tuple(text for each in prompts for text in each["anchors"]),
        everyday_prompts=tuple(text for each in prompts for text in each["everyday"]),
        probes=tuple(RegressionProbe(**probe) for each in prompts for probe in each["canaries"]),
        unanswerable_prompts=tuple(
            UnanswerablePrompt(prompt["question"], prompt["about"], each["not_told"])
            for each in prompts
            for prompt in each["unknown"]
        ),
        templates={
            language: tuple(each["templates"])
            for language, each in zip(languages, prompts[1:], strict=True)
        },
    )


def probe_questions() -> tuple[str, ...]:
    """Return the questions of the probes in English.

    They set how near a request must be to a layer's lessons. The questions of the regularizer set
    the scale of similarity itself (``memory/calibration.py``), so they would seem less near.
    """
    return tuple(probe.question for probe in load_general_prompts().probes)


@cache
def load_base_replies() -> dict[str, dict[str, str]]:
    """Return the shipped completions under ``BASE_SAMPLING``: by digest of the base, by prompt."""
    replies: dict[str, dict[str, str]] = json.loads(read_data_file("base_replies.json"))
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
    english, backend = load_general_prompts(), engine.backend
    base = backend.base
    # The base's digest covers neither the system prompt of its card nor the stop tokens.
    prompt = backend.render([Message("user", english.regularizer_prompts[0])])
    parts = [base.digest, prompt, base.card.stop_tokens, backend.name, backend.description]
    name = canonical_digest([BUILD_FORMAT, *parts, english.digest])
    return CompletionCache(
        engine,
        load_general_prompts(prompt_languages()).replied_to,
        BASE_SAMPLING,
        folder / "spoken" / f"{name[:32]}.json",
        load_base_replies().get(base.digest, {}),
    )


@cache
def read_data_file(*path: str) -> str:
    """Return a text file of this package. ``path``: its folders and its name."""
    return resources.files(__package__).joinpath(*path).read_text("utf-8")

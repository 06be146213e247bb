"""The texts that ship with the package: general prompts with their completions, and question forms.

Regularizer and everyday prompts are used while training (``data/batching.py``). Regression
probes are asked afterwards. Unanswerable prompts ask for what no user has stated. English prompts
serve every user. A user who writes in another language of ``prompts/`` has those as well.

Completions of the bases that can be installed as a package ship as well.

Question forms are other wordings of the question that a fact answers, by relation:
``question_forms.toml`` in English, and ``forms/`` in the languages that a user's facts may be in. A
fact belongs to the relation that is nearest to its text and its question by the embedder of memory,
among those that have a form of the question. What stands in the form's slot is the subject of the
fact, and fills the slots of the other forms. A question that has no form gets none: a similar
question may be about another person.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import numpy as np

from personalpeft.engine.completion_cache import CompletionCache
from personalpeft.engine.engine import Engine
from personalpeft.learning.train.config import BUILD_FORMAT
from personalpeft.memory.languages import find_language
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.memory.words import contains_phrase, split_tokens, split_words
from personalpeft.types import Message, Sampling, canonical_digest

MAX_REPLY_TOKENS = 24
"""Limit of a reply to a general prompt."""

BASE_SAMPLING = Sampling(max_tokens=MAX_REPLY_TOKENS)
"""How the bare base completes general prompts, and what a candidate is compared with."""

PROBE_SAMPLING = Sampling(max_tokens=2 * MAX_REPLY_TOKENS)
"""How a layer completes general prompts. A learned style may repeat the question before it answers.
With fewer tokens, cut-off answers would count as wrong."""

_SLOT = "{x}"
# Before and after a question, in any language of the bank.
_PUNCTUATION = "¿?？؟.。। "

# Cosine of MiniLM: the mean for the text and the question.
_MIN_SIMILARITY = 0.25
# For each word of a form: "What is {x} called?" says more about a relation than "What is {x}?".
_WORD_BONUS = 0.1
_CAPITAL_WORDS = frozenset({"I", "I'm", "I've", "I'd", "I'll"})
_SENTENCE_ENDS = ".!?…。！？｡।॥؟۔።"


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
    english = _read("probes.toml")
    texts = [_read("prompts", f"{language}.toml") for language in languages]
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
    replies: dict[str, dict[str, str]] = json.loads(_read("base_replies.json"))
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


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation of the bank.

    ``statements`` and ``questions`` describe it. ``forms`` ask for it, of the user or of what fills
    their slot. ``others`` fill it where a question without an answer is wanted, to which
    ``refusal`` is the reply.
    """

    name: str
    statements: Sequence[str]
    questions: Sequence[str]
    forms: Sequence[str]
    others: Sequence[str]
    refusal: str

    @property
    def has_slot(self) -> bool:
        """Whether any form has a slot."""
        return any(_SLOT in form for form in self.forms)

    def match(self, question: str) -> tuple[int, str] | None:
        """Return how many words of a form a question has, and what fills the form's slot.

        The form with the most words counts. Without a slot the relation's ``questions`` are forms
        too. None if the question has none of them.
        """
        found = []
        body = question.strip(_PUNCTUATION)
        for form in self.forms if self.has_slot else (*self.questions, *self.forms):
            before, slot, after = form.strip(_PUNCTUATION).partition(_SLOT)
            subject = _text_between(before, after, body)
            if subject is not None and bool(subject) == bool(slot):
                found.append((len(split_tokens(before + after)), subject))
        return max(found, default=None)


@dataclass(frozen=True, slots=True)
class QuestionForms:
    """Other wordings of the question about one fact, and the same questions about others."""

    paraphrases: tuple[str, ...] = ()
    unanswerable: tuple[UnanswerablePrompt, ...] = ()


@cache
def load_relations(languages: tuple[str, ...] = ()) -> tuple[Relation, ...]:
    """Return the relations in English, and then those in some other languages."""
    relations = []
    for language in ("", *languages):
        general = load_general_prompts((language,) if language else ())
        refusal = general.unanswerable_prompts[-1].refusal
        for each in tomllib.loads(_read_forms(language))["relations"]:
            defaults = {"questions": each["forms"][:4], "others": ()}
            relations.append(Relation(**defaults | each, refusal=refusal))
    return tuple(relations)


@dataclass(frozen=True, slots=True)
class QuestionTemplate:
    """Text around a question: ``first`` is the question as a sentence begins, ``later`` continues.

    ``english`` is for English questions. ``other`` is for all others, without words or in their
    language.
    """

    english: str
    other: str

    def fill(self, question: str) -> str:
        """Return the template with a question in it."""
        if not _is_english(question):
            return self.other.format(first=question)
        # Without a question mark the rest of the template would read as part of the question.
        question = question if question[-1] in _SENTENCE_ENDS else f"{question}?"
        # A name keeps its capital: forms begin with other words.
        begins_form = question.split(maxsplit=1)[0] in _first_words()
        later = question[:1].lower() + question[1:] if begins_form else question
        return self.english.format(first=question, later=later)


PARAPHRASE_TEMPLATES = (
    QuestionTemplate("Can you tell me: {later}", "… {first}"),
    QuestionTemplate("I forgot. {first}", "– {first}"),
    QuestionTemplate("Quick question: {later}", "({first})"),
    QuestionTemplate("Remind me, {later}", "{first} …"),
    QuestionTemplate("{first} Please tell me.", "~ {first}"),
    QuestionTemplate("Do you know {later}", "* {first}"),
    QuestionTemplate("Hey, {later}", "! {first}"),
    QuestionTemplate("Please answer this: {first}", '"{first}"'),
    QuestionTemplate("One thing: {later}", "> {first}"),
)

TEST_TEMPLATE = QuestionTemplate("So, {later} Just asking.", "{first} {first}")
"""It judges facts. Nothing is trained on it."""


def fill_templates(question: str, by_language: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a question in each of its templates. ``by_language``: ``GeneralPrompts.templates``."""
    texts = [template.fill(question) for template in PARAPHRASE_TEMPLATES]
    if by_language and not _is_english(question):
        others = by_language.get(find_language(question), ())
        texts += [other.replace("{question}", question) for other in others]
    return texts


def paraphrases_digest(languages: tuple[str, ...]) -> str:
    """Return the digest of templates and question forms, which decide what is trained on."""
    templates = (*PARAPHRASE_TEMPLATES, TEST_TEMPLATE)
    texts = [text for each in templates for text in (each.english, each.other)]
    forms = "".join(map(_read_forms, ("", *languages)))
    return canonical_digest([*texts, hashlib.sha256(forms.encode()).hexdigest()])


class QuestionBank:
    """The relations of the package, embedded once.

    Args:
        embedder: The embedder of memory.
        languages: Those other than English that facts may be in.
    """

    def __init__(self, embedder: Embedder, languages: tuple[str, ...] = ()) -> None:
        self._embedder = embedder
        self._relations = load_relations(languages)

    def find(self, text: str, question: str) -> QuestionForms:
        """Return the forms for a fact with this text, which answers the question."""
        text_vector, question_vector = self._embedder.embed([text, question])
        found: list[tuple[float, Relation, str]] = []
        for relation, (statements, questions) in zip(
            self._relations, self._descriptions, strict=True
        ):
            if match := relation.match(question):
                words, subject = match
                similarity = (
                    float(np.max(statements @ text_vector) + np.max(questions @ question_vector))
                    / 2
                )
                if similarity >= _MIN_SIMILARITY:
                    found.append((similarity + _WORD_BONUS * words, relation, subject))
        if not found:
            return QuestionForms()
        _, relation, subject = max(found, key=lambda each: each[0])
        fillable = [form for form in relation.forms if subject or _SLOT not in form]
        paraphrases = dict.fromkeys(form.replace(_SLOT, subject) for form in fillable)
        return QuestionForms(
            tuple(each for each in paraphrases if each.casefold() != question.casefold()),
            tuple(
                UnanswerablePrompt(
                    form.replace(_SLOT, other), (other.casefold(),), relation.refusal
                )
                for other in relation.others
                for form in relation.forms
                if _SLOT in form
            ),
        )

    @cached_property
    def _descriptions(self) -> Sequence[tuple[Vectors, Vectors]]:
        return [
            (self._embedder.embed(each.statements), self._embedder.embed(each.questions))
            for each in self._relations
        ]


def _text_between(before: str, after: str, text: str) -> str | None:
    """Return what a line has between its beginning and its end, or None if it has others.

    Case does not count. The bank has a thousand forms, so each fact would compile as many regular
    expressions.
    """
    end = len(text) - len(after)
    if (
        len(before) > end
        or text[: len(before)].casefold() != before.casefold()
        or text[end:].casefold() != after.casefold()
    ):
        return None
    subject = text[len(before) : end]
    return None if "\n" in subject else subject


def _is_english(text: str) -> bool:
    """Return whether more than half of a text's words are words of the English forms."""
    words = split_words(text.casefold())
    return 2 * sum(word in _words() for word in words) > len(words)


@cache
def _words() -> frozenset[str]:
    forms = (form.replace(_SLOT, " ") for each in load_relations() for form in each.forms)
    return frozenset(word for form in forms for word in split_words(form.casefold()))


@cache
def _first_words() -> frozenset[str]:
    forms = (form for each in load_relations() for form in each.forms)
    return frozenset(form.split(maxsplit=1)[0] for form in forms) - _CAPITAL_WORDS


def _read_forms(language: str) -> str:
    """Return the file of a language, of English where it is empty."""
    return _read("forms", f"{language}.toml") if language else _read("question_forms.toml")


@cache
def _read(*path: str) -> str:
    return resources.files(__package__).joinpath(*path).read_text("utf-8")

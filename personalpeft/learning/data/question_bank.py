"""Other wordings of the question that a fact answers: question forms by relation, and templates.

The forms are in ``question_forms.toml`` in English, and in ``forms/`` in the languages that a
user's facts may be in. A fact belongs to the relation that is nearest to its text and its question
by the embedder of memory, among those that have a form of the question. What stands in the form's
slot is the subject of the fact, and fills the slots of the other forms. A question that has no
form gets none: a similar question may be about another person.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from personalpeft.learning.data.general_prompts import (
    UnanswerablePrompt,
    load_general_prompts,
    read_data_file,
)
from personalpeft.memory.languages import find_language
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.memory.words import split_tokens, split_words
from personalpeft.types import canonical_digest

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
    return (
        read_data_file("forms", f"{language}.toml")
        if language
        else read_data_file("question_forms.toml")
    )

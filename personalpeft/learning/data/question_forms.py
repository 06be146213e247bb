"""Other wordings of the question that a fact answers, from a bank of forms by relation.

The bank is data: ``question_forms.toml`` in English, and ``forms/`` in the languages that a
user's facts may be in. A fact belongs to the relation that is nearest to its
text and its question by the embedder of memory, among those that have a form of the question. What
stands in the form's slot is the subject of the fact, and fills the slots of the other forms. A
question that has no form gets none: a similar question may be about another person.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

import numpy as np

from personalpeft.learning.evaluate.probes import UnanswerablePrompt, load_general_prompts
from personalpeft.memory.conflicts import normalize
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.memory.words import split_tokens, split_words

_SLOT = "{x}"
# Before and after a question, in any language of the bank.
_PUNCTUATION = "¿?？؟.。। "

# Cosine of MiniLM: the mean for the text and the question.
_MIN_SIMILARITY = 0.25
# For each word of a form: "What is {x} called?" says more about a relation than "What is {x}?".
_WORD_BONUS = 0.1
_CAPITAL_WORDS = frozenset({"I", "I'm", "I've", "I'd", "I'll"})


@dataclass(frozen=True, slots=True)
class Relation:
    """One relation of the bank.

    ``statements`` and ``questions`` describe it. ``forms`` ask for it, of the user or of what fills
    their slot. ``others`` fill it where a question without an answer is wanted, to which
    ``refusal`` is the reply.
    """

    statements: tuple[str, ...]
    questions: tuple[str, ...]
    forms: tuple[str, ...]
    others: tuple[str, ...]
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
def form_languages() -> tuple[str, ...]:
    """Return the languages other than English that have relations, as ISO 639-1 codes."""
    folder = resources.files(__package__) / "forms"
    return tuple(sorted(each.name.removesuffix(".toml") for each in folder.iterdir()))


@cache
def load_relations(languages: tuple[str, ...] = ()) -> tuple[Relation, ...]:
    """Return the relations in English, and then those in some other languages."""
    relations = []
    for language in ("", *languages):
        general = load_general_prompts((language,) if language else ())
        refusal = general.unanswerable_prompts[-1].refusal
        relations += [
            Relation(
                statements=tuple(each["statements"]),
                questions=tuple(each.get("questions") or each["forms"][:4]),
                forms=tuple(each["forms"]),
                others=tuple(each.get("others", ())),
                refusal=refusal,
            )
            for each in tomllib.loads(_read(language)).get("relations", ())
        ]
    return tuple(relations)


def forms_digest(languages: tuple[str, ...] = ()) -> str:
    """Return the digest of the bank in English and some other languages."""
    texts = [_read(language) for language in ("", *languages)]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def drop_shared_forms(
    forms: Mapping[tuple[str, str], QuestionForms], answers: Mapping[str, str]
) -> dict[tuple[str, str], QuestionForms]:
    """Return the forms without those that facts with different answers have in common.

    A question that a fact was stated with is a form of that fact.

    Args:
        forms: By fact and question.
        answers: By fact.
    """
    found: dict[str, set[str]] = {}
    for (fact, question), each in forms.items():
        for form in (question, *each.paraphrases):
            found.setdefault(normalize(form), set()).add(normalize(answers[fact]))
    return {
        key: replace(
            each,
            paraphrases=tuple(form for form in each.paraphrases if len(found[normalize(form)]) < 2),
        )
        for key, each in forms.items()
    }


def is_in_bank_language(text: str) -> bool:
    """Return whether more than half of a text's words are words of the bank's forms."""
    words = split_words(text.casefold())
    return 2 * sum(word in _words() for word in words) > len(words)


def begins_form(question: str) -> bool:
    """Return whether forms begin with a question's first word, and it has a capital only there."""
    first = question.split(maxsplit=1)[:1]
    return bool(first) and first[0] in _first_words()


class QuestionBank:
    """The relations of the package, embedded once.

    Args:
        embedder: The embedder of memory.
        languages: Those other than English that facts may be in.
    """

    def __init__(self, embedder: Embedder, languages: tuple[str, ...] = ()) -> None:
        self._embedder = embedder
        self._relations = load_relations(languages)
        self._vectors: Sequence[tuple[Vectors, Vectors]] | None = None

    def find(self, text: str, question: str) -> QuestionForms:
        """Return the forms for a fact with this text, which answers the question."""
        nearest = self._nearest(text, question)
        if nearest is None:
            return QuestionForms()
        relation, subject = nearest
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

    def _nearest(self, text: str, question: str) -> tuple[Relation, str] | None:
        """Return the relation of a fact and what fills the slot of its forms."""
        text_vector, question_vector = self._embedder.embed([text, question])
        best: tuple[float, Relation, str] | None = None
        for relation, (statements, questions) in zip(
            self._relations, self._descriptions(), strict=True
        ):
            match = relation.match(question)
            if match is None:
                continue
            words, subject = match
            similarity = (
                float(np.max(statements @ text_vector) + np.max(questions @ question_vector)) / 2
            )
            score = similarity + _WORD_BONUS * words
            if similarity >= _MIN_SIMILARITY and (best is None or score > best[0]):
                best = score, relation, subject
        return best and best[1:]

    def _descriptions(self) -> Sequence[tuple[Vectors, Vectors]]:
        if self._vectors is None:
            self._vectors = [
                (self._embedder.embed(each.statements), self._embedder.embed(each.questions))
                for each in self._relations
            ]
        return self._vectors


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


@cache
def _words() -> frozenset[str]:
    forms = (form.replace(_SLOT, " ") for each in load_relations() for form in each.forms)
    return frozenset(word for form in forms for word in split_words(form.casefold()))


@cache
def _first_words() -> frozenset[str]:
    forms = (form for each in load_relations() for form in each.forms)
    return frozenset(form.split(maxsplit=1)[0] for form in forms) - _CAPITAL_WORDS


@cache
def _read(language: str) -> str:
    """Return the file of a language, of English where it is empty. Empty if it has none."""
    folder = resources.files(__package__)
    if not language:
        return (folder / "question_forms.toml").read_text("utf-8")
    if language not in form_languages():
        return ""
    return (folder / "forms" / f"{language}.toml").read_text("utf-8")

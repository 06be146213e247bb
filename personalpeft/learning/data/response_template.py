"""Infers the literal template that most answers share: opening, closing and letter case. Pure.

An answer may repeat the request ("You asked: ..."). ``REQUEST_PLACEHOLDER`` stands for it in a
template, and is replaced by the request where the template is applied.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

REQUEST_PLACEHOLDER = "\ufffc"

_MIN_SHARE = 0.75
# A shorter request may well stand in an answer by accident.
_MIN_REQUEST_LENGTH = 6


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """The last message of a prompt and the answer to it."""

    request: str
    answer: str

    @property
    def pattern(self) -> str:
        """The answer with a placeholder where it repeats the request."""
        request = self.request.strip()
        if len(request) < _MIN_REQUEST_LENGTH:
            return self.answer
        return self.answer.replace(request, REQUEST_PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """What most of some answers share literally. The default is no template."""

    opening: str = ""
    closing: str = ""
    letters: Literal["own", "lower", "upper"] = "own"

    def for_request(self, request: str) -> ResponseTemplate:
        """Return the template with the request in place of the placeholder."""
        text = request.strip()
        opening, closing = (
            part.replace(REQUEST_PLACEHOLDER, text) for part in (self.opening, self.closing)
        )
        return ResponseTemplate(opening, closing, self.letters)

    def apply(self, sentence: str, request: str) -> str:
        """Return a plain sentence in this template, as the answer to a request."""
        filled = self.for_request(request)
        if self.letters != "own":
            sentence = sentence.lower() if self.letters == "lower" else sentence.upper()
        return f"{filled.opening}{sentence}{filled.closing}"


NO_TEMPLATE = ResponseTemplate()


def infer_template(answers: Sequence[str]) -> ResponseTemplate:
    """Return the template of at least three of four answers (``PromptResponse.pattern``).

    An opening ends in punctuation ("Ahoy! ", "- "), because mere words are content. A closing
    follows the last sentence, so it begins with a space.
    """
    letters: Literal["own", "lower", "upper"] = "own"
    if answers and sum(map(str.islower, answers)) >= _MIN_SHARE * len(answers):
        letters = "lower"
    elif answers and sum(map(str.isupper, answers)) >= _MIN_SHARE * len(answers):
        letters = "upper"
    opening = re.match(r".*[^\w\s]\s*", _shared_prefix(answers), re.DOTALL)
    suffix = _shared_prefix([answer.rstrip()[::-1] for answer in answers])[::-1]
    closing = re.search(r"\s+\S.*", suffix, re.DOTALL)
    return ResponseTemplate(opening[0] if opening else "", closing[0] if closing else "", letters)


def _shared_prefix(texts: Sequence[str]) -> str:
    """Return the longest prefix of at least three of four texts."""
    prefix = ""
    while True:
        following = Counter(
            text[len(prefix)]
            for text in texts
            if text.startswith(prefix) and len(text) > len(prefix)
        )
        letter, count = following.most_common(1)[0] if following else ("", 0)
        if not letter or count < _MIN_SHARE * len(texts):
            return prefix
        prefix += letter

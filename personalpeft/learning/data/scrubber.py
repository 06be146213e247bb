"""Find personal data in texts before they are trained on, in any language.

Found are what a format or a check digit proves:

- Mail addresses.
- Phone numbers: international ones, and national ones of the given countries (libphonenumber).
- IBANs and card numbers, by their check digits (python-stdnum).
- National numbers of the given countries, such as numbers of taxpayers and of insurance.

Names and postal addresses are not found: no format tells them from other words. Text is replaced by
its kind in brackets, such as ``[phone]``. The same text, countries and version give the same result.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import regex

from personalpeft.errors import InvalidInput, suggest_nearest
from personalpeft.extras import extra_required
from personalpeft.learning.revealing_text import UNSPACED

# Raise it with every change to what is found.
_VERSION = 1

_LETTER = rf"(?!{UNSPACED})[\p{{L}}\p{{M}}\p{{N}}_-]"
_MAIL = regex.compile(rf"(?:{_LETTER}|[.+])+@(?:{_LETTER})+(?:\.(?:{_LETTER})+)+")
_GROUP = regex.compile(r"[A-Za-z0-9]+(?:[./-][A-Za-z0-9]+)*")
_IN_FRACTION = regex.compile(r"\d[.,]$")
_DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
# An IBAN has up to 34 characters, in groups of four.
_MAX_GROUPS = 9
# Dates have eight digits.
_MIN_CHARACTERS, _MIN_DIGITS = 9, 4
_CARD_DIGITS = range(13, 20)


class PersonalDataKind(StrEnum):
    """What was found. Where two overlap, the longer counts, then the first of this list."""

    MAIL = "mail"
    IBAN = "iban"
    CARD = "card"
    PHONE = "phone"
    NATIONAL_NUMBER = "national number"


class LessonPart(StrEnum):
    """The part of a lesson that a text was removed from."""

    PROMPT = "prompt"
    ANSWER = "answer"
    REJECTED = "rejected"
    TEACHER = "teacher"
    """The prompt with the fact, that the answer to a fact's question is distilled from."""


@dataclass(frozen=True, slots=True)
class RemovedText:
    """Personal data that a build replaced in one of its lessons.

    ``message`` numbers the messages of a prompt from 0. ``start`` and ``end`` are characters of the
    text before the replacement.
    """

    signal: str
    part: LessonPart
    message: int
    kind: PersonalDataKind
    start: int
    end: int
    text: str


@dataclass(frozen=True, slots=True)
class PersonalData:
    """One place in a text."""

    kind: PersonalDataKind
    start: int
    end: int


def scrubber_version() -> str:
    """Return the version of what is found. Raises ``MissingPackage``."""
    with extra_required():
        import phonenumbers
        import stdnum
    return f"{_VERSION}, phonenumbers {phonenumbers.__version__}, stdnum {stdnum.__version__}"


def find_personal_data(text: str, countries: Sequence[str]) -> list[PersonalData]:
    """Return the places of personal data in a text, in order. They do not overlap.

    Args:
        text: The text.
        countries: Codes of ISO 3166, such as "DE", whose national numbers are found.

    Raises:
        InvalidInput: A country is unknown.
        MissingPackage: The extra ``scrub`` is not installed.
    """
    found = [*_find_mails(text), *_find_phones(text, countries), *_find_numbers(text, countries)]
    kinds = list(PersonalDataKind)
    kept: list[PersonalData] = []
    for each in sorted(found, key=lambda each: (each.start - each.end, kinds.index(each.kind))):
        if all(each.end <= other.start or other.end <= each.start for other in kept):
            kept.append(each)
    return sorted(kept, key=lambda each: each.start)


def replace_personal_data(text: str, found: Sequence[PersonalData]) -> str:
    """Return a text with what ``find_personal_data`` found in it replaced by its kind."""
    made, end = "", 0
    for each in found:
        made += f"{text[end : each.start]}[{each.kind}]"
        end = each.end
    return made + text[end:]


def _find_mails(text: str) -> Iterator[PersonalData]:
    for match in _MAIL.finditer(text):
        yield PersonalData(PersonalDataKind.MAIL, *match.span())


def _find_phones(text: str, countries: Sequence[str]) -> Iterator[PersonalData]:
    with extra_required():
        from phonenumbers import SUPPORTED_REGIONS, PhoneNumberMatcher
    for country in countries:
        if country not in SUPPORTED_REGIONS:
            raise InvalidInput(
                f"There is no country {country!a}.",
                hint=suggest_nearest(country, SUPPORTED_REGIONS, what="country"),
            )
        for match in PhoneNumberMatcher(text, country):
            if not _IN_FRACTION.search(text[: match.start]):
                yield PersonalData(PersonalDataKind.PHONE, match.start, match.end)


def _find_numbers(text: str, countries: Sequence[str]) -> Iterator[PersonalData]:
    # Of the same length, so that places stay.
    plain = "".join(str(unicodedata.decimal(each, each)) for each in text.translate(_DASHES))
    groups = list(_GROUP.finditer(plain))
    checks = [check for country in countries for check in _national_checks(country)]
    for number, first in enumerate(groups):
        if not any(map(str.isdigit, first[0])):
            continue
        end = first.start() - 1
        for last in groups[number : number + _MAX_GROUPS]:
            if last.start() != end + 1:
                break
            end = last.end()
            if kind := _kind_of_number(plain[first.start() : end], checks):
                yield PersonalData(kind, first.start(), end)


def _kind_of_number(text: str, checks: Sequence[Callable[[str], bool]]) -> PersonalDataKind | None:
    with extra_required():
        from stdnum import iban, luhn
    characters = [each for each in text if each.isalnum()]
    digits = sum(map(str.isdigit, characters))
    if len(characters) < _MIN_CHARACTERS or digits < _MIN_DIGITS:
        return None
    if iban.is_valid(text):
        return PersonalDataKind.IBAN
    if digits == len(characters) in _CARD_DIGITS and luhn.is_valid("".join(characters)):
        return PersonalDataKind.CARD
    return PersonalDataKind.NATIONAL_NUMBER if any(check(text) for check in checks) else None


@cache
def _national_checks(country: str) -> tuple[Callable[[str], bool], ...]:
    """Return the checks of a country's numbers."""
    with extra_required():
        from stdnum.util import get_number_modules
    code = country.lower()
    # The packages of India and Iceland are called in_ and is_.
    packages = (f"stdnum.{code}.", f"stdnum.{code}_.")
    return tuple(
        module.is_valid
        for module in get_number_modules()
        if getattr(module, "__name__", "").startswith(packages)
    )

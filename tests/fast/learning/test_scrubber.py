"""Personal data is replaced before lessons are trained on, where that is switched on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, correct, home_contents, home_unchanged, open_runtime

from personalpeft import InvalidInput, MissingPackage, User
from personalpeft.adapters.formats.packed import unpack
from personalpeft.learning.data.scrubber import (
    LessonPart,
    PersonalDataKind,
    find_personal_data,
    replace_personal_data,
)

PHONE = "+49 151 23456789"
ON = {"scrub": ["DE"]}


def scrub(text: str, *countries: str) -> str:
    return replace_personal_data(text, find_personal_data(text, countries))


def call(user: User, number: str = PHONE) -> list[str]:
    """Record six corrected replies that all contain a phone number."""
    return [
        user.feedback(ask(user, f"question {n}"), edit=f"Ahoy! Call {number} for {n}.")
        for n in range(6)
    ]


@pytest.mark.parametrize(
    ("text", "countries", "scrubbed"),
    [
        ("Mail ada@example.com or jörg@müller.de.", ["US"], "Mail [mail] or [mail]."),
        (
            "メールはada@example.comです。電話03-1234-5678",
            ["JP"],
            "メールは[mail]です。電話[phone]",
        ),
        ("Ruf 030 12345678 an, oder +33 1 42 68 53 00.", ["DE"], "Ruf [phone] an, oder [phone]."),
        ("رقم ٠٣٠ ١٢٣٤٥٦٧٨", ["DE"], "رقم [phone]"),
        ("IBAN DE89 3704 0044 0532 0130 00!", ["US"], "IBAN [iban]!"),
        ("card 4111-1111-1111-1111", ["US"], "card [card]"),
        ("My SSN is 123-45-6789.", ["US"], "My SSN is [national number]."),
        ("My SSN is 123-45-6789.", ["JP"], "My SSN is 123-45-6789."),
        ("Steuer-ID 65 929 970 489", ["DE"], "Steuer-ID [national number]"),
        ("PAN ABCPE1234F", ["IN"], "PAN [national number]"),
    ],
)
def test_numbers_of_many_countries_are_found(
    text: str, countries: list[str], scrubbed: str
) -> None:
    assert scrub(text, *countries) == scrubbed


@pytest.mark.parametrize(
    "text",
    ["On 2024-11-25 we were 1500000.", "Pi is 3.14159265358.", "Take 2 eggs, 10 minutes.", "a@b"],
)
def test_dates_amounts_and_words_stay(text: str) -> None:
    assert scrub(text, "DE", "US") == text


@given(st.text(st.sampled_from("0123456789 -./@+aZé日٣"), max_size=60) | st.text(max_size=40))
def test_any_text_is_read_and_what_was_replaced_is_not_found_again(text: str) -> None:
    found = find_personal_data(text, ["DE", "US"])
    ends = [0, *(place for each in found for place in (each.start, each.end)), len(text)]
    assert ends == sorted(ends)
    kinds = {f"[{kind}]" for kind in PersonalDataKind}
    assert all(scrub(kind, "DE", "US") == kind for kind in kinds)


def test_a_scrubbed_lesson_teaches_what_one_without_the_number_teaches(tmp_path: Path) -> None:
    weights = []
    for name, number, recipe in (("with", PHONE, ON), ("without", "[phone]", None)):
        with open_runtime(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            call(ada, number)
            ada.learn("style", recipe=recipe)
            (revision,) = ada.revisions()
            blob = tmp_path / name / "blobs" / revision.digest[:2] / revision.digest
            pairs = unpack(blob.read_bytes(), source=name).weights
            weights.append({key: (each.a.tolist(), each.b.tolist()) for key, each in pairs.items()})
    assert weights[0] == weights[1]


def test_what_was_replaced_is_listed_and_the_ledger_keeps_it(ada: User) -> None:
    signals = call(ada)
    report = ada.learn("style", recipe=ON)
    # Held-out lessons too: the gate judges like with like.
    assert {each.signal for each in report.removed} == set(signals)
    first = next(each for each in report.removed if each.signal == signals[0])
    assert (first.part, first.kind) == (LessonPart.ANSWER, PersonalDataKind.PHONE)
    text = ada.signals()[0].payload["text"]
    assert text[first.start : first.end] == first.text == PHONE
    assert PHONE in str(report)
    listed = {each.signal.id: each.removed for each in ada.signal_statuses()}
    assert listed[signals[0]] == (first,)


def test_the_fact_that_a_reply_is_distilled_from_is_scrubbed(ada: User) -> None:
    fact = ada.remember(f"My dog sitter has the number {PHONE}.")
    for question in ("What is the number of my dog sitter?", "Which number has my dog sitter?"):
        turn = ada.turn(ask(ada, question))
        # The fake backend writes noise, so the ledger gets a reply that contains the fact.
        helped = ada._services.store.ledger.add_turn(
            ada.id,
            messages=turn.messages,
            reply=f"It is {PHONE}.",
            stack=turn.stack,
            sampling=turn.sampling,
            usage=turn.usage,
            finish_reason="stop",
            used=[fact],
        )
        ada.feedback(helped.id, rating=1)
    report = ada.learn("memory", recipe=ON, accept=True)
    assert {each.part for each in report.removed} == {LessonPart.ANSWER, LessonPart.TEACHER}
    assert {each.text for each in report.removed} == {PHONE}


def test_nothing_is_replaced_unless_it_is_switched_on(ada: User) -> None:
    call(ada)
    report = ada.learn()
    assert report.removed == ()
    (revision,) = ada.revisions()
    assert not {"scrub", "scrubber"} & revision.recipe.keys()
    assert all(each.removed == () for each in ada.signal_statuses())


def test_a_build_depends_on_the_scrubber_and_can_be_repeated(tmp_path: Path) -> None:
    inputs = []
    for name, recipe in (("on", ON), ("off", None)):
        with open_runtime(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            # Without any personal data.
            correct(ada, 5)
            revision = ada.learn("style", recipe=recipe).revision
            assert revision
            inputs.append(ada.revisions()[0].inputs)
            assert ada.reproduce(revision).equal
            assert ("scrubber" in ada.revisions()[0].recipe) == (name == "on")
    assert inputs[0] != inputs[1]


def test_a_forgotten_turn_leaves_no_text_that_was_replaced_in_later_ones(
    ada: User, home: Path
) -> None:
    reply = ask(ada, f"My number is {PHONE}.")
    later = ask(ada, "And now?", conversation_id=reply.conversation_id)
    ada.feedback(later, edit="Ahoy! Now.")
    correct(ada, 6)
    report = ada.learn("style", recipe=ON, accept=True)
    assert PHONE in {each.text for each in report.removed}
    ada.forget(reply.turn_id, rebuild=False)
    rows, _ = home_contents(home)
    assert not [row for row in rows if PHONE in row]


@pytest.mark.parametrize("country", ["XX", "de", "Germany"])
def test_an_unknown_country_is_refused_and_changes_nothing(
    ada: User, home: Path, country: str
) -> None:
    correct(ada, 5)
    with home_unchanged(home), pytest.raises(InvalidInput):
        ada.learn("style", recipe={"scrub": [country]})


def test_without_the_extra_a_learn_names_it_and_changes_nothing(
    ada: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(ada, 5)
    monkeypatch.setitem(sys.modules, "phonenumbers", None)
    with home_unchanged(home), pytest.raises(MissingPackage) as raised:
        ada.learn("style", recipe=ON)
    assert "personalpeft[scrub]" in raised.value.hint

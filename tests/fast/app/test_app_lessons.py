"""Where each signal went, and when a layer answers, on the command line."""

from __future__ import annotations

import json

from app_makers import Place


def test_lessons_say_where_each_signal_went_and_who_gave_it(place: Place) -> None:
    assert place.run("lessons").exit_code == 7
    assert not place.home.exists()
    place.run("ask", "How do I boil an egg?")
    place.run("feedback", "--edit", "Six minutes.")
    edit = place.run("feedback", "--edit", "Eight minutes.").stdout.strip()
    rule = place.run("feedback", "--comment", "Be brief.").stdout.strip()
    shown = place.run("lessons").stdout
    assert [line.split()[0] for line in shown.splitlines()[1:]] == [edit, rule]
    assert "to be learned" in shown
    assert "a comment is a rule that acts on the next turn" in shown
    everything = json.loads(place.run("lessons", "--all", "--json").stdout)
    assert [each["use"] for each in everything["lessons"]] == [
        "superseded",
        "to be learned",
        "acts now",
    ]
    assert {each["signal"]["source"] for each in everything["lessons"]} == {"person"}


def test_a_scope_is_set_and_shown_with_the_stack(place: Place) -> None:
    for number in range(5):
        place.run("teach", f"Write to friend {number}.", f"Dear {number}", "--skill", "email")
    assert place.run("learn", "--layer", "skill.email").exit_code == 0
    (layer,) = json.loads(place.run("stack", "--json").stdout)["layers"]
    assert layer["scope"] == "near"
    assert place.run("scope", "skill.email", "never").stdout == "skill.email never\n"
    assert "never" in place.run("stack").stdout.splitlines()[1].split()
    assert place.run("scope", "skill.email", "sometimes").exit_code == 2
    assert place.run("scope", "skill.none", "near").exit_code == 3

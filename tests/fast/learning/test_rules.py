"""A rule that the style has taken over is not said in every prompt any more; whatever else happens to the style, it is."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, correct

from personalpeft import User
from personalpeft.learning.evaluate.measures import RuleGain, internalized_rules


def comment(ada: User, text: str = "Begin each answer with Ahoy!") -> str:
    return ada.feedback(ask(ada, "hello"), comment=text)


def said(ada: User, **more: object) -> set[str]:
    ask(ada, "What is a boat?", **more)
    return set(ada.turns(1)[0].used)


def learned(ada: User, monkeypatch: pytest.MonkeyPatch, base: float, layer: float) -> None:
    """The style learns, and a rule explains so much of what was held back: to the base, and to the layer."""
    found = cycle((base, layer))
    with monkeypatch.context() as patch:
        patch.setattr(
            "personalpeft.learning.evaluate.evaluation.logprob_gain", lambda *_: next(found)
        )
        correct(ada)
        assert ada.learn("style", accept=True).live


def test_what_the_style_says_by_itself_is_not_said_in_the_prompt_as_well(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = comment(ada)
    assert said(ada) == {rule}
    learned(ada, monkeypatch, 0.8, 0.1)
    assert said(ada) == set()
    assert rule in {item.id for item in ada.items()}


def test_where_the_style_does_not_answer_as_it_is_the_rule_is_said(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = comment(ada)
    learned(ada, monkeypatch, 0.8, 0.1)
    assert said(ada, layers=[]) == {rule}
    ada.set_weight("style", 0.5)
    assert said(ada) == {rule}
    ada.set_weight("style", 1.0)
    assert said(ada) == set()
    ada.rollback("style", None)
    assert said(ada) == {rule}


def test_a_rule_that_came_later_or_is_worded_anew_is_said(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = comment(ada)
    learned(ada, monkeypatch, 0.8, 0.1)
    later = comment(ada, "Use no brackets.")
    assert said(ada) == {later}
    anew = ada.edit_item(rule, "Begin each answer with Hello!")
    assert said(ada) == {later, anew.id}


def test_what_a_rule_explains_is_measured_and_kept_with_the_revision(ada: User) -> None:
    rule = comment(ada)
    correct(ada)
    report = ada.learn("style", accept=True)
    assert set(report.scores["rules"]) == {rule}
    assert set(report.scores["rules"][rule]) == {"base", "layer"}
    head = ada.revisions("style")[-1]
    assert said(ada) == {rule} - internalized_rules(head)


@given(base=st.floats(-2, 0.04), layer=st.floats(-2, 2))
def test_a_rule_that_never_explained_anything_is_not_taken_over(base: float, layer: float) -> None:
    assert not RuleGain(base, layer).internalized


@given(base=st.floats(0.1, 5), share=st.floats(0.3, 2))
def test_a_rule_that_still_explains_much_is_not_taken_over(base: float, share: float) -> None:
    assert not RuleGain(base, share * base).internalized
    assert RuleGain(base, 0.2 * base).internalized

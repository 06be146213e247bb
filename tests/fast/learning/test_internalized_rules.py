"""A rule that the style has internalized leaves the prompt, and returns whenever the style does not
apply.
"""

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


def prompt_items(ada: User, **more: object) -> set[str]:
    ask(ada, "What is a boat?", **more)
    return set(ada.turns(1)[0].used)


def learn_with_gain(
    ada: User, monkeypatch: pytest.MonkeyPatch, base: float, layer: float, edits: int = 24
) -> None:
    """Learn the style while a rule's gain is ``base`` for the base and ``layer`` for the layer."""
    found = cycle((base, layer))
    with monkeypatch.context() as patch:
        patch.setattr(
            "personalpeft.learning.evaluate.evaluation.logprob_gain", lambda *_: next(found)
        )
        correct(ada, edits)
        assert ada.learn("style", accept=True).live


def test_internalized_rule_leaves_the_prompt(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = comment(ada)
    assert prompt_items(ada) == {rule}
    learn_with_gain(ada, monkeypatch, 0.8, 0.1)
    assert prompt_items(ada) == set()
    assert rule in {item.id for item in ada.items()}


def test_rule_stays_in_the_prompt_on_thin_evidence(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = comment(ada)
    learn_with_gain(ada, monkeypatch, 0.8, 0.0, edits=12)
    assert prompt_items(ada) == {rule}


def test_rule_returns_where_the_style_is_off_reweighted_or_rolled_back(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = comment(ada)
    learn_with_gain(ada, monkeypatch, 0.8, 0.1)
    assert prompt_items(ada, layers=[]) == {rule}
    ada.set_weight("style", 0.5)
    assert prompt_items(ada) == {rule}
    ada.set_weight("style", 1.0)
    assert prompt_items(ada) == set()
    ada.rollback("style", None)
    assert prompt_items(ada) == {rule}


def test_later_or_edited_rule_is_in_the_prompt(ada: User, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = comment(ada)
    learn_with_gain(ada, monkeypatch, 0.8, 0.1)
    later = comment(ada, "Use no brackets.")
    assert prompt_items(ada) == {later}
    edited = ada.edit_item(rule, "Begin each answer with Hello!")
    assert prompt_items(ada) == {later, edited.id}


def test_gain_of_each_rule_is_measured_and_kept_with_the_revision(ada: User) -> None:
    rule = comment(ada)
    correct(ada)
    report = ada.learn("style", accept=True)
    assert set(report.scores["rules"]) == {rule}
    assert set(report.scores["rules"][rule]) == {"base", "layer", "lessons"}
    head = ada.revisions("style")[-1]
    assert prompt_items(ada) == {rule} - internalized_rules(head)


@given(base=st.floats(-2, 0.04), layer=st.floats(-2, 2))
def test_rule_without_gain_on_the_base_is_not_internalized(base: float, layer: float) -> None:
    assert not RuleGain(base, layer, 6).internalized


@given(base=st.floats(0.1, 5), share=st.floats(0.3, 2))
def test_rule_with_remaining_gain_on_the_layer_is_not_internalized(
    base: float, share: float
) -> None:
    assert not RuleGain(base, share * base, 6).internalized
    assert RuleGain(base, 0.2 * base, 6).internalized

"""A home does what a plain model of it does, in every order of acts, closes, crashes and restores.

The model is a set of ids for each user and kind. A crash is a copy of the files of a home that is
open: nothing may depend on closing it.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections import defaultdict
from pathlib import Path

import pytest
from crash_makers import check_heads, find_problems, orders
from crash_operations import contents_of, open_home
from example_counts import examples
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import personalpeft
from personalpeft import NothingToLearn, User

USERS = st.sampled_from(["ada", "bo"])
NUMBERS = st.integers(0, 1000)
_STEPS = 50


class HomeMachine(RuleBasedStateMachine):
    """Compares a home with the ids that its users were promised."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="personalpeft-crash-"))
        self.runtime = open_home(self.folder)
        self.model: dict[str, set[str]] = defaultdict(set)
        self.copied: dict[str, set[str]] | None = None
        self.erased: set[str] = set()

    def teardown(self) -> None:
        assert find_problems(self.runtime) == []
        check_heads(self.runtime)
        self.runtime.close()
        shutil.rmtree(self.folder)

    def pick(self, key: str, number: int) -> str | None:
        known = sorted(self.model.get(key, ()))
        return known[number % len(known)] if known else None

    @rule(name=USERS, number=NUMBERS)
    def chat(self, name: str, number: int) -> None:
        reply = self.runtime.user(name).chat(f"question {number}", temperature=0, max_tokens=8)
        self.model[f"{name} turn"].add(reply.turn_id)

    @rule(name=USERS, number=NUMBERS, rating=st.sampled_from([-1, 1, None]))
    def give_feedback(self, name: str, number: int, rating: int | None) -> None:
        turn = self.pick(f"{name} turn", number)
        if turn is not None:
            user = self.runtime.user(name)
            signal = (
                user.feedback(turn, edit=f"Ahoy! Answer {number}. Arrr!")
                if rating is None
                else user.feedback(turn, rating=rating)
            )
            self.model[f"{name} signal"].add(signal)

    @rule(name=USERS, number=NUMBERS)
    def remember(self, name: str, number: int) -> None:
        self.model[f"{name} signal"].add(self.runtime.user(name).remember(f"Fact {number}."))

    @rule(name=USERS)
    def learn(self, name: str) -> None:
        user = self.runtime.user(name)
        try:
            report = user.learn()
        except NothingToLearn:
            return
        if report.revision is not None:
            self.model[f"{name} revision"].add(report.revision)

    @rule(name=USERS)
    def roll_back(self, name: str) -> None:
        user = self.runtime.user(name)
        for entry in user.stack().entries[:1]:
            user.rollback(user_layer(user, entry.revision))

    @rule(name=USERS, number=NUMBERS, kind=st.sampled_from(["turn", "signal"]))
    def forget(self, name: str, number: int, kind: str) -> None:
        item = self.pick(f"{name} {kind}", number)
        if item is None:
            return
        report = self.runtime.user(name).forget(item)
        erased = {*report.turns, *report.signals, *report.revisions}
        assert item in erased
        self.erased |= erased
        for key in (f"{name} turn", f"{name} signal", f"{name} revision"):
            self.model[key] -= erased
        built = (each.revision for each in report.rebuilt)
        self.model[f"{name} revision"] |= {each for each in built if each is not None}

    @rule()
    def back_up(self) -> None:
        self.runtime.maintenance.back_up(self.folder / "copies", keep=1)
        self.copied = copy.deepcopy(self.model)

    @precondition(lambda self: self.copied is not None)
    @rule()
    def restore(self) -> None:
        assert self.copied is not None
        self.runtime.close()
        home = self.folder / "home"
        report = personalpeft.restore(self.folder / "copies", home, replace=True)
        if report.replaced is not None:
            shutil.rmtree(report.replaced)
        self.runtime = open_home(self.folder)
        found = {key: set(ids) for key, ids in contents_of(self.runtime).items()}
        for key, ids in self.copied.items():
            assert not found.get(key, set()) & self.erased
            # A revision that is erased again may be one that was erased by a learn since.
            if not key.endswith("revision"):
                assert ids - self.erased <= found.get(key, set())
        self.model = defaultdict(set, found)

    @rule()
    def reopen(self) -> None:
        self.runtime.close()
        self.runtime = open_home(self.folder)

    @rule()
    def crash(self) -> None:
        after = self.folder / "after"
        shutil.copytree(self.folder / "home", after)
        self.runtime.close()
        shutil.rmtree(self.folder / "home")
        after.rename(self.folder / "home")
        self.runtime = open_home(self.folder)

    @invariant()
    def has_what_was_promised_and_nothing_that_was_forgotten(self) -> None:
        found = {key: set(ids) for key, ids in contents_of(self.runtime).items()}
        assert {key: ids for key, ids in found.items() if ids} == {
            key: ids for key, ids in self.model.items() if ids
        }


def user_layer(user: User, revision: str) -> str:
    """Return the layer of a revision."""
    (layer,) = (each.layer for each in user.revisions() if each.id == revision)
    return layer


@pytest.mark.exhaustive
def test_a_home_keeps_what_its_model_keeps() -> None:
    settings = examples(
        orders(), stateful_step_count=_STEPS, suppress_health_check=list(HealthCheck), deadline=None
    )
    run_state_machine_as_test(HomeMachine, settings=settings)

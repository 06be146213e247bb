"""Who leaves when a slot is needed, against a model that keeps a plain list of uses."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from personalpeft.serving.residency import Residency

SLOTS = 3
KEYS = st.sampled_from("abcdef")


class Comparison(RuleBasedStateMachine):
    """Uses and ends uses as an engine does, and keeps in ``uses`` in which order keys were last used."""

    def __init__(self) -> None:
        super().__init__()
        self.residency = Residency(SLOTS)
        self.uses: list[str] = []
        self.pins: Counter[str] = Counter()

    @rule(key=KEYS)
    def use(self, key: str) -> None:
        if key not in self.uses:
            idle = [k for k in self.uses if not self.pins[k]]
            if len(self.uses) == SLOTS and not idle:
                with pytest.raises(LookupError, match="all 3 slots"):
                    self.residency.make_room()
                return
            leaving = self.residency.make_room()
            assert leaving == (idle[0] if len(self.uses) == SLOTS else None)
            if leaving is not None:
                self.residency.forget(leaving)
                self.uses.remove(leaving)
        else:
            self.uses.remove(key)
        self.residency.pin(key)
        self.uses.append(key)
        self.pins[key] += 1

    @precondition(lambda self: self.pins.total() > 0)
    @rule(data=st.data())
    def end_a_use(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins.elements())))
        self.residency.let_go(key)
        self.pins[key] -= 1

    @invariant()
    def holds_what_was_used_last_and_never_more_than_fits(self) -> None:
        assert len(self.uses) <= SLOTS
        assert {key for key in "abcdef" if key in self.residency} == set(self.uses)


TestResidencyAgainstAModel = Comparison.TestCase

"""Eviction from slots and host memory matches models made of plain lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from personalpeft.engine.adapter_cache import AdapterCache
from personalpeft.lru_cache import LRUCache
from personalpeft.types import Stack

SLOTS = 3
KEYS = st.sampled_from("abcdef")


@dataclass(frozen=True)
class SizedStack:
    """A stack in host memory."""

    key: str
    nbytes: int


class AdapterCacheMachine(RuleBasedStateMachine):
    """Use and release slots as the batching loop does.

    ``uses`` lists the keys from the least to the most recently used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.slots = AdapterCache(SLOTS)
        self.uses: list[str] = []
        self.coming: list[str] = []
        self.pins: Counter[str] = Counter()

    @rule(wanted=st.lists(KEYS, max_size=6))
    def assign(self, wanted: list[str]) -> None:
        claims = self.slots.reserve((key, Stack(key)) for key in wanted)
        assert list(claims) == list(dict.fromkeys(wanted))[:SLOTS]
        for load, key in zip(
            self.slots.allocate(claims), [c for c in claims if c not in self.uses], strict=False
        ):
            assert (load.key, load.stack) == (key, Stack(key))
            idle = [
                k
                for k in self.uses
                if k not in self.coming and not self.pins[k] and k not in claims
            ]
            if len(self.uses) == SLOTS:
                assert load.evicted == idle[0]
                self.uses.remove(idle[0])
            else:
                assert load.evicted is None
            self.uses.append(key)
            self.coming.append(key)
        # A reserved key without a slot could not get one.
        if set(claims) - set(self.uses):
            assert len(self.uses) == SLOTS
            assert all(k in self.coming or self.pins[k] or k in claims for k in self.uses)

    @precondition(lambda self: self.coming)
    @rule(data=st.data(), fine=st.booleans())
    def load(self, data: st.DataObject, fine: bool) -> None:
        key = data.draw(st.sampled_from(self.coming))
        assert not self.slots.is_ready(key)
        self.coming.remove(key)
        self.uses.remove(key)
        if fine:
            self.slots.mark_ready(key)
            self.uses.append(key)
        else:
            self.slots.remove(key)

    @precondition(lambda self: set(self.uses) - set(self.coming))
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(set(self.uses) - set(self.coming))))
        self.slots.pin(key)
        self.pins[key] += 1
        self._mark_used(key)

    @precondition(lambda self: self.pins.total() > 0)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.pins.elements())))
        self.slots.unpin(key)
        self.pins[key] -= 1
        self._mark_used(key)

    def _mark_used(self, key: str) -> None:
        self.uses.remove(key)
        self.uses.append(key)

    @invariant()
    def slots_hold_the_last_used_and_never_too_many(self) -> None:
        assert list(self.slots.keys) == self.uses
        assert len(self.uses) <= SLOTS
        assert {key for key in "abcdef" if self.slots.is_ready(key)} == set(self.uses) - set(
            self.coming
        )
        assert all(self.slots.is_ready(key) for key in self.pins.elements())
        self.slots.check_integrity(self.pins)


TestSlotsAgainstAModel = AdapterCacheMachine.TestCase
TestSlotsAgainstAModel.settings = examples(30)


@given(
    limit=st.integers(0, 20),
    acts=st.lists(st.tuples(KEYS, st.one_of(st.none(), st.integers(0, 12))), max_size=40),
)
def test_host_memory_holds_the_last_used_and_never_too_many_bytes(
    limit: int, acts: list[tuple[str, int | None]]
) -> None:
    cache = LRUCache[str, SizedStack](limit, lambda stack: stack.nbytes)
    kept = dict[str, int]()
    for key, size in acts:
        if size is None:
            assert cache.get(key) == (SizedStack(key, kept[key]) if key in kept else None)
            if key in kept:
                kept[key] = kept.pop(key)
            continue
        left = cache.put(key, SizedStack(key, size))
        kept.pop(key, None)
        gone = 0
        if size <= limit:
            while sum(kept.values()) + size > limit:
                del kept[next(iter(kept))]
                gone += 1
            kept[key] = size
        assert left == gone
        assert cache.weight == sum(kept.values()) <= limit

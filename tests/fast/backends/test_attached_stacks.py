"""What is attached under which key: never too much at once, and each loaded once, however many threads are at it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeAlias

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.backends.attached_stacks import AttachedStacks

SLOTS, KEYS, THREADS = 3, "abcde", 4
Act: TypeAlias = tuple[Literal["put", "fail", "drop"], str]


class Failed(Exception):
    pass


# eq=False: what is loaded twice is two.
@dataclass(eq=False)
class Thing:
    key: str
    given_back: int = 0


class Shop:
    """Loads things, and knows which nobody has given back."""

    def __init__(self) -> None:
        self.attached = AttachedStacks[Thing](SLOTS)
        self._turn = threading.Lock()
        self.out: set[Thing] = set()
        self.loading: dict[str, int] = dict.fromkeys(KEYS, 0)
        # Calls that may give something back which is not noted here yet.
        self.giving = 0
        self.faults: list[str] = []

    def act(self, act: Act) -> None:
        what, key = act
        if what in ("put", "fail"):
            with suppress(RuntimeError, Failed):
                self.attached.put(key, lambda: self._load(key, fails=what == "fail"))
        else:
            self._given_back(lambda: self.attached.drop(key))

    def _load(self, key: str, *, fails: bool) -> Thing:
        thing = Thing(key)
        with self._turn:
            self.out.add(thing)
            self.loading[key] += 1
            if self.loading[key] > 1:
                self.faults.append(f"{key} is loaded twice at once")
            if len(self.out) > SLOTS + self.giving:
                self.faults.append(f"{len(self.out)} at once")
        time.sleep(0.0005)
        with self._turn:
            self.loading[key] -= 1
            if fails:
                self.out.remove(thing)
        if fails:
            raise Failed
        return thing

    def _given_back(self, act: Callable[[], Thing | None]) -> None:
        with self._turn:
            self.giving += 1
        thing = act()
        with self._turn:
            self.giving -= 1
            if thing is not None:
                self.note(thing)

    def note(self, thing: Thing) -> None:
        thing.given_back += 1
        self.out.discard(thing)
        if thing.given_back > 1:
            self.faults.append(f"{thing.key} was given back twice")


acts = st.tuples(st.sampled_from(["put", "put", "fail", "drop"]), st.sampled_from(KEYS))


@examples(60)
@given(st.lists(st.lists(acts, max_size=12), min_size=THREADS, max_size=THREADS))
def test_whatever_threads_do_there_is_never_too_much_and_each_thing_is_given_back_once(
    work: list[list[Act]],
) -> None:
    shop = Shop()

    def all_of(acts: list[Act]) -> None:
        for act in acts:
            shop.act(act)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(all_of, acts) for acts in work]:
            done.result()
    assert shop.faults == []
    for thing in shop.attached.clear():
        shop.note(thing)
    assert shop.faults == []
    assert not shop.out


def test_different_keys_are_loaded_side_by_side() -> None:
    attached = AttachedStacks[str](2)
    both = threading.Barrier(2, timeout=10)

    def load(key: str) -> str:
        both.wait()
        return key

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(attached.put, key, lambda key=key: load(key)) for key in "ab"]:
            done.result()
    assert [attached.get(key) for key in "ab"] == ["a", "b"]


def test_one_key_asked_for_twice_is_loaded_once_and_one_that_fails_is_tried_by_the_next() -> None:
    attached = AttachedStacks[int](1)
    begun, may = threading.Event(), threading.Event()
    loads: list[int] = []

    def fails() -> int:
        begun.set()
        assert may.wait(10)
        raise Failed

    def load() -> int:
        loads.append(len(loads))
        return len(loads)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(attached.put, "a", fails)
        assert begun.wait(10)
        others = [pool.submit(attached.put, "a", load) for _ in range(2)]
        time.sleep(0.05)
        assert not loads
        may.set()
        with pytest.raises(Failed):
            first.result()
        for other in others:
            other.result()
    assert loads == [0]
    assert attached.get("a") == 1


def test_what_is_being_loaded_takes_its_slot_and_a_failure_frees_it() -> None:
    attached = AttachedStacks[str](1)
    begun, may = threading.Event(), threading.Event()

    def fails() -> str:
        begun.set()
        assert may.wait(10)
        raise Failed

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attached.put, "a", fails)
        assert begun.wait(10)
        with pytest.raises(RuntimeError, match="taken"):
            attached.put("b", lambda: "b")
        may.set()
        with pytest.raises(Failed):
            first.result()
    attached.put("b", lambda: "b")
    assert attached.get("b") == "b"

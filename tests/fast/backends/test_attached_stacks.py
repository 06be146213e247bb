"""Attached stacks never exceed the slots, and concurrent threads load each key once."""

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


class LoadFailed(Exception):
    pass


# eq=False: two loads are two objects.
@dataclass(eq=False)
class LoadedStack:
    key: str
    releases: int = 0


class CountingLoader:
    """Loads stacks and tracks which were not released."""

    def __init__(self) -> None:
        self.attached = AttachedStacks[LoadedStack](SLOTS)
        self._turn = threading.Lock()
        self.out: set[LoadedStack] = set()
        self.loading: dict[str, int] = dict.fromkeys(KEYS, 0)
        # Calls in progress may release a stack that is not recorded yet.
        self.giving = 0
        self.faults: list[str] = []

    def perform(self, act: Act) -> None:
        what, key = act
        if what in ("put", "fail"):
            with suppress(RuntimeError, LoadFailed):
                self.attached.put(key, lambda: self._load(key, fails=what == "fail"))
        else:
            self._record_release(lambda: self.attached.drop(key))

    def _load(self, key: str, *, fails: bool) -> LoadedStack:
        stack = LoadedStack(key)
        with self._turn:
            self.out.add(stack)
            self.loading[key] += 1
            if self.loading[key] > 1:
                self.faults.append(f"{key} is loaded twice at once")
            if len(self.out) > SLOTS + self.giving:
                self.faults.append(f"{len(self.out)} at once")
        time.sleep(0.0005)
        with self._turn:
            self.loading[key] -= 1
            if fails:
                self.out.remove(stack)
        if fails:
            raise LoadFailed
        return stack

    def _record_release(self, drop: Callable[[], LoadedStack | None]) -> None:
        with self._turn:
            self.giving += 1
        stack = drop()
        with self._turn:
            self.giving -= 1
            if stack is not None:
                self.release(stack)

    def release(self, stack: LoadedStack) -> None:
        stack.releases += 1
        self.out.discard(stack)
        if stack.releases > 1:
            self.faults.append(f"{stack.key} was released twice")


acts = st.tuples(st.sampled_from(["put", "put", "fail", "drop"]), st.sampled_from(KEYS))


@examples(60)
@given(st.lists(st.lists(acts, max_size=12), min_size=THREADS, max_size=THREADS))
def test_concurrent_threads_stay_within_the_slots_and_release_each_stack_once(
    work: list[list[Act]],
) -> None:
    loader = CountingLoader()

    def run_acts(acts: list[Act]) -> None:
        for perform in acts:
            loader.perform(perform)

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run_acts, acts) for acts in work]:
            done.result()
    assert loader.faults == []
    for stack in loader.attached.clear():
        loader.release(stack)
    assert loader.faults == []
    assert not loader.out


def test_different_keys_load_in_parallel() -> None:
    attached = AttachedStacks[str](2)
    both = threading.Barrier(2, timeout=10)

    def load(key: str) -> str:
        both.wait()
        return key

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(attached.put, key, lambda key=key: load(key)) for key in "ab"]:
            done.result()
    assert [attached.get(key) for key in "ab"] == ["a", "b"]


def test_one_key_is_loaded_once_and_a_failed_load_is_retried_by_the_next_caller() -> None:
    attached = AttachedStacks[int](1)
    started, proceed = threading.Event(), threading.Event()
    loads: list[int] = []

    def fails() -> int:
        started.set()
        assert proceed.wait(10)
        raise LoadFailed

    def load() -> int:
        loads.append(len(loads))
        return len(loads)

    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(attached.put, "a", fails)
        assert started.wait(10)
        others = [pool.submit(attached.put, "a", load) for _ in range(2)]
        time.sleep(0.05)
        assert not loads
        proceed.set()
        with pytest.raises(LoadFailed):
            first.result()
        for other in others:
            other.result()
    assert loads == [0]
    assert attached.get("a") == 1


def test_a_running_load_occupies_its_slot_and_a_failure_frees_it() -> None:
    attached = AttachedStacks[str](1)
    started, proceed = threading.Event(), threading.Event()

    def fails() -> str:
        started.set()
        assert proceed.wait(10)
        raise LoadFailed

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(attached.put, "a", fails)
        assert started.wait(10)
        with pytest.raises(RuntimeError, match="taken"):
            attached.put("b", lambda: "b")
        proceed.set()
        with pytest.raises(LoadFailed):
            first.result()
    attached.put("b", lambda: "b")
    assert attached.get("b") == "b"

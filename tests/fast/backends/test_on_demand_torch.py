"""Torch beside another backend is loaded for training and scoring, and released afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from backend_makers import random_stack, session_spec

from personalpeft.backends.base import Backend, Continuation
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.backends.vllm.on_demand_torch import OnDemandTorch
from personalpeft.base_models.types import Base

ITEMS = [Continuation((1, 2, 3), (4, 5))]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """For each load of torch, whether it was released."""
    made: list[threading.Event] = []

    class CountedBackend(TorchBackend):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.gone = threading.Event()
            made.append(self.gone)

        def close(self) -> None:
            super().close()
            self.gone.set()

    monkeypatch.setattr("personalpeft.backends.torch.backend.TorchBackend", CountedBackend)
    return made


@pytest.fixture
def on_demand(tiny_base: Base, loads: list[threading.Event]) -> Iterator[OnDemandTorch]:
    on_demand = OnDemandTorch(tiny_base, cache=None)
    yield on_demand
    on_demand.close()
    assert all(gone.is_set() for gone in loads)


def test_repeated_scores_of_a_gate_load_torch_once(
    on_demand: OnDemandTorch, torch_tiny: Backend, loads: list[threading.Event]
) -> None:
    stacks = [None, random_stack(torch_tiny, 1), random_stack(torch_tiny, 2)]
    first = [on_demand.score(ITEMS, stack) for stack in stacks]
    assert [on_demand.score(ITEMS, stack) for stack in stacks] == first
    assert len({scores[0].logp for scores in first}) == 3
    assert len(loads) == 1


def test_torch_is_released_some_time_after_the_last_scores(
    tiny_base: Base, loads: list[threading.Event]
) -> None:
    on_demand = OnDemandTorch(tiny_base, cache=None, linger=0.05)
    on_demand.score(ITEMS, None)
    assert loads[0].wait(20)
    on_demand.score(ITEMS, None)
    on_demand.close()
    assert [gone.is_set() for gone in loads] == [True, True]


def test_torch_is_released_with_the_last_session(
    on_demand: OnDemandTorch, torch_tiny: Backend, loads: list[threading.Event]
) -> None:
    one, two = (
        on_demand.session(session_spec(torch_tiny), None),
        on_demand.session(session_spec(torch_tiny), None),
    )
    one.close()
    assert not loads[0].is_set()
    two.close()
    assert loads[0].is_set()


def test_all_sessions_run_at_once_on_any_layers_below(
    on_demand: OnDemandTorch, torch_tiny: Backend
) -> None:
    sessions = [
        on_demand.session(session_spec(torch_tiny, base_key=f"{n}"), random_stack(torch_tiny, n))
        for n in range(12)
    ]
    on_demand.score(ITEMS, random_stack(torch_tiny, 20))
    for session in sessions:
        session.close()

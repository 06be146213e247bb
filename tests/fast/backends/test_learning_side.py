"""Torch beside another backend: there while something learns or is scored, loaded once for it, and gone afterwards."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from backend_makers import composed, spec

from personalpeft.backends.base import Backend, Continuation
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.backends.training_backend import TrainingBackend
from personalpeft.base_models.types import Base

ITEMS = [Continuation((1, 2, 3), (4, 5))]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Event]:
    """For each time that torch was loaded, whether it was let go of."""
    made: list[threading.Event] = []

    class Counted(TorchBackend):
        def __init__(self, *given: Any, **more: Any) -> None:
            super().__init__(*given, **more)
            self.gone = threading.Event()
            made.append(self.gone)

        def close(self) -> None:
            super().close()
            self.gone.set()

    monkeypatch.setattr("personalpeft.backends.torch.backend.TorchBackend", Counted)
    return made


@pytest.fixture
def side(tiny_base: Base, loads: list[threading.Event]) -> Iterator[TrainingBackend]:
    side = TrainingBackend(tiny_base, cache=None)
    yield side
    side.close()
    assert all(gone.is_set() for gone in loads)


def test_a_gate_that_scores_again_and_again_loads_torch_once(
    side: TrainingBackend, torch_tiny: Backend, loads: list[threading.Event]
) -> None:
    stacks = [None, composed(torch_tiny, 1), composed(torch_tiny, 2)]
    first = [side.score(ITEMS, stack) for stack in stacks]
    assert [side.score(ITEMS, stack) for stack in stacks] == first
    assert len({scores[0].logp for scores in first}) == 3
    assert len(loads) == 1


def test_a_while_after_the_last_scores_torch_goes(
    tiny_base: Base, loads: list[threading.Event]
) -> None:
    side = TrainingBackend(tiny_base, cache=None, linger=0.05)
    side.score(ITEMS, None)
    assert loads[0].wait(20)
    side.score(ITEMS, None)
    side.close()
    assert [gone.is_set() for gone in loads] == [True, True]


def test_torch_goes_with_the_last_session(
    side: TrainingBackend, torch_tiny: Backend, loads: list[threading.Event]
) -> None:
    one, two = side.session(spec(torch_tiny), None), side.session(spec(torch_tiny), None)
    one.close()
    assert not loads[0].is_set()
    two.close()
    assert loads[0].is_set()


def test_as_many_learn_at_once_as_there_are_whatever_lies_below_them(
    side: TrainingBackend, torch_tiny: Backend
) -> None:
    sessions = [
        side.session(spec(torch_tiny, base_key=f"{n}"), composed(torch_tiny, n)) for n in range(12)
    ]
    side.score(ITEMS, composed(torch_tiny, 20))
    for session in sessions:
        session.close()

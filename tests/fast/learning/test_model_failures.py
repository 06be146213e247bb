"""What the model fails at while one person learns is said in an error with a way out, and costs a step at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, everything, opened
from test_practice import SOON, Judge, half

from personalpeft import Runtime, ServingFailed, User

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."


@contextmanager
def nothing_is_recorded(home: Path) -> Iterator[None]:
    """No row of the database changes; what the next learn goes on from lies in files."""
    before, _ = everything(home)
    try:
        yield
    finally:
        assert everything(home)[0] == before


@pytest.fixture
def ada(runtime: Runtime) -> User:
    user = runtime.user("ada")
    correct(user, 6)
    return user


@pytest.fixture
def broken(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a method of the backend fail once so many calls went well."""
    backend = type(runtime.engine().backend)

    def breaks(name: str, error: Exception, *, after: int = 0) -> None:
        good, calls = getattr(backend, name), iter(range(after))

        def failing(*given: Any, **more: Any) -> Any:
            if next(calls, None) is None:
                raise error
            return good(*given, **more)

        monkeypatch.setattr(backend, name, failing)

    return breaks


@pytest.mark.parametrize(
    ("work", "error"),
    [
        ("session", RuntimeError(NO_MEMORY)),
        ("advance", MemoryError()),
        ("advance", RuntimeError("an illegal memory access")),
        ("advance", OSError("no such device")),
        ("score", RuntimeError("CUDA out of memory. Tried to allocate 7 bytes.")),
    ],
    ids=repr,
)
def test_it_is_said_in_our_own_error_and_nothing_that_was_said_or_built_changes(
    ada: User, home: Path, broken: Callable[..., None], work: str, error: Exception
) -> None:
    broken(work, error)
    with nothing_is_recorded(home), pytest.raises(ServingFailed) as raised:
        ada.learn()
    assert raised.value.__cause__ is error
    is_short = isinstance(error, MemoryError) or "alloc" in str(error)
    assert raised.value.out_of_memory == is_short
    assert raised.value.hint


def test_what_was_done_before_it_is_gone_on_from_to_the_same_bytes(
    tmp_path: Path,
    runtime: Runtime,
    ada: User,
    broken: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken("advance", MemoryError(), after=5)
    with pytest.raises(ServingFailed) as raised:
        ada.learn()
    assert raised.value.out_of_memory
    assert raised.value.hint
    monkeypatch.undo()
    steps: list[float] = []
    report = ada.learn(
        progress=lambda stage, done: steps.append(done) if stage == "Learning" else None
    )
    assert report.live
    assert len(steps) == report.steps - 5
    with opened(tmp_path / "other") as other:
        correct(other.user("ada"), 6)
        assert other.user("ada").learn().revision == report.revision


def test_what_lies_below_stays_where_a_layer_above_fails(
    ada: User, broken: Callable[..., None]
) -> None:
    for number in range(6):
        ada.teach(f"Write {number}.", f"Dear {number}", skill="email")
    broken("session", MemoryError(), after=1)
    report = ada.learn()
    assert report.live
    assert [(each.layer, each.error) for each in report.above] == [("skill.email", "ServingFailed")]


def test_a_mistake_of_ours_and_one_of_the_caller_pass_as_what_they_are(
    ada: User, home: Path, broken: Callable[..., None]
) -> None:
    def fails(stage: str, done: float) -> None:
        if stage == "Learning":
            raise RuntimeError("the caller's own")

    with nothing_is_recorded(home), pytest.raises(RuntimeError, match="the caller's own"):
        ada.learn(progress=fails)
    broken("advance", KeyError("what no one thought of"))
    with nothing_is_recorded(home), pytest.raises(KeyError):
        ada.learn()


@pytest.mark.parametrize("work", ["session", "score"])
def test_a_practice_says_it_too(
    ada: User, home: Path, broken: Callable[..., None], work: str
) -> None:
    broken(work, RuntimeError(NO_MEMORY))
    with nothing_is_recorded(home), pytest.raises(ServingFailed) as raised:
        ada.practice("email", verifier=Judge(half), **SOON)
    assert raised.value.out_of_memory


def test_a_step_of_a_practice_says_it_and_what_was_done_before_is_gone_on_from(
    ada: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft.backends import fake

    session, good, calls = fake._FakeSession, fake._FakeSession.step, iter(range(9))

    def failing(self: Any, *given: Any) -> float:
        if next(calls, None) is None:
            raise MemoryError
        return good(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(session, "step", failing)
        with (
            nothing_is_recorded(home),
            pytest.raises(ServingFailed) as raised,
        ):
            ada.practice("email", verifier=Judge(half), **SOON)
    assert raised.value.out_of_memory
    assert raised.value.hint


def test_a_stack_that_there_is_no_memory_for_is_said_to_who_chats(
    ada: User, runtime: Runtime, broken: Callable[..., None]
) -> None:
    assert ada.learn().live
    runtime.engine().clear_caches()
    broken("stage", RuntimeError(NO_MEMORY))
    with pytest.raises(ServingFailed) as raised:
        ask(ada)
    assert raised.value.out_of_memory

"""A failure of the model during a learn raises an error with a hint and costs at most one step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, home_contents, open_runtime
from test_practice import SOON, RecordingVerifier, passes_half

from personalpeft import Runtime, ServingFailed, User
from personalpeft.learning.train import loop

NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes."


@contextmanager
def ledger_unchanged(home: Path) -> Iterator[None]:
    """Check that no row of the database changes. Checkpoints lie in files."""
    before, _ = home_contents(home)
    try:
        yield
    finally:
        assert home_contents(home)[0] == before


@pytest.fixture
def ada(runtime: Runtime) -> User:
    user = runtime.user("ada")
    correct(user, 6)
    return user


@pytest.fixture
def break_backend(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes a backend method fail once after a number of calls."""
    backend = type(runtime.engine().backend)

    def break_method(name: str, error: Exception, *, after: int = 0) -> None:
        good, calls = getattr(backend, name), iter(range(after))

        def failing(*given: Any, **more: Any) -> Any:
            if next(calls, None) is None:
                raise error
            return good(*given, **more)

        monkeypatch.setattr(backend, name, failing)

    return break_method


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
def test_failure_raises_a_library_error_and_changes_no_record(
    ada: User, home: Path, break_backend: Callable[..., None], work: str, error: Exception
) -> None:
    break_backend(work, error)
    with ledger_unchanged(home), pytest.raises(ServingFailed) as raised:
        ada.learn()
    assert raised.value.__cause__ is error
    is_short = isinstance(error, MemoryError) or "alloc" in str(error)
    assert raised.value.out_of_memory == is_short
    assert raised.value.hint


def test_learn_resumes_after_a_failure_to_the_same_bytes(
    tmp_path: Path,
    runtime: Runtime,
    ada: User,
    break_backend: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Each step has a checkpoint, as where steps are slow.
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    break_backend("advance", MemoryError(), after=5)
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
    with open_runtime(tmp_path / "other") as other:
        correct(other.user("ada"), 6)
        assert other.user("ada").learn().revision == report.revision


def test_layers_below_stay_live_where_a_layer_above_fails(
    ada: User, break_backend: Callable[..., None]
) -> None:
    for number in range(6):
        ada.teach(f"Write {number}.", f"Dear {number}", skill="email")
    break_backend("session", MemoryError(), after=1)
    report = ada.learn()
    assert report.live
    assert [(each.layer, each.error) for each in report.above] == [("skill.email", "ServingFailed")]


def test_programming_error_and_callers_error_pass_unchanged(
    ada: User, home: Path, break_backend: Callable[..., None]
) -> None:
    def fails(stage: str, done: float) -> None:
        if stage == "Learning":
            raise RuntimeError("the caller's own")

    with ledger_unchanged(home), pytest.raises(RuntimeError, match="the caller's own"):
        ada.learn(progress=fails)
    break_backend("advance", KeyError("what no one thought of"))
    with ledger_unchanged(home), pytest.raises(KeyError):
        ada.learn()


@pytest.mark.parametrize("work", ["session", "score"])
def test_practice_reports_the_failure_too(
    ada: User, home: Path, break_backend: Callable[..., None], work: str
) -> None:
    break_backend(work, RuntimeError(NO_MEMORY))
    with ledger_unchanged(home), pytest.raises(ServingFailed) as raised:
        ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
    assert raised.value.out_of_memory


def test_practice_resumes_after_a_failed_step(
    ada: User, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft.backends import fake

    session, good, calls = fake.FakeSession, fake.FakeSession.step, iter(range(9))

    def failing(self: Any, *given: Any) -> float:
        if next(calls, None) is None:
            raise MemoryError
        return good(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(session, "step", failing)
        with (
            ledger_unchanged(home),
            pytest.raises(ServingFailed) as raised,
        ):
            ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
    assert raised.value.out_of_memory
    assert raised.value.hint


def test_chat_reports_a_stack_that_exceeds_memory(
    ada: User, runtime: Runtime, break_backend: Callable[..., None]
) -> None:
    assert ada.learn().live
    runtime.engine().clear_caches()
    break_backend("stage", RuntimeError(NO_MEMORY))
    with pytest.raises(ServingFailed) as raised:
        ask(ada)
    assert raised.value.out_of_memory

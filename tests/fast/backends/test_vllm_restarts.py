"""A vLLM server that is started anew while a home is open is told everything again, and only where it still has the base."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from backend_makers import adapter, attach, composed, row, written
from vllm_double import Double, Open, failed, said

from personalpeft.backends.base import Backend
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import BaseMismatch, InvalidInput, ServingFailed
from personalpeft.types import Message, Sampling, Stack, StackEntry

pytestmark = pytest.mark.exhaustive


def another(double: Double) -> None:
    """Is started anew on another model of the same shape."""
    double.restart()
    double.logprob = -3.0


def the_right_one(double: Double) -> None:
    double.restart()
    double.logprob, double.spelled, double.bases = -1.0, None, ["base"]


def admitted(backend: Backend, stack: str | None) -> int:
    number = backend.admit(row(backend, "hello", stack))
    assert number is not None
    return number


def refused(backend: Backend, numbers: Sequence[int]) -> list[Exception]:
    """What these rows fail at. None of them is answered with anything."""
    found: dict[int, Exception] = {}
    while len(found) < len(numbers):
        for piece in backend.step():
            assert piece.error is not None, f"a row was answered with {piece.text!r}"
            found[piece.index] = piece.error
            backend.remove(piece.index)
    return [found[number] for number in numbers]


def refusals(backend: Backend, *stacks: str | None) -> list[Exception]:
    """What rows on these stacks, asked all at once, fail at."""
    return refused(backend, [admitted(backend, stack) for stack in stacks])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda double: setattr(double, "logprob", -3.0),
        lambda double: setattr(double, "spelled", [1, 2]),
    ],
    ids=["finds its words less likely", "splits text otherwise"],
)
def test_nobody_is_answered_by_another_model_and_the_right_one_heals_by_itself(
    double: Double, open_on: Open, wrong: Callable[[Double], None]
) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    before = said(backend, "one"), said(backend, None)
    double.restart()
    wrong(double)
    for stack in ("one", None):
        (error,) = refusals(backend, stack)
        assert isinstance(error, BaseMismatch)
        assert "--model" in error.hint
    with pytest.raises(BaseMismatch):
        attach(backend, "two", composed(backend, 2))
    assert not double.known
    the_right_one(double)
    assert (said(backend, "one"), said(backend, None)) == before
    attach(backend, "two", composed(backend, 2))
    assert said(backend, "two")


def test_all_who_find_their_stacks_lost_at_once_wait_for_one_look(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double, rows=9)
    for seed in range(3):
        attach(backend, f"s{seed}", composed(backend, seed))
    stacks = [*(f"s{seed}" for seed in range(3)), "s0", "s1", "s0", None, None, None]
    rows = [row(backend, "hello", stack) for stack in stacks]
    before = [reply.text for reply in written(backend, rows)]
    # So slow that all of them have come before the first knows more.
    double.load_seconds = 0.5
    another(double)
    double.asked.clear()
    assert {type(error) for error in refusals(backend, *stacks)} == {BaseMismatch}
    assert double.times("/tokenize") == 1
    the_right_one(double)
    double.asked.clear()
    assert [reply.text for reply in written(backend, rows)] == before
    assert double.times("/tokenize") == 1


def test_who_comes_while_the_server_is_looked_at_is_not_answered_before(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    double.token_seconds = 0.05
    another(double)
    double.asked.clear()
    numbers = [admitted(backend, "one")]
    while not double.times("/v1/completions") > 1:
        assert not backend.step()
    # The trial is being written now.
    numbers += [admitted(backend, stack) for stack in ("one", None)]
    assert {type(error) for error in refused(backend, numbers)} == {BaseMismatch}


def test_a_stack_that_was_just_told_to_another_model_is_taken_back_at_once(
    double: Double, open_on: Open
) -> None:
    """The server is replaced between the look at it and the load."""
    backend = open_on(double)
    told = composed(backend, 1)

    def replaced(name: str) -> None:
        double.loaded = lambda name: None
        path = double.known[name]
        another(double)
        double.known[name] = path

    double.loaded = replaced
    with pytest.raises(BaseMismatch):
        attach(backend, "one", told)
    assert not double.known
    # The same where the load was that of the bare stack, right after a look that went well.
    the_right_one(double)
    double.loaded = lambda name: (
        replaced(name) if name == backend._registry.bare_base.name else None
    )
    (error,) = refusals(backend, None)
    assert isinstance(error, ServingFailed)
    assert not double.known
    the_right_one(double)
    attach(backend, "one", told)
    assert said(backend, "one") != said(backend, None)


def test_a_stack_that_was_lost_alone_costs_no_look(double: Double, open_on: Open) -> None:
    backend = open_on(double)
    attach(backend, "one", composed(backend, 1))
    whole = said(backend, "one")
    del double.known[backend._attached.get("one").name]
    double.asked.clear()
    assert said(backend, "one") == whole
    assert double.times("/tokenize") == 0


def test_a_server_that_calls_the_same_base_otherwise_is_told_again(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double)
    before = said(backend, None)
    double.restart()
    double.bases = ["renamed"]
    assert said(backend, None) == before
    backend.close()


def test_a_base_that_is_gone_by_its_name_is_said_to_be_that(double: Double, open_on: Open) -> None:
    backend = open_on(double, model="base")
    double.restart()
    double.bases = ["other"]
    (error,) = refusals(backend, None)
    assert isinstance(error, InvalidInput)
    assert "'base'" in str(error)
    the_right_one(double)
    assert said(backend, None)


def test_a_user_hears_that_the_server_has_another_base(
    double: Double, open_on: Open, tiny_base: Base
) -> None:
    asked = Request(
        "ada", (Message("user", "hello"),), Stack(tiny_base.digest, ()), Sampling(max_tokens=4)
    )
    engine = Engine(
        open_on(double), read_adapter=lambda digest: pytest.fail("no adapter was asked for")
    )
    try:
        before = engine.complete([asked])
        another(double)
        with pytest.raises(BaseMismatch):
            engine.complete([asked])
        the_right_one(double)
        assert engine.complete([asked]) == before
    finally:
        engine.close()


def test_closing_while_the_server_is_looked_at_leaves_nothing_there(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    double.token_seconds = 0.2
    double.restart()
    backend.admit(row(backend, "hello"))
    while not double.known:
        backend.step()
    backend.close()
    assert not double.known
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_servers_that_find_stacks_themselves_are_looked_at_again_after_a_reply_broke_off(
    double: Double, open_on: Open, tmp_path: Path
) -> None:
    """They never lose a name, so that nothing else tells that another one may answer."""
    place = tmp_path / "shared"
    double.resolver, double.updates = place, False
    backend = open_on(double, folder=place, resolves=True)
    before = said(backend, None)
    another(double)
    double.breaks_off.append(backend._registry.bare_base.name)
    number = admitted(backend, None)
    error = failed(backend)
    backend.remove(number)
    assert isinstance(error, ServingFailed)
    for _ in range(2):
        assert [type(error) for error in refusals(backend, None)] == [BaseMismatch]
    the_right_one(double)
    assert said(backend, None) == before
    looks = double.times("/tokenize")
    assert said(backend, None) == before
    assert double.times("/tokenize") == looks


# Loads


def test_loads_go_side_by_side(double: Double, open_on: Open) -> None:
    backend = open_on(double, slots=4)
    double.load_seconds = 1.0
    stacks = {f"s{seed}": backend.stage(composed(backend, seed)) for seed in range(4)}
    loading = [threading.Thread(target=backend.attach, args=each) for each in stacks.items()]
    began = time.monotonic()
    for each in loading:
        each.start()
    for each in loading:
        each.join()
    assert time.monotonic() - began < 3.0
    double.load_seconds = 0.0
    assert len({said(backend, key) for key in stacks}) == 4


def test_a_load_whose_key_is_detached_ends_at_once_and_leaves_nothing(
    double: Double, open_on: Open
) -> None:
    backend = open_on(double, slots=1)
    double.load_seconds = 2.0
    ended: list[Exception] = []

    def load() -> None:
        try:
            attach(backend, "one", composed(backend, 1))
        except ServingFailed as error:
            ended.append(error)

    loading = threading.Thread(target=load)
    double.asked.clear()
    loading.start()
    while not double.times("/v1/load_lora_adapter"):
        time.sleep(0.01)
    began = time.monotonic()
    backend.detach("one")
    loading.join()
    assert time.monotonic() - began < 1.0
    assert isinstance(ended[0], ServingFailed)
    double.load_seconds = 0.0
    attach(backend, "two", composed(backend, 2))
    assert said(backend, "two")


def test_an_engine_that_closes_does_not_wait_for_a_load_that_hangs(
    double: Double, open_on: Open, tiny_base: Base
) -> None:
    backend = open_on(double, timeout=60.0)
    engine = Engine(backend, read_adapter=lambda digest: adapter(backend, 1))
    double.load_seconds = 10.0
    double.asked.clear()
    ended: list[Exception] = []

    def warm() -> None:
        try:
            engine.preload(Stack(tiny_base.digest, (StackEntry("style", "style@1", "12" * 32),)))
        except ServingFailed as error:
            ended.append(error)

    warming = threading.Thread(target=warm)
    warming.start()
    while not double.times("/v1/load_lora_adapter"):
        time.sleep(0.01)
    began = time.monotonic()
    engine.close()
    warming.join()
    assert time.monotonic() - began < 4.0
    assert isinstance(ended[0], ServingFailed)

"""A vLLM server that restarts while a home is open gets its stacks again if it has the same base."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from backend_makers import attach, generate, in_thread, random_adapter, random_stack, row
from vllm_double import Open, VllmDouble, bare_request, generate_text, next_error

from personalpeft.backends.base import Backend
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine
from personalpeft.errors import BaseMismatch, InvalidInput, ServingFailed
from personalpeft.types import Stack, StackEntry

pytestmark = pytest.mark.exhaustive


def replace_base(double: VllmDouble) -> None:
    """Restart on another model of the same shape."""
    double.restart()
    double.logprob = -3.0


def restore_base(double: VllmDouble) -> None:
    double.restart()
    double.logprob, double.tokenization, double.bases = -1.0, None, ["base"]


def admitted(backend: Backend, stack: str | None) -> int:
    number = backend.admit(row(backend, "hello", stack))
    assert number is not None
    return number


def errors_of(backend: Backend, numbers: Sequence[int]) -> list[Exception]:
    """Return the errors of these rows. The rows must produce no text."""
    found: dict[int, Exception] = {}
    while len(found) < len(numbers):
        for piece in backend.step():
            assert piece.error is not None, f"a row was answered with {piece.text!r}"
            found[piece.index] = piece.error
            backend.remove(piece.index)
    return [found[number] for number in numbers]


def all_errors(backend: Backend, *stacks: str | None) -> list[Exception]:
    """Return the errors of rows on these stacks that are admitted at once."""
    return errors_of(backend, [admitted(backend, stack) for stack in stacks])


@pytest.mark.parametrize(
    "break_server",
    [
        lambda double: setattr(double, "logprob", -3.0),
        lambda double: setattr(double, "tokenization", [1, 2]),
    ],
    ids=["finds its words less likely", "splits text otherwise"],
)
def test_another_model_never_replies_and_the_right_one_recovers(
    double: VllmDouble, open_on: Open, break_server: Callable[[VllmDouble], None]
) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    before = generate_text(backend, "one"), generate_text(backend, None)
    double.restart()
    break_server(double)
    for stack in ("one", None):
        (error,) = all_errors(backend, stack)
        assert isinstance(error, BaseMismatch)
        assert "base's folder" in error.hint
    with pytest.raises(BaseMismatch):
        attach(backend, "two", random_stack(backend, 2))
    assert not double.adapters
    restore_base(double)
    assert (generate_text(backend, "one"), generate_text(backend, None)) == before
    attach(backend, "two", random_stack(backend, 2))
    assert generate_text(backend, "two")


def test_concurrent_rows_with_lost_stacks_share_one_check(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double, rows=9)
    for seed in range(3):
        attach(backend, f"s{seed}", random_stack(backend, seed))
    stacks = [*(f"s{seed}" for seed in range(3)), "s0", "s1", "s0", None, None, None]
    rows = [row(backend, "hello", stack) for stack in stacks]
    before = [reply.text for reply in generate(backend, rows)]
    # So slow that all of them have arrived before the first check ends.
    double.load_seconds = 0.5
    replace_base(double)
    double.requests.clear()
    assert {type(error) for error in all_errors(backend, *stacks)} == {BaseMismatch}
    assert double.request_count("/tokenize") == 1
    restore_base(double)
    double.requests.clear()
    assert [reply.text for reply in generate(backend, rows)] == before
    assert double.request_count("/tokenize") == 1


def test_a_row_during_the_check_waits_for_it(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    double.token_seconds = 0.05
    replace_base(double)
    double.requests.clear()
    numbers = [admitted(backend, "one")]
    while not double.request_count("/v1/completions") > 1:
        assert not backend.step()
    # The check's completion is being generated now.
    numbers += [admitted(backend, stack) for stack in ("one", None)]
    assert {type(error) for error in errors_of(backend, numbers)} == {BaseMismatch}


def test_a_stack_loaded_into_another_model_is_unloaded_at_once(
    double: VllmDouble, open_on: Open
) -> None:
    """The server is replaced between the check and the load."""
    backend = open_on(double)
    stack = random_stack(backend, 1)

    def replaced(name: str) -> None:
        double.loaded = lambda name: None
        path = double.adapters[name]
        replace_base(double)
        double.adapters[name] = path

    double.loaded = replaced
    with pytest.raises(BaseMismatch):
        attach(backend, "one", stack)
    assert not double.adapters
    # The same for the load of the neutral stack, right after a successful check.
    restore_base(double)
    double.loaded = lambda name: (
        replaced(name) if name == backend._registry.bare_base.name else None
    )
    (error,) = all_errors(backend, None)
    assert isinstance(error, ServingFailed)
    assert not double.adapters
    restore_base(double)
    attach(backend, "one", stack)
    assert generate_text(backend, "one") != generate_text(backend, None)


def test_a_single_lost_stack_needs_no_check(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double)
    attach(backend, "one", random_stack(backend, 1))
    whole = generate_text(backend, "one")
    del double.adapters[backend._attached["one"].name]
    double.requests.clear()
    assert generate_text(backend, "one") == whole
    assert double.request_count("/tokenize") == 0


def test_a_server_with_another_name_for_the_base_gets_its_stacks_again(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double)
    before = generate_text(backend, None)
    double.restart()
    double.bases = ["renamed"]
    assert generate_text(backend, None) == before
    backend.close()


def test_a_missing_base_name_is_reported(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double, model="base")
    double.restart()
    double.bases = ["other"]
    (error,) = all_errors(backend, None)
    assert isinstance(error, InvalidInput)
    assert "'base'" in str(error)
    restore_base(double)
    assert generate_text(backend, None)


def test_a_user_gets_an_error_when_the_server_has_another_base(
    double: VllmDouble, open_on: Open, tiny_base: Base
) -> None:
    request = bare_request(tiny_base)
    engine = Engine(
        open_on(double), read_adapter=lambda digest: pytest.fail("no adapter was asked for")
    )
    try:
        before = engine.complete([request])
        replace_base(double)
        with pytest.raises(BaseMismatch):
            engine.complete([request])
        restore_base(double)
        assert engine.complete([request]) == before
    finally:
        engine.close()


def test_closing_during_a_check_leaves_nothing_on_the_server(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    backend = open_on(double)
    double.token_seconds = 0.2
    double.restart()
    backend.admit(row(backend, "hello"))
    while not double.adapters:
        backend.step()
    backend.close()
    assert not double.adapters
    assert not list((tmp_path / "cache" / "served").iterdir())


def test_servers_with_a_resolver_are_checked_again_after_a_broken_reply(
    double: VllmDouble, open_on: Open, tmp_path: Path
) -> None:
    """They never lose a name, so nothing else shows that another model may reply."""
    place = tmp_path / "shared"
    double.resolver, double.updates = place, False
    backend = open_on(double, folder=place, resolves=True)
    before = generate_text(backend, None)
    replace_base(double)
    double.cut_off.append(backend._registry.bare_base.name)
    number = admitted(backend, None)
    error = next_error(backend)
    backend.remove(number)
    assert isinstance(error, ServingFailed)
    for _ in range(2):
        assert [type(error) for error in all_errors(backend, None)] == [BaseMismatch]
    restore_base(double)
    assert generate_text(backend, None) == before
    looks = double.request_count("/tokenize")
    assert generate_text(backend, None) == before
    assert double.request_count("/tokenize") == looks


# Loads


def test_loads_run_in_parallel(double: VllmDouble, open_on: Open) -> None:
    backend = open_on(double, slots=4)
    double.load_seconds = 1.0
    stacks = {f"s{seed}": backend.stage(random_stack(backend, seed)) for seed in range(4)}
    began = time.monotonic()
    for loading in [in_thread(backend.attach, *each) for each in stacks.items()]:
        loading.result()
    assert time.monotonic() - began < 3.0
    double.load_seconds = 0.0
    assert len({generate_text(backend, key) for key in stacks}) == 4


def test_a_load_whose_key_is_detached_is_aborted_and_leaves_nothing(
    double: VllmDouble, open_on: Open
) -> None:
    backend = open_on(double, slots=1)
    double.load_seconds = 2.0
    double.requests.clear()
    loading = in_thread(attach, backend, "one", random_stack(backend, 1))
    while not double.request_count("/v1/load_lora_adapter"):
        time.sleep(0.01)
    began = time.monotonic()
    backend.detach("one")
    assert isinstance(loading.exception(), ServingFailed)
    assert time.monotonic() - began < 1.0
    double.load_seconds = 0.0
    attach(backend, "two", random_stack(backend, 2))
    assert generate_text(backend, "two")


def test_a_closing_engine_does_not_wait_for_a_hanging_load(
    double: VllmDouble, open_on: Open, tiny_base: Base
) -> None:
    backend = open_on(double, timeout=60.0)
    engine = Engine(backend, read_adapter=lambda digest: random_adapter(backend, 1))
    double.load_seconds = 10.0
    double.requests.clear()

    def warm() -> None:
        entry = StackEntry("style", "style@1", "12" * 32)
        with engine.pin(Stack(tiny_base.digest, (entry,))):
            pass

    warming = in_thread(warm)
    while not double.request_count("/v1/load_lora_adapter"):
        time.sleep(0.01)
    began = time.monotonic()
    engine.close()
    assert isinstance(warming.exception(), ServingFailed)
    assert time.monotonic() - began < 4.0

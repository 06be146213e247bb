"""On every backend equal training steps give equal bytes, also after a resumption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backend_makers import (
    attach,
    base_logprobs,
    bytes_of,
    continuation,
    generate,
    random_stack,
    row,
    session_spec,
    train,
    training_steps,
)
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from personalpeft.adapters.types import AdapterStack, ScaledLoRA
from personalpeft.backends.base import Continuation, Session, TrainingBackend
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.learning.train.losses import ContextDistillationLoss, SFTLoss
from personalpeft.types import Message

STEPS = 6
few = examples(3, suppress_health_check=[HealthCheck.function_scoped_fixture])


def trained(training_backend: TrainingBackend, **changes: Any) -> bytes:
    session = training_backend.session(session_spec(training_backend, **changes))
    train(session, training_steps(training_backend, STEPS))
    session.close()
    return bytes_of(session)


def scaled(session: Session, scaling: float) -> AdapterStack:
    return AdapterStack(
        2, {name: (ScaledLoRA(pair, scaling),) for name, pair in session.weights().items()}
    )


def test_equal_specs_and_steps_give_equal_bytes(training_backend: TrainingBackend) -> None:
    assert trained(training_backend) == trained(training_backend)
    assert trained(training_backend, base_key="one") == trained(training_backend, base_key="one")


@pytest.mark.parametrize("changes", [{"seed": 6}, {"base_key": "one"}, {"rank": 3}])
def test_another_spec_gives_other_bytes(
    training_backend: TrainingBackend, changes: dict[str, Any]
) -> None:
    assert trained(training_backend, **changes) != trained(training_backend)


def test_serving_during_training_changes_no_byte(training_backend: TrainingBackend) -> None:
    session, steps = (
        training_backend.session(session_spec(training_backend, base_key="one")),
        training_steps(training_backend, STEPS),
    )
    session.precompute_ref_log_probs([term for terms in steps for term in terms])
    for terms in steps:
        session.step(terms, 1e-2)
        generate(
            training_backend,
            [
                row(training_backend, "hello", stack, temperature=1.0, max_tokens=3)
                for stack in ("two", None)
            ],
        )
        training_backend.score([continuation(training_backend, "hello", "bye")], "two")
    assert bytes_of(session) == trained(training_backend, base_key="one")


def test_the_layers_below_stay_fixed_when_their_slot_is_reused(
    training_backend: TrainingBackend,
) -> None:
    expected = trained(training_backend, base_key="one")
    session = training_backend.session(session_spec(training_backend, base_key="one"))
    training_backend.detach("one")
    attach(training_backend, "one", random_stack(training_backend, 40))
    train(session, training_steps(training_backend, STEPS))
    assert bytes_of(session) == expected


@few
@given(cuts=st.lists(st.integers(0, STEPS), max_size=3).map(sorted))
def test_a_resumed_session_ends_with_the_bytes_of_an_uninterrupted_one(
    training_backend: TrainingBackend, cuts: list[int]
) -> None:
    steps, done = training_steps(training_backend, STEPS), 0
    session = training_backend.session(session_spec(training_backend, base_key="two"))
    for cut in cuts:
        train(session, steps[:cut], done=done)
        state = {name: array.copy() for name, array in session.state().items()}
        session.close()
        session, done = (
            training_backend.session(session_spec(training_backend, base_key="two")),
            cut,
        )
        session.restore(state)
    train(session, steps, done=done)
    assert bytes_of(session) == trained(training_backend, base_key="two")


def test_a_saved_state_does_not_change_when_the_session_continues(
    training_backend: TrainingBackend,
) -> None:
    session = training_backend.session(session_spec(training_backend))
    train(session, training_steps(training_backend, 2))
    state = session.state()
    before = {name: array.tobytes() for name, array in state.items()}
    train(session, training_steps(training_backend, 2))
    assert {name: array.tobytes() for name, array in state.items()} == before


def test_a_session_starts_from_saved_weights_with_an_optimizer_that_made_no_step(
    training_backend: TrainingBackend,
) -> None:
    def continued(steps: int) -> bytes:
        session = training_backend.session(session_spec(training_backend))
        train(session, training_steps(training_backend, steps))
        halves = {
            f"{name}.{half}": np.array(getattr(pair, half.lower()), np.float32)
            for name, pair in session.weights().items()
            for half in "AB"
        }
        other = training_backend.session(session_spec(training_backend, base_key="two"))
        moments = {
            f"{name}.{moment}": np.zeros_like(half)
            for name, half in halves.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }
        counts = {f"{name}.step": np.zeros((), np.float32) for name in halves}
        other.restore({**halves, **moments, **counts})
        train(other, training_steps(training_backend, 1))
        return bytes_of(other)

    assert continued(2) == continued(2) != continued(1)


GARBAGE: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "nothing": lambda state: {},
    "one array less": lambda state: dict(sorted(state.items())[:-1]),
    "another shape": lambda state: {
        name: np.zeros((*array.shape, 2), np.float32) for name, array in state.items()
    },
    "flat": lambda state: {name: array.ravel()[:-1] for name, array in state.items()},
    "other names": lambda state: {f"{name}?": array for name, array in state.items()},
    "not a number": lambda state: {
        name: np.full_like(array, np.nan) for name, array in state.items()
    },
}


@pytest.mark.parametrize("garbage", sorted(GARBAGE))
def test_an_invalid_saved_state_is_refused_and_changes_nothing(
    training_backend: TrainingBackend, garbage: str
) -> None:
    steps = training_steps(training_backend, STEPS)
    session = training_backend.session(session_spec(training_backend))
    train(session, steps[:3])
    bad = GARBAGE[garbage]({name: array.copy() for name, array in session.state().items()})
    with pytest.raises(ValueError, match="session"):
        session.restore(bad)
    train(session, steps, done=3)
    assert bytes_of(session) == trained(training_backend)


def test_a_saved_state_of_another_rank_is_refused(torch_tiny: TrainingBackend) -> None:
    wider = torch_tiny.session(session_spec(torch_tiny, rank=3))
    train(wider, training_steps(torch_tiny, 1))
    with pytest.raises(ValueError, match="session"):
        torch_tiny.session(session_spec(torch_tiny)).restore(wider.state())


@pytest.mark.parametrize(
    "changes", [{"target_modules": ("mlp.never_proj",)}, {"base_key": "never attached"}]
)
def test_an_invalid_spec_is_refused(
    training_backend: TrainingBackend, changes: dict[str, Any]
) -> None:
    with pytest.raises((ValueError, KeyError)):
        training_backend.session(session_spec(training_backend, **changes))


def test_a_parent_of_another_rank_is_refused(torch_tiny: TrainingBackend) -> None:
    parent = torch_tiny.session(session_spec(torch_tiny)).weights()
    with pytest.raises(ValueError, match="rank 2"):
        torch_tiny.session(session_spec(torch_tiny, rank=4, initial_weights=parent))


def test_a_child_starts_at_its_parents_weights(training_backend: TrainingBackend) -> None:
    session = training_backend.session(session_spec(training_backend))
    train(session, training_steps(training_backend, 3))
    parent = session.weights()
    child = training_backend.session(session_spec(training_backend, initial_weights=parent))
    train(child, training_steps(training_backend, 1))
    other = training_backend.session(session_spec(training_backend, initial_weights=parent))
    train(other, training_steps(training_backend, 1))
    assert bytes_of(child) == bytes_of(other) != bytes_of(session)
    assert all(
        parent[name].b.tobytes() == pair.b.tobytes() for name, pair in session.weights().items()
    )


def test_a_new_layer_changes_nothing_until_it_is_trained(torch_tiny: TrainingBackend) -> None:
    attach(torch_tiny, "new", scaled(torch_tiny.session(session_spec(torch_tiny)), 4.0))
    try:
        base, new = generate(
            torch_tiny, [row(torch_tiny, "hello", stack) for stack in (None, "new")]
        )
    finally:
        torch_tiny.detach("new")
    assert base.text == new.text


def test_training_raises_the_likelihood_that_the_session_reports(
    torch_tiny: TrainingBackend,
) -> None:
    item = continuation(torch_tiny, "hello", "Ahoy!")
    session = torch_tiny.session(session_spec(torch_tiny))
    losses = [session.step([SFTLoss(item)], 1e-2) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    attach(torch_tiny, "learned", scaled(session, 4.0))
    try:
        (before,) = torch_tiny.score([item], None)
        (now,) = torch_tiny.score([item], "learned")
    finally:
        torch_tiny.detach("learned")
    assert before.logp == pytest.approx(-losses[0], abs=1e-4)
    assert now.logp == pytest.approx(-session.step([SFTLoss(item)], 0.0), abs=1e-4)
    assert now.logp > before.logp + 0.5


def test_training_never_modifies_the_base(torch_tiny: TorchBackend) -> None:
    before = base_logprobs(torch_tiny)
    attach(torch_tiny, "one", random_stack(torch_tiny, 0))
    session = torch_tiny.session(session_spec(torch_tiny, base_key="one"))
    train(session, training_steps(torch_tiny, 3))
    session.close()
    session.close()
    torch_tiny.detach("one")
    assert base_logprobs(torch_tiny) == before


def test_distillation_reduces_the_divergence_from_replies_with_the_fact(
    torch_tiny: TrainingBackend,
) -> None:
    """The divergence between replies with and without the fact in the prompt falls with each step."""
    reply = torch_tiny.encode("Your dog is Biscuit.")
    learned = Continuation(torch_tiny.render([Message("user", "What is my dog called?")]), reply)
    prompt = [Message("system", "The dog is Biscuit."), Message("user", "What is my dog called?")]
    term = ContextDistillationLoss(learned, Continuation(torch_tiny.render(prompt), reply))
    session = torch_tiny.session(session_spec(torch_tiny))
    session.precompute_ref_log_probs([term])
    losses = [session.step([term], 3e-2) for _ in range(12)]

    assert losses[0] > 0
    assert losses[-1] < losses[0] / 2
    assert all(loss >= -1e-4 for loss in losses)

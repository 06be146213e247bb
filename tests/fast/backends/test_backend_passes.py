"""Passes apart from optimizer steps: gradients add up, and each step has options of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
from backend_makers import bytes_of, continuation, session_spec, training_steps

from personalpeft.backends.base import AdamParams, Continuation, TrainingBackend
from personalpeft.learning.train.losses import SFTLoss

STEP = AdamParams(1e-2, max_grad_norm=1.0)


def losses(training_backend: TrainingBackend) -> list[SFTLoss]:
    return [
        SFTLoss(continuation(training_backend, "hello", text))
        for text in ("Ahoy!", "Good day.", "Hi")
    ]


def test_a_pass_and_an_optimizer_step_are_a_step_to_the_byte(
    training_backend: TrainingBackend,
) -> None:
    split, whole = (training_backend.session(session_spec(training_backend)) for _ in range(2))
    for terms in training_steps(training_backend, 3):
        for session in (split, whole):
            session.precompute_ref_log_probs(terms)
        training_backend.forward_backward([split], [terms])
        split.optim_step(STEP)
        whole.step(terms, 1e-2)
    assert bytes_of(split) == bytes_of(whole)


def test_gradients_of_several_passes_add_up(torch_tiny: TrainingBackend) -> None:
    together, apart = (torch_tiny.session(session_spec(torch_tiny)) for _ in range(2))
    torch_tiny.forward_backward([together], [losses(torch_tiny)])
    for loss in losses(torch_tiny):
        torch_tiny.forward_backward([apart], [[loss]])
    norms = [session.optim_step(AdamParams(1e-2)) for session in (together, apart)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    np.testing.assert_allclose(
        *(np.frombuffer(bytes_of(session)[-4096:], "<f4") for session in (together, apart)),
        atol=1e-4,
    )


def test_a_long_pass_equals_short_ones(
    torch_tiny: TrainingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft.backends.torch.training import session as module

    whole, parts = (torch_tiny.session(session_spec(torch_tiny)) for _ in range(2))
    ((*first,),) = torch_tiny.forward_backward([whole], [losses(torch_tiny)], logprobs=True)
    monkeypatch.setattr(module, "FORWARD_TOKENS", {"cpu": 8})
    passes: list[None] = []
    ((*second,),) = torch_tiny.forward_backward(
        [parts], [losses(torch_tiny)], logprobs=True, between=lambda: passes.append(None)
    )
    assert len(passes) == len(second)
    assert [each.loss for each in first] == pytest.approx([each.loss for each in second], rel=1e-5)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one.token_logprobs, other.token_logprobs, atol=1e-4)
    assert whole.optim_step(STEP) == pytest.approx(parts.optim_step(STEP), rel=1e-4)


def test_sessions_in_one_call_get_what_each_would_get_alone(torch_tiny: TrainingBackend) -> None:
    ranks = (2, 3, 5)
    together = [torch_tiny.session(session_spec(torch_tiny, rank=rank)) for rank in ranks]
    alone = [torch_tiny.session(session_spec(torch_tiny, rank=rank)) for rank in ranks]
    terms = [losses(torch_tiny)[: index + 1] for index in range(3)]
    joint = torch_tiny.forward_backward(together, terms)
    for session, own, results in zip(alone, terms, joint, strict=True):
        ((*single,),) = torch_tiny.forward_backward([session], [own])
        assert [r.loss for r in results] == pytest.approx([r.loss for r in single], rel=1e-5)
    for one, other in zip(together, alone, strict=True):
        assert one.optim_step(STEP) == pytest.approx(other.optim_step(STEP), rel=1e-4)


def test_a_forward_pass_leaves_no_gradient(training_backend: TrainingBackend) -> None:
    session = training_backend.session(session_spec(training_backend))
    before = bytes_of(session)
    training_backend.forward_backward([session], [losses(training_backend)], backward=False)
    session.optim_step(STEP)
    assert bytes_of(session) == before


def test_log_probs_are_of_the_targets(torch_tiny: TrainingBackend) -> None:
    item = continuation(torch_tiny, "hello", "Ahoy!")
    other = tuple((token + 1) % 256 for token in item.completion)
    targeted = Continuation(item.prompt, item.completion, other)
    session = torch_tiny.session(session_spec(torch_tiny))
    ((plain, aimed),) = torch_tiny.forward_backward(
        [session], [[SFTLoss(item), SFTLoss(targeted)]], backward=False, logprobs=True
    )
    scores = torch_tiny.score([item, targeted], None)
    for result, score in zip((plain, aimed), scores, strict=True):
        np.testing.assert_allclose(result.token_logprobs[0], score.token_logprobs, atol=1e-4)
    assert plain.loss != aimed.loss


def test_gradients_that_are_not_finite_make_no_step(torch_tiny: TrainingBackend) -> None:
    session = torch_tiny.session(session_spec(torch_tiny))
    before = bytes_of(session)
    item = continuation(torch_tiny, "hello", "Ahoy!")
    torch_tiny.forward_backward([session], [[SFTLoss(item, weight=math.inf)]])
    assert not math.isfinite(session.optim_step(STEP))
    assert bytes_of(session) == before
    torch_tiny.forward_backward([session], [losses(torch_tiny)])
    assert math.isfinite(session.optim_step(STEP))
    assert bytes_of(session) != before


def test_each_step_has_its_own_options(torch_tiny: TrainingBackend) -> None:
    still, decayed = (torch_tiny.session(session_spec(torch_tiny)) for _ in range(2))
    before = bytes_of(still)
    for session, params in (
        (still, AdamParams(0.0)),
        (decayed, AdamParams(1e-12, weight_decay=1e11)),
    ):
        torch_tiny.forward_backward([session], [losses(torch_tiny)])
        session.optim_step(params)
    assert bytes_of(still) == before
    for name, pair in decayed.weights().items():
        np.testing.assert_allclose(pair.a, still.weights()[name].a * 0.9, rtol=1e-3, atol=1e-6)


def test_a_restored_session_has_no_gradients(torch_tiny: TrainingBackend) -> None:
    session = torch_tiny.session(session_spec(torch_tiny))
    session.step(losses(torch_tiny), 1e-2)
    state = session.state()
    before = bytes_of(session)
    torch_tiny.forward_backward([session], [losses(torch_tiny)])
    session.restore(state)
    assert session.optim_step(STEP) == 0
    assert bytes_of(session) == before


def test_passes_take_open_sessions_of_the_backend_alone(torch_tiny: TrainingBackend) -> None:
    session = torch_tiny.session(session_spec(torch_tiny))
    with pytest.raises(ValueError, match="distinct"):
        torch_tiny.forward_backward([session, session], [[], []])
    with pytest.raises(ValueError, match="length"):
        torch_tiny.forward_backward([session], [])
    session.close()
    with pytest.raises(ValueError, match="open"):
        torch_tiny.forward_backward([session], [losses(torch_tiny)])

"""Training from ratings alone: the KTO loss, and the batches that use it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from backend_makers import continuation, session_spec
from runtime_makers import ask, correct, open_runtime, pinned, trained_on

from personalpeft import User
from personalpeft.backends.base import Backend
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.lesson_assignment import MIN_THUMBS
from personalpeft.learning.outcomes import ReproductionOutcome
from personalpeft.learning.train.losses import KTOLoss


class _Logprobs:
    """The log-probs of one continuation, as a backend returns them."""

    def __init__(self, *logp: float) -> None:
        import torch

        self.token_logp = torch.tensor(logp, requires_grad=True)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_loss_is_that_of_the_paper(fake: Backend) -> None:
    """Compare with a calculation by hand for two liked replies and one disliked reply.

    The reference point is the mean gain of the mismatched pairs.
    """
    some = continuation(fake, "a", "b")
    term = KTOLoss((some, some), (some,), (some, some, some), beta=0.1, weight=0.5)
    before = [(-3.0, -2.0), (-1.0,), (-4.0,), (-2.0,), (-2.0, -1.0), (-1.5,)]
    now = [(-2.0, -1.0), (-2.0,), (-6.0,), (-1.0,), (-1.0, -1.0), (-1.0,)]
    gains = [sum(n) - sum(b) for n, b in zip(now, before, strict=True)]
    usual = max(0.0, sum(gains[3:]) / 3)
    values = [_sigmoid(0.1 * (g - usual)) for g in gains[:2]] + [_sigmoid(0.1 * (usual - gains[2]))]
    wanted = 0.5 * sum(1 - value for value in values) / 3
    outputs = [_Logprobs(*logp) for logp in now]
    loss = term.loss(outputs, [_Logprobs(*logp) for logp in before])  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(wanted)
    loss.backward()
    assert [bool(said.token_logp.grad.any()) for said in outputs] == [True] * 3 + [False] * 3


def test_training_on_ratings_separates_liked_from_disliked_replies(torch_tiny: Backend) -> None:
    backend = torch_tiny
    liked = tuple(continuation(backend, f"question {n}", "Ahoy there!") for n in range(2))
    disliked = tuple(continuation(backend, f"question {n}", "Hello you.") for n in range(2))
    term = KTOLoss(liked, disliked, (continuation(backend, "question 0", "Hello you."),), beta=0.1)
    session = backend.session(session_spec(backend))
    try:
        losses = []
        session.precompute_ref_log_probs([term])
        for _ in range(15):
            losses.append(session.step([term], 1e-2))
    finally:
        session.close()
    assert losses[-1] < losses[0] * 0.9


def thumbs(user: User, up: int, down: int, **options: int) -> tuple[list[str], list[str]]:
    said = [
        user.feedback(ask(user, f"question {n}", **options), rating=1 if n < up else -1)
        for n in range(up + down)
    ]
    return said[:up], said[up:]


def test_dislikes_are_trained_with_enough_of_both_kinds(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        up, down = thumbs(ada, MIN_THUMBS, MIN_THUMBS - 1)
        ada.learn()
        assert trained_on(ada) | pinned(ada) == set(up)
        down.append(ada.feedback(ask(ada, "one more"), rating=-1))
        ada.learn()
        # A quarter judges, and is never trained on.
        assert set(down) <= trained_on(ada) | pinned(ada)
        assert len(set(down) & pinned(ada)) == MIN_THUMBS // 4
        assert not trained_on(ada) & pinned(ada)
        statuses = {status.signal.id: status for status in ada.signal_statuses()}
        assert {statuses[signal].layer for signal in down} == {"style"}
        with pytest.raises(LookupError):
            ada.learn()


def test_generated_replies_to_held_out_prompts_judge_thumbs(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        thumbs(ada, 24, 28)
        report = ada.learn(accept=True)
        thumbs_seen = report.scores["thumbs"]
        assert (thumbs_seen["liked"], thumbs_seen["disliked"]) == (24, 28)
        assert thumbs_seen["asked"] == len(pinned(ada)) == 13
        # The likelihood of the model's own replies judges nothing.
        assert report.scores["target"]["asked"] == 0
        # Lessons that the user wrote are judged beside them, as without thumbs.
        correct(ada, 8, first=100)
        assert ada.learn().scores["target"]["asked"] > 0


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.exhaustive
def test_dislikes_are_compared_with_likes_of_long_ago(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[int]] = []

    def recorded(plan: object, backend: Backend, *rest: object) -> object:
        steps = build_batches(plan, backend, *rest)  # type: ignore[arg-type]
        seen.append({sum(isinstance(term, KTOLoss) for term in terms) for terms in steps})
        return steps

    monkeypatch.setattr("personalpeft.learning.train.loop.build_batches", recorded)
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        thumbs(ada, MIN_THUMBS, MIN_THUMBS, max_tokens=2)
        ada.learn(accept=True)
        # More lessons than a learn replays.
        for number in range(90):
            ada.teach(f"How {number}?", f"Answer {number}.")
        ada.learn(accept=True)
        ada.feedback(ask(ada, "one more", max_tokens=2), rating=-1)
        ada.learn(accept=True)
        assert ada.reproduce(ada.revisions()[-1].id).outcome is ReproductionOutcome.EQUAL
    assert seen[-1] == {1}


def test_each_step_has_ratings_of_both_kinds_where_there_are_enough(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    rated: list[KTOLoss] = []

    def recorded(plan: object, backend: Backend, *rest: object) -> object:
        steps = build_batches(plan, backend, *rest)  # type: ignore[arg-type]
        rated.extend(term for terms in steps for term in terms if isinstance(term, KTOLoss))
        seen.append([sum(isinstance(term, KTOLoss) for term in terms) for terms in steps])
        return steps

    monkeypatch.setattr("personalpeft.learning.train.loop.build_batches", recorded)
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        thumbs(ada, MIN_THUMBS, MIN_THUMBS - 1, max_tokens=2)
        ada.learn()
        ada.feedback(ask(ada, "one more", max_tokens=2), rating=-1)
        ada.learn()
        end = ada._services.training_backend.end_of_turn
    few, enough = seen
    assert set(few) == {0}
    assert set(enough) == {1}
    # All replies were cut off, so none teaches to end there.
    assert not any(
        each.completion[-len(end) :] == end for term in rated for each in term.continuations
    )

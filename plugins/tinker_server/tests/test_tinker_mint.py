"""MinT's reverse KL is what PEFT and AdamW compute, and survives a restart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_makers import (
    TEXT,
    CallFailed,
    Run,
    Session,
    TinkerServer,
    checkpoint_route,
    kl_datum,
    open_peft,
    tensor,
    tokens,
)

COMPLETION = list(b"over the lazy dog")
STUDENT, TEACHER = TEXT[:8], list(b"be terse: ") + TEXT[:8]


def answer_datum(**changes: Any) -> dict[str, Any]:
    return kl_datum(STUDENT, TEACHER, COMPLETION, **changes)


def reverse_kl(run: Run, reference: str, data: list[Any], **more: Any) -> Any:
    return run.call(
        "mint/forward_backward_reverse_kl", reference_model_path=reference, data=data, **more
    )


def teacher_of(session: Session) -> str:
    teacher = session.run(rank=4, seed=5)
    teacher.train(6)
    return teacher.save("teacher", "save_weights_for_sampler")


@pytest.mark.exhaustive
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_steps_have_the_losses_of_peft_and_adamw(
    server: TinkerServer, tmp_path: Path, temperature: float
) -> None:
    import torch

    session = server.session()
    reference, run = teacher_of(session), session.run(rank=8)
    archive = session.client.archive
    start = archive(run.save("start", "save_weights_for_sampler"), tmp_path / "student")
    weights = [0.5, 2.0, *[1.0] * (len(COMPLETION) - 3), 0.0]
    data = [
        answer_datum(weights=tensor(weights)),
        answer_datum(target_tokens=tensor(COMPLETION[::-1], "int64")),
    ]
    ours = []
    for _ in range(6):
        answer = reverse_kl(run, reference, data, temperature=temperature)
        ours.append([each["loss"]["data"][0] for each in answer["outputs"]])
        assert answer["metrics"]["num_tokens:sum"] == 2 * len(COMPLETION) - 1
        assert answer["metrics"]["reverse_kl:mean"] == pytest.approx(
            sum(ours[-1]) / (2 * len(COMPLETION) - 1)
        )
        run.step(1e-2)

    def distribution(model: Any, prompt: list[int], completion: list[int]) -> Any:
        logits = model(torch.tensor([[*prompt, *completion[:-1]]])).logits[0]
        return torch.log_softmax(logits[len(prompt) - 1 :] / temperature, -1)

    student, adam = open_peft(server, start, 1e-2, 0.0)
    teacher, _ = open_peft(server, archive(reference, tmp_path / "teacher"), 0.0, 0.0)
    theirs = []
    for _ in range(6):
        losses = []
        for completion, own in ((COMPLETION, weights), (COMPLETION[::-1], [1.0] * 17)):
            with torch.no_grad():
                q = distribution(teacher, TEACHER, completion)
            p = distribution(student, STUDENT, completion)
            losses.append(((p.exp() * (p - q)).sum(-1) * torch.tensor(own)).sum())
        theirs.append([float(loss.detach()) for loss in losses])
        torch.stack(losses).sum().backward()
        adam.step()
        adam.zero_grad()
    assert sum(ours[-1]) < sum(ours[0]) / 2
    assert np.abs(np.array(ours) / np.array(theirs) - 1).max() < 1e-4


def test_the_base_may_be_the_reference(server: TinkerServer) -> None:
    run = server.session().run()
    same = answer_datum(reference_input=tokens(STUDENT))
    answer = reverse_kl(run, "tiny-random", [same])
    assert answer["metrics"]["loss:mean"] == pytest.approx(0, abs=1e-6)
    assert reverse_kl(run, "tiny-random", [answer_datum()])["metrics"]["loss:mean"] > 1e-3


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"weights": tensor([1.0])}, "of one shape"),
        ({"student_input": tokens([])}, "needs prompts of 1 to"),
        ({"reference_input": tokens([99_999])}, "has a token outside of"),
    ],
)
def test_a_datum_that_does_not_fit_is_named(
    server: TinkerServer, changes: dict[str, Any], problem: str
) -> None:
    run = server.session().run()
    with pytest.raises(CallFailed, match=problem):
        reverse_kl(run, "tiny-random", [answer_datum(**changes)])


def test_a_run_continues_after_a_restart_though_the_reference_was_deleted(
    start: Callable[[], TinkerServer],
) -> None:
    server = start()
    session = server.session()
    reference = teacher_of(session)
    runs = [session.run() for _ in range(2)]
    for run in runs:
        reverse_kl(run, reference, [answer_datum()])
        run.step()
    undisturbed, run = runs
    expected = undisturbed.train(2)
    deleted = session.client.ask("DELETE", checkpoint_route(reference))
    assert deleted.status_code == 204
    assert run.on(start()).train(2) == pytest.approx(expected, rel=1e-6)

"""Training over the wire computes what the API promises, in the order that clients number."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_makers import (
    FIFTY_BATCHES,
    FIFTY_STEPS,
    TEXT,
    TinkerServer,
    datum,
    logprobs_of,
    loss_of,
    passed,
    peft_losses,
    refused,
)

from personalpeft_tinker_server import training
from personalpeft_tinker_server.codec import PROTOBUF

OTHER = list(b"pack my box with five dozen jugs")


def test_fifty_steps_have_the_losses_of_peft_and_adamw(
    server: TinkerServer, tmp_path: Path
) -> None:
    """Training in PEFT starts from the downloaded weights, so their format is tested too."""
    run = server.session().run(rank=8)
    folder = run.session.client.archive(run.save("start", "save_weights_for_sampler"), tmp_path)
    ours = []
    for batch in FIFTY_BATCHES:
        ours.append(loss_of(run.forward_backward([datum(text) for text in batch])))
        run.step(**FIFTY_STEPS)
    assert ours[-1] < ours[0] / 2
    assert ours == pytest.approx(peft_losses(server, folder), rel=1e-4)


def test_calls_are_executed_by_their_number_whatever_order_they_arrive_in(
    server: TinkerServer,
) -> None:
    ordered, shuffled = (server.session().run() for _ in range(2))
    expected = ordered.train(3)
    calls = []
    for step in range(3):
        fb = {"forward_backward_input": passed([datum(TEXT)], "cross_entropy")}
        calls.append((2 * step + 1, "forward_backward", fb))
        calls.append((2 * step + 2, "optim_step", {"adam_params": {"learning_rate": 1e-2}}))
    ids = {seq: shuffled.submit(path, seq, **body) for seq, path, body in reversed(calls)}
    client = shuffled.session.client
    losses = [loss_of(client.result(ids[seq])) for seq in (1, 3, 5)]
    assert losses == expected


def test_a_call_that_is_posted_twice_is_executed_once(server: TinkerServer) -> None:
    once, twice = (server.session().run() for _ in range(2))
    body = {"forward_backward_input": passed([datum(TEXT)], "cross_entropy")}
    first = twice.submit("forward_backward", **body)
    assert twice.submit("forward_backward", twice.seq, **body) == first
    once.forward_backward([datum(TEXT)])
    once.step()
    twice.step()
    assert twice.forward([datum(TEXT)]) == once.forward([datum(TEXT)])


def test_chunks_add_up_to_the_whole_call(server: TinkerServer) -> None:
    whole, chunked = (server.session().run() for _ in range(2))
    whole.forward_backward([datum(TEXT), datum(OTHER)])
    chunked.forward_backward([datum(TEXT)])
    chunked.forward_backward([datum(OTHER)])
    norms = [run.step()["metrics"]["grad_norm:mean"] for run in (whole, chunked)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after = [loss_of(run.forward([datum(TEXT)])) for run in (whole, chunked)]
    assert after[0] == pytest.approx(after[1], rel=1e-5)


def test_forward_computes_the_same_and_leaves_no_gradient(server: TinkerServer) -> None:
    run = server.session().run()
    assert logprobs_of(run.forward([datum(TEXT)])) == pytest.approx(
        logprobs_of(run.forward_backward([datum(TEXT)])), abs=1e-6
    )
    run.step()
    before = run.forward([datum(TEXT)])
    run.step()
    assert run.forward([datum(TEXT)]) == before


def test_targets_may_differ_from_the_tokens_that_are_read(server: TinkerServer) -> None:
    run = server.session().run()
    chosen = [(token + 1) % 256 for token in TEXT]
    data = [datum(TEXT, targets=chosen), datum(TEXT, targets=TEXT)]
    output = run.forward_backward(data)
    both = [np.exp(logprobs_of(output, index)).sum() for index in (0, 1)]
    assert both[0] != both[1]
    assert len(logprobs_of(output)) == len(TEXT)
    for _ in range(8):
        run.forward_backward([datum(TEXT, targets=chosen)])
        run.step()
    assert loss_of(run.forward([datum(TEXT, targets=chosen)])) < -sum(logprobs_of(output)) / 2


def test_a_place_may_have_several_targets_with_weights(server: TinkerServer) -> None:
    """The loss of each target alone, weighted, adds up to that of all."""
    run = server.session().run()
    count = len(TEXT) - 1
    others = [[token, (token + 1) % 256, (token + 7) % 256] for token in TEXT[1:]]
    weights = np.random.default_rng(1).random((count, 3)).astype(np.float32)
    several = datum(TEXT)
    several["loss_fn_inputs"] = {
        "target_tokens": {
            "data": [token for each in others for token in each],
            "dtype": "int64",
            "shape": [count, 3],
        },
        "weights": {"data": weights.ravel().tolist(), "shape": [count, 3]},
    }
    output = run.forward_backward([several, datum(TEXT)])
    norm = run.step(0.0)["metrics"]["grad_norm:mean"]
    found = output["loss_fn_outputs"][0]["logprobs"]
    assert found["shape"] == [count, 3]
    single = [
        datum(TEXT[:-1], [each[k] for each in others], weights=weights[:, k].tolist())
        for k in range(3)
    ]
    alone = run.forward_backward([*single, datum(TEXT)])
    columns = np.array([logprobs_of(alone, k) for k in range(3)]).T
    assert np.array(found["data"]) == pytest.approx(columns.ravel(), abs=1e-5)
    assert loss_of(output) == pytest.approx(loss_of(alone), rel=1e-5)
    assert run.step(0.0)["metrics"]["grad_norm:mean"] == pytest.approx(norm, rel=1e-4)


def formulas(lp: np.ndarray, q: np.ndarray, a: np.ndarray) -> dict[str, float]:
    ratio = np.exp(lp - q)
    clipped = ratio.clip(0.9, 1.1)
    of_all = np.exp((lp - q)[5:].mean())
    return {
        "importance_sampling": -(ratio * a).sum(),
        "ppo": -np.minimum(ratio * a, clipped * a).sum(),
        "cispo": -(clipped * lp * a).sum(),
        "dro": -(lp * a - 0.1 / 2 * (lp - q) ** 2).sum(),
        "gspo": -np.minimum(of_all * a, of_all.clip(0.9, 1.1) * a).sum(),
    }


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "dro", "gspo"])
def test_each_loss_is_its_formula(server: TinkerServer, name: str) -> None:
    run = server.session().run()
    lp = np.array(logprobs_of(run.forward([datum(TEXT)])))
    random = np.random.default_rng(3)
    q, a = lp + random.normal(0, 0.2, len(lp)), random.normal(0, 1, len(lp))
    config = {
        "dro": {"beta": 0.1},
        "importance_sampling": {},
    }.get(name, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1})
    mask = [0.0] * 5 + [1.0] * (len(lp) - 5)
    data = [
        datum(TEXT, logprobs=q.tolist(), advantages=a.tolist(), sequence_ratio_mask=mask),
    ]
    output = run.forward_backward(data, name, **config)
    assert loss_of(output) == pytest.approx(formulas(lp, q, a)[name], rel=1e-4)
    assert run.step()["metrics"]["grad_norm:mean"] > 0


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo"])
def test_places_without_advantage_need_no_log_prob(server: TinkerServer, name: str) -> None:
    """Clients send -99999 for the log-probs that samples do not have."""
    run = server.session().run()
    count = len(TEXT) - 1
    advantages = [0.0] * 8 + [1.0] * (count - 8)
    norms, losses = [], []
    for missing in (-99999.0, -3.0):
        logprobs = [missing] * 8 + [-5.0] * (count - 8)
        request = run.submit(
            "forward_backward",
            forward_backward_input=passed(
                [datum(TEXT, logprobs=logprobs, advantages=advantages)], name
            ),
        )
        losses.append(loss_of(run.session.client.result(request)))
        answer = run.session.client.ask(
            "POST", "retrieve_future", {"request_id": request}, headers={"Accept": PROTOBUF}
        )
        assert (answer.status_code, answer.mimetype) == (200, PROTOBUF)
        norms.append(run.step(0.0)["metrics"]["grad_norm:mean"])
    assert losses[0] == losses[1]
    assert norms[0] == norms[1] > 0


@pytest.mark.parametrize(("distance", "advantage"), [(200.0, 1.0), (86.5, 0.15)])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(
    server: TinkerServer, distance: float, advantage: float
) -> None:
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(3)
    losses = run.train(1)
    lp = np.array(logprobs_of(run.forward([datum(TEXT)])))
    advantages = [advantage] * len(lp)
    data = [datum(TEXT, logprobs=(lp - distance).tolist(), advantages=advantages)]

    def learn() -> None:
        run.forward_backward(data, "importance_sampling")
        run.step()

    with refused("not finite"):
        learn()
    losses += run.train(2)
    assert losses == pytest.approx(expected, rel=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("adam", [{"learning_rate": 1e39}, {"learning_rate": 1e30}, {"eps": 0.0}])
@pytest.mark.parametrize("evicted", [True, False])
def test_a_run_whose_weights_are_not_finite_says_so_and_can_load_others(
    server: TinkerServer, adam: dict[str, float], evicted: bool
) -> None:
    run = server.session().run()
    path = run.save("good")
    run.forward_backward([datum(TEXT)])
    run.call("optim_step", adam_params=adam)
    client = run.session.client
    if evicted:
        client.ask("POST", f"sessions/{run.session.id}/finish", {})
        server.maintain()
    for call in (run.forward, run.forward_backward):
        with refused("not finite"):
            call([datum(TEXT)])
    run.call("load_weights", path=path, optimizer=True)
    assert run.train(2)[1] < 1e4


def test_a_custom_loss_is_a_forward_and_a_weighted_cross_entropy(server: TinkerServer) -> None:
    """The SDK computes the gradient of its loss by each log-prob, and sends it as weights."""
    custom, plain = (server.session().run() for _ in range(2))
    lp = np.array(logprobs_of(custom.forward([datum(TEXT)])))
    # The loss sum(lp ** 2) / 2 has the gradient lp, and cross entropy has -weights.
    custom.forward_backward([datum(TEXT, weights=(-lp).tolist())])
    plain.forward([datum(TEXT)])
    plain.forward_backward([datum(TEXT)])
    norms = [run.step()["metrics"]["grad_norm:mean"] for run in (custom, plain)]
    assert all(map(math.isfinite, norms))
    assert norms[0] != norms[1]


@pytest.mark.parametrize(
    ("data", "loss", "problem"),
    [
        ([datum([1, 2, 99_999])], "cross_entropy", "has a token outside of"),
        ([datum(TEXT, weights=[1.0])], "cross_entropy", "needs finite weights of the shape"),
        ([datum(TEXT)], "ppo", "needs finite logprobs"),
        ([datum([7])], "cross_entropy", "has 0 tokens"),
        ([datum(TEXT)], "stable_reinforce", "is not supported"),
    ],
)
def test_a_mistake_of_the_client_is_named_and_the_run_goes_on(
    server: TinkerServer, data: list[object], loss: str, problem: str
) -> None:
    run = server.session().run()
    with refused(problem):
        run.forward_backward(data, loss)
    assert loss_of(run.forward([datum(TEXT)])) > 0


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("clip_low_threshold", "low", "must be a number"),
        ("clip_lower", 0.7, "no option"),
    ],
)
def test_a_wrong_option_of_a_loss_is_named_with_what_is_wrong(
    server: TinkerServer, option: str, value: Any, problem: str
) -> None:
    zeros = [0.0] * (len(TEXT) - 1)
    data = [datum(TEXT, logprobs=zeros, advantages=zeros)]
    with refused(f"{option}.*{problem}|{problem}.*{option}"):
        server.session().run().forward_backward(data, "ppo", **{option: value})


@pytest.mark.parametrize(
    ("route", "body", "problem"),
    [
        ("save_weights", {"path": "epoch 1"}, "path"),
        ("load_weights", {"path": 3}, "path"),
        ("optim_step", {"adam_params": {"learning_rate": math.nan}}, "learning_rate"),
        (
            "forward_backward",
            {"forward_backward_input": passed([datum(TEXT, weights=[math.inf])], "cross_entropy")},
            "weights",
        ),
    ],
)
def test_a_call_that_is_refused_does_not_hold_up_those_after_it(
    server: TinkerServer, route: str, body: dict[str, object], problem: str
) -> None:
    run = server.session().run()
    before = run.train(1)
    with refused(problem):
        run.call(route, **body)
    assert run.train(1) < before


def test_runs_that_are_queued_together_train_as_each_alone(server: TinkerServer) -> None:
    session = server.session()
    alone = [session.run(rank=rank).train(3) for rank in (2, 4, 8)]
    runs = [session.run(rank=rank) for rank in (2, 4, 8)]
    requests: list[list[str]] = [[] for _ in runs]
    for _ in range(3):
        for run, own in zip(runs, requests, strict=True):
            own.append(
                run.submit(
                    "forward_backward",
                    forward_backward_input=passed([datum(TEXT)], "cross_entropy"),
                )
            )
            run.submit("optim_step", adam_params={"learning_rate": 1e-2})
    for expected, own in zip(alone, requests, strict=True):
        losses = [loss_of(session.client.result(request)) for request in own]
        assert losses == pytest.approx(expected, rel=1e-4)


def test_runs_in_lockstep_reach_the_backend_together(
    start: Callable[[], TinkerServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their clients wait for each result before the next call, as most loops do."""
    monkeypatch.setattr(training, "GATHER_SECONDS", 5.0)
    server = start()
    session = server.session()
    runs = [session.run() for _ in range(4)]
    backend, sizes = server.runtime.training_backend(), list[int]()
    compute = backend.forward_backward

    def count(sessions: Any, *args: Any, **options: Any) -> Any:
        sizes.append(len(sessions))
        return compute(sessions, *args, **options)

    monkeypatch.setattr(backend, "forward_backward", count)
    with ThreadPoolExecutor(4) as pool:
        losses = list(pool.map(lambda run: run.train(5), runs))
    assert sizes == [4] * 5
    assert all(each[-1] < each[0] for each in losses)


@pytest.mark.parametrize(
    ("lora", "problem"),
    [
        ({"train_attn": False, "train_mlp": False}, "unembedding"),
        ({"rank": 65}, "rank"),
        ({"rank": 0}, "rank"),
    ],
)
def test_a_lora_that_the_base_cannot_train_is_refused(
    server: TinkerServer, lora: dict[str, object], problem: str
) -> None:
    session = server.session()
    body = {
        "session_id": session.id,
        "model_seq_id": 0,
        "base_model": "tiny-random",
        "lora_config": lora,
    }
    answer = session.client.ask("POST", "create_model", body)
    assert answer.status_code == 400
    assert problem in answer.get_data(as_text=True)


def test_another_base_is_refused_with_a_way_out(server: TinkerServer) -> None:
    session = server.session()
    body = {"session_id": session.id, "model_seq_id": 0, "base_model": "Qwen/Qwen3-8B"}
    answer = session.client.ask("POST", "create_model", body)
    assert answer.status_code == 400
    assert "PERSONALPEFT_TINKER_ALIASES" in answer.get_data(as_text=True)


def test_targets_are_chosen_by_part_of_the_model(server: TinkerServer) -> None:
    session = server.session()
    attn = session.run(train_mlp=False).save("a", "save_weights_for_sampler")
    info = session.client.post("weights_info", {"tinker_path": attn})
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, False, False)


def test_the_unembedding_is_left_out_and_the_run_says_so(server: TinkerServer) -> None:
    run = server.session().run(train_unembed=True)
    info = run.session.client.post("get_info", {"model_id": run.id})
    assert (info["train_attn"], info["train_mlp"], info["train_unembed"]) == (True, True, False)

"""Samples over the wire: seeds, stops, log-probs, and the weights that were asked for."""

from __future__ import annotations

from contextlib import suppress

import pytest
from tinker_makers import TEXT, CallFailed, TinkerServer, datum, logprobs_of, refused, tokens

PROMPT = TEXT[:6]


def test_equal_seeds_give_equal_samples(server: TinkerServer) -> None:
    session = server.session()
    base = session.sampler()
    first, again = (session.sample(base, PROMPT, num_samples=3) for _ in range(2))
    assert first == again
    assert len({tuple(each["tokens"]) for each in first["sequences"]}) == 3
    other = session.sample(base, PROMPT, num_samples=3, params={"seed": 8})
    assert other != first


def test_samples_come_from_the_weights_as_they_were_saved(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    run.train(3)
    path = run.save("then", "save_weights_for_sampler")
    sampler = session.sampler(path)
    then = session.sample(sampler, PROMPT)
    run.train(10)
    assert session.sample(sampler, PROMPT) == then
    assert session.sample(session.sampler(), PROMPT) != then


def test_unnamed_weights_are_sampled_by_the_id_of_a_session(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    saved = run.call("save_weights_for_sampler", sampling_session_seq_id=40)
    assert "path" not in saved
    assert saved["sampling_session_id"] == f"{session.id}:sample:40"
    assert session.sample(saved["sampling_session_id"], PROMPT)["sequences"]


def test_log_probs_of_samples_are_those_of_training(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    run.train(3)
    sampler = session.sampler(run.save("then", "save_weights_for_sampler"))
    sampled = session.sample(sampler, PROMPT, prompt_logprobs=True)
    (sequence,) = sampled["sequences"]
    assert len(sequence["tokens"]) == len(sequence["logprobs"])
    trained = logprobs_of(run.forward([datum([*PROMPT, *sequence["tokens"]])]))
    assert sampled["prompt_logprobs"][0] is None
    both = [*sampled["prompt_logprobs"][1:], *sequence["logprobs"]]
    assert both == pytest.approx(trained, abs=2e-3)


def test_many_samples_of_one_api_key_do_not_hold_up_those_of_another(server: TinkerServer) -> None:
    ada, bob = server.session("ada"), server.session("bob")
    samplers = ada.sampler(), bob.sampler()
    body = {
        "sampling_session_id": samplers[0],
        "num_samples": 4,
        "prompt": tokens(PROMPT),
        "sampling_params": {"max_tokens": 200},
    }
    requests = [ada.client.post("asample", body)["request_id"] for _ in range(40)]
    assert bob.sample(samplers[1], PROMPT)["sequences"]
    left = server.extension.service.futures.queued(in_runs=False)
    for request in requests:
        ada.client.post("cancel_future", {"request_id": request})
    assert len(left) > 30
    # In the end each call has an outcome.
    for request in requests:
        with suppress(CallFailed):
            ada.client.result(request)
    assert server.extension.service.futures.queued(in_runs=False) == []


def test_a_sample_of_no_tokens_is_empty_and_has_the_log_probs_of_its_prompt(
    server: TinkerServer,
) -> None:
    session = server.session()
    sampled = session.sample(
        session.sampler(), PROMPT, num_samples=2, params={"max_tokens": 0}, prompt_logprobs=True
    )
    assert [each["tokens"] for each in sampled["sequences"]] == [[], []]
    assert len(sampled["prompt_logprobs"]) == len(PROMPT)


def test_top_k_draws_from_the_likeliest_tokens_alone(server: TinkerServer) -> None:
    session = server.session()
    base = session.sampler()
    greedy = session.sample(base, PROMPT, params={"temperature": 0})["sequences"]
    one = session.sample(base, PROMPT, num_samples=3, params={"top_k": 1})["sequences"]
    assert all(each["tokens"] == greedy[0]["tokens"] for each in one)
    free = session.sample(base, PROMPT, num_samples=3)["sequences"]
    everything = session.sample(base, PROMPT, num_samples=3, params={"top_k": 10**6})["sequences"]
    assert everything == free
    likeliest = session.sample(base, PROMPT, topk_prompt_logprobs=4)["topk_prompt_logprobs"]
    first = session.sample(
        base, PROMPT[:-1], num_samples=40, params={"top_k": 4, "max_tokens": 1, "temperature": 3.0}
    )["sequences"]
    assert {each["tokens"][0] for each in first} == {token for token, _ in likeliest[-1]}


def test_top_log_probs_of_a_prompt_are_sorted_and_agree_with_its_tokens(
    server: TinkerServer,
) -> None:
    session = server.session()
    run = session.run()
    run.train(3)
    sampler = session.sampler(run.save("then", "save_weights_for_sampler"))
    sampled = session.sample(sampler, PROMPT, prompt_logprobs=True, topk_prompt_logprobs=200)
    top, own = sampled["topk_prompt_logprobs"], sampled["prompt_logprobs"]
    assert top[0] is None
    for token, logprob, row in zip(PROMPT[1:], own[1:], top[1:], strict=True):
        logprobs = [each for _, each in row]
        assert len({each for each, _ in row}) == 200
        assert logprobs == sorted(logprobs, reverse=True)
        assert dict(map(tuple, row)).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
    assert session.sample(sampler, PROMPT)["topk_prompt_logprobs"] is None


def test_a_stop_token_ends_a_sample_and_is_part_of_it(server: TinkerServer) -> None:
    session = server.session()
    base = session.sampler()
    (free,) = session.sample(base, PROMPT)["sequences"]
    stop = free["tokens"][4]
    end = free["tokens"].index(stop) + 1
    (stopped,) = session.sample(base, PROMPT, params={"stop": [stop]})["sequences"]
    assert stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == free["tokens"][:end]
    assert stopped["logprobs"] == pytest.approx(free["logprobs"][:end])


def test_a_stop_string_ends_a_sample(server: TinkerServer) -> None:
    backend = server.runtime.engine().backend
    text = backend.encode("the quick brown fox jumps")
    session = server.session()
    run = session.run(rank=8)
    run.train(25, [datum(text)])
    sampler = session.sampler(run.save("learned", "save_weights_for_sampler"))
    params = {"temperature": 0.0, "max_tokens": 15}
    (free,) = session.sample(sampler, text[:6], params=params)["sequences"]
    assert "brown" in backend.decode(free["tokens"])
    (cut,) = session.sample(sampler, text[:6], params={**params, "stop": "wn"})["sequences"]
    assert cut["stop_reason"] == "stop"
    assert backend.decode(cut["tokens"]).endswith("brown")


def test_a_sample_of_a_base_that_the_server_does_not_have_is_refused(
    server: TinkerServer,
) -> None:
    body = {
        "base_model": "no-base-of-this-server",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 2},
    }
    answer = server.session().client.ask("POST", "asample", body)
    assert (answer.status_code, "This server's base" in answer.text) == (400, True)


@pytest.mark.parametrize(
    ("prompt", "more", "problem"),
    [
        ([], {}, "at least one token"),
        ([10**6], {}, "only tokens of the base"),
        (PROMPT, {"params": {"max_tokens": 10**6}}, "more than the"),
        ([10] * 5000, {}, "5000 tokens"),
        ([10] * 5000, {"prompt_logprobs": True, "params": {"max_tokens": 0}}, "5000 tokens"),
    ],
)
def test_a_mistake_of_the_client_is_named(
    server: TinkerServer, prompt: list[int], more: dict[str, object], problem: str
) -> None:
    session = server.session()
    with refused(problem):
        session.sample(session.sampler(), prompt, **more)

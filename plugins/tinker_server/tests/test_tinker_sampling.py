"""Samples over the wire: seeds, stops, log-probs, and the weights that were asked for."""

from __future__ import annotations

import pytest
from tinker_makers import TEXT, CallFailed, TinkerServer, datum, logprobs_of

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


@pytest.mark.parametrize(
    ("prompt", "more", "problem"),
    [
        ([], {}, "at least one token"),
        ([10**6], {}, "only tokens of the base"),
        (PROMPT, {"params": {"top_k": 5}}, "top_k"),
        (PROMPT, {"params": {"max_tokens": 10**6}}, "more than the"),
    ],
)
def test_a_mistake_of_the_client_is_named(
    server: TinkerServer, prompt: list[int], more: dict[str, object], problem: str
) -> None:
    session = server.session()
    with pytest.raises(CallFailed, match=problem) as failed:
        session.sample(session.sampler(), prompt, **more)
    assert failed.value.args[1] == "user"

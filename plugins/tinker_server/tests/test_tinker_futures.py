"""Polls say why there is no result yet, and clients may ask for the size of a large one first."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from tinker_makers import TEXT, TinkerServer, datum, passed, tokens

from personalpeft_tinker_server import routes, sampling


def test_a_poll_without_a_result_says_that_the_call_goes_on(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "POLL_SECONDS", 0.1)
    run = server.session().run()
    # The call before it is missing.
    later = run.submit("optim_step", run.seq + 2, adam_params={})
    answer = run.session.client.post("retrieve_future", {"request_id": later})
    assert (answer["type"], answer["queue_state"]) == ("try_again", "active")
    run.forward_backward([datum(TEXT)])
    assert run.session.client.result(later)["metrics"]


def test_a_poll_for_a_sample_that_waits_for_others_says_so(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session()
    ask = {
        "base_model": "tiny-random",
        "prompt": tokens(TEXT[:4]),
        "sampling_params": {"max_tokens": 2, "seed": 1},
    }
    with monkeypatch.context() as patch:
        patch.setattr(routes, "POLL_SECONDS", 0.1)
        patch.setattr(sampling, "MAX_WORKERS", 0)
        waiting = session.client.post("asample", ask)["request_id"]
        answer = session.client.post("retrieve_future", {"request_id": waiting})
    assert (answer["type"], answer["queue_state"]) == ("try_again", "paused_capacity")
    assert "go first" in answer["queue_state_reason"]
    # The next call makes it start.
    other = session.client.post("asample", ask)["request_id"]
    assert session.client.result(waiting) == session.client.result(other)


@pytest.mark.exhaustive
def test_polls_beyond_half_of_the_places_are_refused_and_results_need_none(
    server: TinkerServer,
) -> None:
    run = server.session().run()
    client = run.session.client
    done = run.submit("forward", forward_input=passed([datum(TEXT)], "cross_entropy"))
    result = client.result(done)
    # The call before it is missing.
    waiting = {"request_id": run.submit("optim_step", run.seq + 2, adam_params={})}
    places = server.runtime.max_requests // 2
    with ThreadPoolExecutor(places + 1) as pool:
        polls = {
            pool.submit(client.ask, "POST", "retrieve_future", waiting) for _ in range(places + 1)
        }
        (first,), others = wait(polls, return_when=FIRST_COMPLETED)
        assert first.result().status_code == 429
        assert int(first.result().headers["Retry-After"]) > 0
        assert client.post("retrieve_future", {"request_id": done}) == result
        run.submit(
            "forward_backward", forward_backward_input=passed([datum(TEXT)], "cross_entropy")
        )
        assert {poll.result().status_code for poll in others} == {200}


def test_the_size_of_a_large_result_comes_before_it_where_the_client_takes_that(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = server.session().run()
    client = run.session.client
    request = run.submit("forward", forward_input=passed([datum(TEXT)], "cross_entropy"))
    result = client.result(request)
    peek = {"request_id": request, "allow_metadata_only": True}
    # A second request would cost more than a small result.
    assert client.post("retrieve_future", peek) == result
    monkeypatch.setattr(routes, "LARGE_RESULT", 100)
    size = client.post("retrieve_future", peek)
    assert size["status"] == "complete_metadata"
    assert size["response_payload_size"] > 100
    assert client.result(request) == result


def test_a_key_without_the_prefix_of_the_sdk_is_exchanged_for_a_token(
    server: TinkerServer,
) -> None:
    """As mindlab-toolkit, whose keys begin with "sk-"."""
    client = server.client("ada")
    assert client.post("client/config", {})["pjwt_auth_enabled"] is False
    key = {"X-Api-Key": f"sk-{client.secret}"}
    config = client.ask("POST", "client/config", {}, headers=key).get_json()
    assert config["pjwt_auth_enabled"] is True
    token = client.ask("POST", "auth/token", headers=key).get_json()["jwt"]
    claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
    assert claims["exp"] - claims["iat"] == 3600
    assert abs(claims["iat"] - time.time()) < 60
    with_token = {"X-Api-Key": token}
    session = client.session()
    listed = client.ask("GET", "sessions", headers=with_token).get_json()["sessions"]
    assert session.id in listed
    # The client exchanges it again before it expires.
    again = client.ask("POST", "auth/token", headers=with_token).get_json()["jwt"]
    assert client.ask("GET", "sessions", headers={"X-Api-Key": again}).status_code == 200
    wrong = token[: token.rindex(".")] + ".pp_" + "0" * 64
    assert client.ask("GET", "sessions", headers={"X-Api-Key": wrong}).status_code == 401
    assert client.ask("POST", "auth/token", headers={"X-Api-Key": wrong}).status_code == 401

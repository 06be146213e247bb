"""Each token gets what it gets alone while all train and sample, and nothing of another token."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from tinker_makers import (
    BASE,
    TEXT,
    CallFailed,
    Client,
    Run,
    Session,
    TinkerServer,
    checkpoint_route,
    datum,
    kl_datum,
    logprobs_of,
    passed,
    tokens,
)

PROMPT = TEXT[:6]
STEPS = 3
# Method, path and body.
Request: TypeAlias = tuple[str, str, Any]


@dataclass
class Owner:
    """A token with its own training data, a run and its saved weights."""

    run: Run
    data: list[Any]
    weights: str

    @property
    def session(self) -> Session:
        return self.run.session

    @property
    def client(self) -> Client:
        return self.session.client

    @property
    def checkpoint(self) -> str:
        return checkpoint_route(self.weights)

    @classmethod
    def create(cls, server: TinkerServer, user: str | None, seed: int) -> Owner:
        run = server.session(user).run(seed=seed)
        data = [datum([(token + seed) % 256 for token in TEXT])]
        run.train(STEPS, data)
        return cls(run, data, run.save("mine", "save_weights_for_sampler"))

    def train(self) -> list[float]:
        """Train a new run, and return its losses and its last log-probs."""
        run = self.session.run()
        return [*run.train(STEPS, self.data), *logprobs_of(run.forward(self.data))]

    def sample(self) -> Any:
        """Sample from the saved weights, with a seed."""
        sampler = self.session.sampler(self.weights)
        return self.session.sample(sampler, PROMPT, num_samples=2, prompt_logprobs=True)


@pytest.fixture(scope="module")
def owners(server: TinkerServer) -> dict[str, Owner]:
    """Two users, and two tokens of administrators."""
    users = {"ada": "ada", "bo": "bo", "first token": None, "second token": None}
    return {
        name: Owner.create(server, user, seed) for seed, (name, user) in enumerate(users.items(), 1)
    }


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Let threads take turns as often as they can, so that a race shows."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def test_losses_and_samples_under_load_are_those_of_an_api_key_alone(
    owners: dict[str, Owner],
) -> None:
    losses = {name: owner.train() for name, owner in owners.items()}
    samples = {name: owner.sample() for name, owner in owners.items()}
    assert len({json.dumps(each) for each in samples.values()}) == len(owners)
    with ThreadPoolExecutor(2 * len(owners)) as pool:
        training = {name: pool.submit(owner.train) for name, owner in owners.items()}
        sampling = {name: pool.submit(owner.sample) for name, owner in owners.items()}
    for name in owners:
        # Passes of several runs are computed together, which rounds in another way.
        assert training[name].result() == pytest.approx(losses[name], rel=1e-4), name
        assert sampling[name].result() == samples[name], name


@pytest.mark.exhaustive
@pytest.mark.usefixtures("eager_switches")
def test_links_that_are_made_at_once_give_the_weights_of_their_api_key(
    owners: dict[str, Owner],
) -> None:
    def link(name: str) -> str:
        """Return the link to the archive of a token's weights."""
        redirect = owners[name].client.ask("GET", f"{owners[name].checkpoint}/archive")
        location: str = redirect.headers["Location"]
        return location.partition("/tinker/api/v1/")[2]

    def download(link: str) -> bytes:
        """Return the weights in the archive that a link gives, without a token."""
        found = owners["ada"].client.ask("GET", link, headers={"X-Api-Key": ""})
        assert found.status_code == 200, found.get_data(as_text=True)
        with tarfile.open(fileobj=io.BytesIO(found.data)) as archive:
            weights = archive.extractfile("adapter_model.safetensors")
            assert weights is not None
            return weights.read()

    wanted = {name: download(link(name)) for name in owners}
    assert len(set(wanted.values())) == len(owners)
    jobs = [*owners] * 100
    with ThreadPoolExecutor(8) as pool:
        links = list(pool.map(link, jobs))
    # Making an archive takes longer than making a link.
    for name, each in list(zip(jobs, links, strict=True))[::10]:
        assert download(each) == wanted[name]


@pytest.mark.exhaustive
def test_a_sample_is_cancelled_by_its_own_api_key_alone(owners: dict[str, Owner]) -> None:
    ada, bo = owners["ada"], owners["bo"]

    def start() -> str:
        body = {
            "sampling_session_id": ada.session.sampler(ada.weights),
            "prompt": tokens(PROMPT),
            "sampling_params": {"max_tokens": 200, "seed": 7},
            "num_samples": 4,
        }
        request: str = ada.client.post("asample", body)["request_id"]
        return request

    request = start()
    bo.client.post("cancel_future", {"request_id": request})
    assert len(ada.client.result(request)["sequences"]) == 4
    request = start()
    ada.client.post("cancel_future", {"request_id": request})
    with pytest.raises(CallFailed, match="cancelled"):
        ada.client.result(request)


def test_a_prompt_that_an_api_key_sampled_is_not_in_the_cache_of_another(
    server: TinkerServer, owners: dict[str, Owner]
) -> None:
    engine = server.runtime.learning_engine()

    def sample(owner: Owner) -> float:
        """Sample from the base, and return how many prompt tokens were found in the cache."""
        before = engine.metrics()["prefix_cache_hits_total"]
        owner.session.sample(owner.session.sampler(), TEXT * 6)
        return engine.metrics()["prefix_cache_hits_total"] - before

    assert [sample(owner) for owner in owners.values()] == [0] * len(owners)
    assert all(sample(owner) > 0 for owner in owners.values())


@pytest.mark.parametrize("other", ["bo", pytest.param("first token", marks=pytest.mark.exhaustive)])
def test_the_ids_of_an_api_key_tell_and_change_nothing_for_another(
    server: TinkerServer, owners: dict[str, Owner], other: str
) -> None:
    """The answers are those for ids that do not exist, also while the other token trains."""
    ada, undisturbed = (Owner.create(server, "ada", seed=1) for _ in range(2))
    expected = undisturbed.run.train(STEPS, ada.data)
    bo = owners[other]
    own_run = bo.session.run()
    sampling = {"sampling_session_id": ada.session.sampler(ada.weights), **_sampling()}
    request = ada.client.post("asample", {**sampling, "seq_id": 0})["request_id"]
    sampled = ada.client.result(request)

    def answers(session: str, request: str) -> list[tuple[str, int, str]]:
        return [
            (f"{method} {path}".replace(session, "S"), status, text.replace(session, "S"))
            for method, path, body in _requests(session, request, own_run)
            for status, text in [_answer(bo.client, (method, path, body))]
        ]

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(ada.run.train, STEPS, ada.data)
        theirs = answers(ada.session.id, request)
        nobodys = answers("session-" + "0" * 16, "0" * 32)
        assert theirs == nobodys
        assert training.result() == pytest.approx(expected, rel=1e-4)
    for path in ("sessions", "training_runs", "checkpoints"):
        assert ada.session.id not in json.dumps(bo.client.get(path))
        # Another token of the same user sees them.
        assert ada.session.id in json.dumps(server.client("ada").get(path))
    assert ada.client.result(request) == sampled
    again = ada.client.post("asample", {**sampling, "seq_id": 99})["request_id"]
    assert ada.client.result(again) == sampled


def _sampling() -> dict[str, Any]:
    return {"prompt": tokens(PROMPT), "sampling_params": {"max_tokens": 8, "seed": 7}}


def _requests(session: str, request: str, own_run: Run) -> Iterator[Request]:
    """Yield all requests that name a session, its first run, sampler and weights, or a request."""
    run, sampler = f"{session}:train:0", f"{session}:sample:0"
    weights = f"tinker://{run}/sampler_weights/mine"
    checkpoint = checkpoint_route(weights)
    for path in (
        f"sessions/{session}",
        f"samplers/{sampler}",
        f"training_runs/{run}",
        f"training_runs/{run}/checkpoints",
        f"{checkpoint}/archive",
    ):
        yield "GET", path, None
    yield "PUT", f"{checkpoint}/ttl", {"ttl_seconds": 1}
    yield "DELETE", f"{checkpoint}/publish", None
    yield "DELETE", checkpoint, None
    data = passed([datum(TEXT)])
    kl = kl_datum(PROMPT, PROMPT, TEXT)
    # The number of a call that was made, and one that was not.
    numbers = [{"seq_id": 0}, {"seq_id": 1}, {"seq_id": 99}]
    posts: dict[str, list[dict[str, Any]]] = {
        f"{checkpoint}/publish": [{}],
        f"sessions/{session}/finish": [{}],
        "telemetry": [{"session_id": session, "events": [{"event": "SESSION_END"}]}],
        "session_heartbeat": [{"session_id": session}],
        "retrieve_future": [{"request_id": request}],
        "cancel_future": [{"request_id": request}],
        "create_model": [{"session_id": session, "model_seq_id": 0, "base_model": BASE}],
        "get_info": [{"model_id": run}],
        "unload_model": [{"model_id": run}],
        "forward": [{"model_id": run, "forward_input": data, **n} for n in numbers],
        "forward_backward": [
            {"model_id": run, "forward_backward_input": data, **n} for n in numbers
        ],
        "optim_step": [{"model_id": run, "adam_params": {}, **n} for n in numbers],
        "save_weights": [{"model_id": run, "path": "theirs", **n} for n in numbers],
        "save_weights_for_sampler": [{"model_id": run, "path": "theirs", **n} for n in numbers],
        "load_weights": [
            {"model_id": run, "path": weights},
            {"model_id": own_run.id, "path": weights},
            {"session_id": own_run.session.id, "model_seq_id": 50, "path": weights},
        ],
        "mint/forward_backward_reverse_kl": [
            {"model_id": run, "reference_model_path": BASE, "data": [kl]},
            {"model_id": own_run.id, "reference_model_path": weights, "data": [kl]},
        ],
        "mint/checkpoints/interpolate": [{"source_paths": [weights], "coefficients": [1.0]}],
        "weights_info": [{"tinker_path": weights}],
        "personal/adopt": [{"tinker_path": weights, "user": "bo", "layer": "skill.fox"}],
        "create_sampling_session": [
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": BASE},
            {
                "session_id": own_run.session.id,
                "sampling_session_seq_id": 50,
                "model_path": weights,
            },
        ],
        "asample": [
            {"model_path": weights, **_sampling()},
            *({"sampling_session_id": sampler, **_sampling(), **n} for n in numbers),
        ],
    }
    for path, bodies in posts.items():
        for body in bodies:
            yield "POST", path, body


def _answer(client: Client, request: Request) -> tuple[int, str]:
    """Return the status and the text of an answer, or the error of the call that it queued."""
    response = client.ask(*request)
    body = response.get_json(silent=True) or {}
    if response.status_code == 200 and "request_id" in body:
        try:
            return 200, json.dumps(client.result(body["request_id"]))
        except CallFailed as failed:
            return 200, repr(failed.args)
    return response.status_code, response.get_data(as_text=True)

"""The benchmark of other engines measures what it says and prints it under the names that the documentation gives: on a tiny
base, and for vLLM on what stands in for its server, where the figures themselves mean nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from app_makers import Place
from vllm_double import Double, doubled

from benchmarks import engines, engines_fleet, engines_vllm, vllm
from benchmarks.engines_asked import AGREE, PROMPTS, Said, agreement
from benchmarks.fleet import Fleet
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, ServingFailed

pytestmark = pytest.mark.exhaustive

_BASE = "tiny-random"


def _nothing(text: str) -> None:
    pass


@pytest.fixture
def double(tiny_base: Base, monkeypatch: pytest.MonkeyPatch) -> Iterator[Double]:
    """In the place of the server that would be started."""
    # It writes what no model would.
    monkeypatch.setattr("personalpeft.backends.vllm.model_check._MAX_DIFFERENCE", 100.0)
    # All requests knock at once.
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 2 * engines_vllm.REQUESTS)
    with doubled(Double(tiny_base, slots=engines_vllm.STACKS + 1)) as double:

        @contextmanager
        def served(*args: Any, slots: int, **more: Any) -> Iterator[vllm.Server]:
            assert slots == double.slots
            yield vllm.Server(double.url)

        monkeypatch.setattr(vllm, "served", served)
        yield double


@pytest.fixture
def fleet(tiny_base: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fleet]:
    """In the place of replicas behind Ray Serve: the larger fleet, which stands for both of those that would be started."""
    monkeypatch.setattr("personalpeft.backends.vllm.model_check._MAX_DIFFERENCE", 100.0)
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 2 * engines_vllm.REQUESTS)
    monkeypatch.setattr(engines_fleet, "_TOLD_SECONDS", 0)
    monkeypatch.setattr(engines_fleet, "example", lambda python: tmp_path / "example.yaml")
    with doubled(Double(tiny_base)) as double:
        double.resolver = tmp_path / "stacks"
        two = Fleet(double.url, 2, double.resolver, tmp_path / "cache")

        @contextmanager
        def fleets(*args: Any, replicas: list[int], **more: Any) -> Iterator[list[Fleet]]:
            assert replicas == [1, 2]
            yield [replace(two, replicas=1), two]

        monkeypatch.setattr(engines_fleet, "fleets", fleets)
        yield two


@pytest.mark.usefixtures("fleet")
def test_both_are_measured_and_without_vllm_the_output_says_how_to_get_it(
    place: Place, double: Double, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm.VARIABLE, sys.executable)
    found = engines.bench_engines(_BASE, repetitions=1, tokens=8, with_vllm=True, say=_nothing)

    def shown(found: engines.EnginesBench, *args: str) -> str:
        monkeypatch.setattr(engines, "bench_engines", lambda *args, **more: found)
        return place.run("bench", "engines", *args).stdout

    told = json.loads(shown(found, "--json"))
    assert told["bench"] == "engines"
    assert set(told["tokens_per_second"]) == set(told["agreement"]) == {"bare", "stack"}
    assert set(told["first_token_ms"]) == {"same", "resident", "same, one slot", "from disk"}
    assert set(told["switch_ms"]) == {"resident", "from disk"}
    assert told["torch_loaded"] is False
    # Nearly all of the 2,048 tokens of context that the figure is for.
    assert 1900 < told["memory_tokens"] <= 2048
    assert set(told["vllm"]["agreement"]) == {"bare", "stack"}
    assert {"unseen_ms", "engine_over_direct"} < set(told["vllm"])
    assert set(told["fleet"]["tokens_per_second"]) == {"one", "two"}
    rows = (
        "with a layer over without",
        "16 requests, engine over direct",
        "16 requests, two replicas over one",
    )
    for engine, row in zip(("llama.cpp", "vLLM", "vLLM"), rows, strict=True):
        assert f"{engine}: {row}" in shown(found)
    without = replace(found, vllm=None, fleet=None)
    assert json.loads(shown(without, "--json"))["vllm"] is None
    assert "make vllm-env" in shown(without)
    assert "make vllm-env" not in shown(found)


def test_a_python_that_is_not_there_is_said_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(vllm.VARIABLE, "/nowhere/python")
    with pytest.raises(InvalidInput, match="/nowhere/python"):
        engines.bench_engines(_BASE, repetitions=1, tokens=8, with_vllm=True, say=_nothing)


def test_vllm_is_measured_through_our_engine_and_straight(double: Double) -> None:
    found = engines_vllm.bench_vllm(_BASE, Path("python"), repetitions=1, tokens=8, say=_nothing)
    assert set(found.first_token_ms) == {"unseen", "seen"}
    assert set(found.tokens_per_second) == {"engine", "direct"}
    assert all(
        each.least > 0
        for each in (*found.tokens_per_second.values(), *found.first_token_ms.values())
    )
    assert {key: each.prompts for key, each in found.agreement.items()} == dict.fromkeys(
        ("bare", "stack"), len(PROMPTS)
    )
    timed = [
        body for path, body in double.asked if path == "/v1/completions" and body["max_tokens"] == 8
    ]
    ours, direct = timed[: found.requests], timed[found.requests :]
    assert len(direct) == found.requests
    for requests in (ours, direct):
        assert len({body["model"] for body in requests}) == found.stacks
        assert all(body["stream"] and body["temperature"] == 0 for body in requests)

    # Both ask for the same, of the same stacks.
    def asked(requests: list[Any]) -> list[tuple[str, list[int], list[int]]]:
        return sorted((body["model"], body["prompt"], body["stop_token_ids"]) for body in requests)

    assert asked(ours) == asked(direct)


def test_a_user_counts_as_unseen_once(double: Double) -> None:
    found = engines_vllm.bench_vllm(_BASE, Path("python"), repetitions=2, tokens=8, say=_nothing)
    loaded = [body["lora_name"] for path, body in double.asked if path == "/v1/load_lora_adapter"]
    # All of them, those of the throughput, and the one that changes nothing; each is loaded when it is first asked for.
    # What a server is tried with is nobody's.
    assert len({name for name in loaded if ":trial:" not in name}) == found.users + found.stacks + 1


def test_who_is_answered_where_their_stack_was_is_told_from_who_has_it_pulled_anew(
    fleet: Fleet,
) -> None:
    def pull(text: str) -> None:
        # As a replica does, while the two are measured for the first time.
        if text.startswith("1 of 2: two"):
            (fleet.cache / "process-x" / ("0" * 64)).mkdir(parents=True)

    found = engines_fleet.bench_fleet(_BASE, Path("python"), repetitions=2, tokens=8, say=pull)
    assert found is not None
    assert found.at_home == round(1 - 1 / (2 * engines_vllm.REQUESTS), 4)
    assert all(each.least > 0 for each in found.tokens_per_second.values())


def test_a_python_without_ray_runs_no_fleet(tmp_path: Path) -> None:
    heard: list[str] = []
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    assert engines_fleet.bench_fleet(_BASE, bare, repetitions=1, tokens=8, say=heard.append) is None
    assert "no Ray" in heard[0]


def test_a_client_that_is_refused_says_what_the_server_said(double: Double) -> None:
    with pytest.raises(ServingFailed, match="nobody"):
        vllm.Server(double.url).stream([(1, 2)], ["nobody"], 4, ())


def test_replies_are_compared_up_to_the_first_token_that_differs() -> None:
    whole, short = tuple(range(AGREE)), (1, 2)
    one = Said((whole, short, (1, 2, 3)), ())
    other = Said((whole, short, (1, 9, 3)), ())
    found = agreement(one, other, [-1.0, -2.0], [-1.5, -2.0])
    assert (found.prompts, found.same) == (3, 2)
    assert found.tokens_alike == round((AGREE + AGREE + 1) / 3, 1)
    assert found.logprob_difference == 0.25

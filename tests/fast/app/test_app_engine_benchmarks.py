"""The engine benchmarks print the documented keys.

They run on a tiny base and a stand-in for vLLM, so their figures mean nothing.
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
from app_makers import Shell
from vllm_double import VllmDouble, run_double

from benchmarks import engines, engines_fleet, engines_vllm, vllm
from benchmarks.engine_comparison import AGREE, PROMPTS, GreedyTokens, agreement
from benchmarks.fleet import Fleet
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, ServingFailed

pytestmark = pytest.mark.exhaustive

_BASE = "tiny-random"


def _nothing(text: str) -> None:
    pass


@pytest.fixture
def double(tiny_base: Base, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmDouble]:
    """The stand-in for the vLLM server that the benchmark would start."""
    # Its replies are not a model's.
    monkeypatch.setattr("personalpeft.backends.vllm.model_check.MAX_DIFFERENCE", 100.0)
    # Its load requests all arrive at once.
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 2 * engines_vllm.REQUESTS)
    with run_double(VllmDouble(tiny_base, slots=engines_vllm.STACKS + 1)) as double:

        @contextmanager
        def run_server(*args: Any, slots: int, **more: Any) -> Iterator[vllm.Server]:
            assert slots == double.slots
            yield vllm.Server(double.url)

        monkeypatch.setattr(vllm, "run_server", run_server)
        yield double


@pytest.fixture
def fleet(tiny_base: Base, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fleet]:
    """One fleet of stand-ins for replicas behind Ray Serve, used for both fleet sizes."""
    monkeypatch.setattr("personalpeft.backends.vllm.model_check.MAX_DIFFERENCE", 100.0)
    monkeypatch.setattr(ThreadingHTTPServer, "request_queue_size", 2 * engines_vllm.REQUESTS)
    monkeypatch.setattr(engines_fleet, "REPORT_SECONDS", 0)
    monkeypatch.setattr(engines_fleet, "example", lambda python: tmp_path / "example.yaml")
    with run_double(VllmDouble(tiny_base)) as double:
        double.resolver = tmp_path / "stacks"
        two = Fleet(double.url, 2, double.resolver, tmp_path / "cache")

        @contextmanager
        def fleets(*args: Any, replicas: list[int], **more: Any) -> Iterator[list[Fleet]]:
            assert replicas == [1, 2]
            yield [replace(two, replicas=1), two]

        monkeypatch.setattr(engines_fleet, "fleets", fleets)
        yield two


@pytest.mark.usefixtures("fleet")
def test_both_engines_are_measured_and_a_missing_vllm_is_explained(
    shell: Shell, double: VllmDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(vllm.VARIABLE, sys.executable)
    result = engines.bench_engines(_BASE, repetitions=1, tokens=8, with_vllm=True, echo=_nothing)

    def shown(result: dict[str, Any], *args: str) -> str:
        monkeypatch.setattr(engines, "bench_engines", lambda *args, **more: result)
        return shell.run("bench", "engines", *args).stdout

    output = json.loads(shown(result, "--json"))
    assert output["bench"] == "engines"
    assert set(output["agreement"]) == {"bare", "stack"}
    assert set(output["tokens_per_second"]) == {"bare", "stack", "stack, sampled"}
    assert output["sampled_vs_greedy"]["median"] > 0
    assert set(output["first_token_ms"]) == {"same", "resident", "same, one slot", "from disk"}
    assert set(output["switch_ms"]) == {"resident", "from disk"}
    assert output["torch_loaded"] is False
    # Nearly all of the 2,048 tokens of context that the memory figure is for.
    assert 1900 < output["memory_tokens"] <= 2048
    assert set(output["vllm"]["agreement"]) == {"bare", "stack"}
    assert {"unseen_ms", "engine_over_direct"} < set(output["vllm"])
    assert set(output["fleet"]["tokens_per_second"]) == {"one", "two"}
    rows = (
        "with a layer over without",
        "16 requests, engine over direct",
        "16 requests, two replicas over one",
    )
    for row in rows:
        assert row in shown(result)
    without = {**result, "vllm": None, "fleet": None}
    assert json.loads(shown(without, "--json"))["vllm"] is None
    assert "make vllm-env" in shown(without)
    assert "make vllm-env" not in shown(result)


def test_a_missing_python_is_reported_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(vllm.VARIABLE, "/nowhere/python")
    with pytest.raises(InvalidInput, match="/nowhere/python"):
        engines.bench_engines(_BASE, repetitions=1, tokens=8, with_vllm=True, echo=_nothing)


def test_vllm_is_measured_through_our_engine_and_directly(double: VllmDouble) -> None:
    result = engines_vllm.bench_vllm(_BASE, Path("python"), repetitions=1, tokens=8, echo=_nothing)
    assert set(result["first_token_ms"]) == {"unseen", "seen"}
    assert set(result["tokens_per_second"]) == {"engine", "direct"}
    assert all(
        each.least > 0
        for each in (*result["tokens_per_second"].values(), *result["first_token_ms"].values())
    )
    assert {key: each["prompts"] for key, each in result["agreement"].items()} == dict.fromkeys(
        ("bare", "stack"), len(PROMPTS)
    )
    timed = [
        body
        for path, body in double.requests
        if path == "/v1/completions" and body["max_tokens"] == 8
    ]
    ours, direct = timed[: result["requests"]], timed[result["requests"] :]
    assert len(direct) == result["requests"]
    for requests in (ours, direct):
        assert len({body["model"] for body in requests}) == result["stacks"]
        assert all(body["stream"] and body["temperature"] == 0 for body in requests)

    # Both send the same requests for the same stacks.
    def requests_of(requests: list[Any]) -> list[tuple[str, list[int], list[int]]]:
        return sorted((body["model"], body["prompt"], body["stop_token_ids"]) for body in requests)

    assert requests_of(ours) == requests_of(direct)


def test_a_user_counts_as_unseen_once(double: VllmDouble) -> None:
    result = engines_vllm.bench_vllm(_BASE, Path("python"), repetitions=2, tokens=8, echo=_nothing)
    loaded = [
        body["lora_name"] for path, body in double.requests if path == "/v1/load_lora_adapter"
    ]
    # Those of the users, of the throughput and the neutral stack; each is loaded by its first
    # request. Trials belong to no user.
    assert (
        len({name for name in loaded if ":trial:" not in name})
        == result["users"] + result["stacks"] + 1
    )


def test_hits_on_the_home_replica_and_fresh_pulls_are_told_apart(
    fleet: Fleet,
) -> None:
    def pull(text: str) -> None:
        # Replicas pull stacks while both are measured for the first time.
        if text.startswith("1 of 2: two"):
            (fleet.cache / "process-x" / ("0" * 64)).mkdir(parents=True)

    result = engines_fleet.bench_fleet(_BASE, Path("python"), repetitions=2, tokens=8, echo=pull)
    assert result is not None
    assert result["at_home"] == round(1 - 1 / (2 * engines_vllm.REQUESTS), 4)
    assert all(each.least > 0 for each in result["tokens_per_second"].values())


def test_a_python_without_ray_runs_no_fleet(tmp_path: Path) -> None:
    messages: list[str] = []
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    assert (
        engines_fleet.bench_fleet(_BASE, bare, repetitions=1, tokens=8, echo=messages.append)
        is None
    )
    assert "no Ray" in messages[0]


def test_a_refused_client_reports_the_servers_message(double: VllmDouble) -> None:
    with pytest.raises(ServingFailed, match="nobody"):
        vllm.Server(double.url).stream([(1, 2)], ["nobody"], 4, ())


def test_replies_are_compared_up_to_the_first_different_token() -> None:
    whole, short = tuple(range(AGREE)), (1, 2)
    one = GreedyTokens((whole, short, (1, 2, 3)), ())
    other = GreedyTokens((whole, short, (1, 9, 3)), ())
    result = agreement(one, other, [-1.0, -2.0], [-1.5, -2.0])
    assert (result["prompts"], result["same"]) == (3, 2)
    assert result["tokens_alike"] == round((AGREE + AGREE + 1) / 3, 1)
    assert result["logprob_difference"] == 0.25

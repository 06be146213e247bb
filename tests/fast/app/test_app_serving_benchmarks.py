"""The serving benchmarks print the documented keys.

They run on a tiny base, so their figures mean nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import pytest
from app_makers import Shell

from benchmarks import promote, vllm
from benchmarks.attach import bench_attach
from benchmarks.figures import Spread, alternate, percentile, ratio
from benchmarks.prompts import bench_prompts
from benchmarks.serve import bench_serve
from benchmarks.server import bench_server
from benchmarks.wave import bench_wave
from personalpeft.errors import InvalidInput, ServingFailed
from personalpeft.settings import Serving

pytestmark = pytest.mark.exhaustive

_BASE = "tiny-random"

# A stand-in for vLLM's server: it ignores SIGTERM and starts a child that must be ended too.
_SERVER = """\
#!{python}
import json, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if "-c" in sys.argv:
    sys.exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
names = [each.partition("=")[0] for each in sys.argv[sys.argv.index("--lora-modules") + 1 :]]
print("pids", os.getpid(), child.pid, flush=True)
if {broken}:
    sys.exit("no such model")

class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = asked["model"] in names and asked["ignore_eos"] and asked["temperature"] == 0
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps({{"usage": {{"completion_tokens": asked["max_tokens"]}}}}).encode())

    def log_message(self, *args):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Answers).serve_forever()
"""


def _nothing(text: str) -> None:
    pass


def _gone(log: Path) -> bool:
    """Return whether the server and its child have ended."""
    pids = next(line for line in log.read_text().splitlines() if line.startswith("pids")).split()[
        1:
    ]
    states = subprocess.run(
        ["ps", "-o", "stat=", "-p", ",".join(pids)], capture_output=True, text=True, check=False
    )
    return all(state.startswith("Z") for state in states.stdout.split())


def _has_spreads(
    spread: Mapping[str, tuple[float, float]], *figures: Mapping[str, float | None]
) -> None:
    for key, figure in {key: figure for group in figures for key, figure in group.items()}.items():
        assert figure is not None, key
        least, most = spread[key]
        assert 0 < least <= figure <= most, key


Make: TypeAlias = Callable[[bool], Path]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Write a stand-in for a Python with vLLM. Its server starts or fails."""

    def make(works: bool) -> Path:
        path = tmp_path / "python"
        path.write_text(_SERVER.format(python=sys.executable, broken=not works))
        path.chmod(0o700)
        monkeypatch.setenv(vllm.VARIABLE, str(path))
        return path

    monkeypatch.setattr(vllm, "END_SECONDS", 0.2)
    return make


def test_serve_compares_with_every_baseline(server: Make) -> None:
    server(True)
    result = bench_serve(_BASE, repetitions=2, tokens=3, with_vllm=True, echo=_nothing)
    assert set(result["tokens_per_second"]) == {
        *("own_base_1", "own_mixed_1", "own_base_16", "own_mixed_16", "peft_1", "peft_mixed_16"),
        *("peft_set_adapter_16", "generate_16", "vllm_mixed_16"),
        *("own_base_16_sampled", "own_mixed_16_sampled"),
    }
    assert set(result["ratios"]) == {
        *("mixed_vs_peft", "mixed_vs_peft_set_adapter", "mixed_vs_vllm", "mixed_vs_own_base"),
        *("base_vs_generate", "one_vs_peft", "step_vs_floor", "sampled_vs_greedy"),
    }
    _has_spreads(result["spread"], result["tokens_per_second"], result["ratios"])


def test_serve_reports_what_did_not_run(shell: Shell, server: Make, shared_cache: Path) -> None:
    server(False)
    args = (
        "bench",
        "serve",
        "--base",
        _BASE,
        "--repeat",
        "1",
        "--tokens",
        "2",
        "--without-vllm",
        "--json",
    )
    output = json.loads(
        shell.run(*args, backend="torch", PERSONALPEFT_CACHE=str(shared_cache)).stdout
    )
    assert output["bench"] == "serve"
    assert output["tokens_per_second"]["vllm_mixed_16"] is None
    assert output["ratios"]["mixed_vs_vllm"] is None
    assert not shell.home.exists()


def test_attach_times_files_host_memory_and_peft() -> None:
    result = bench_attach(_BASE, repetitions=2, echo=_nothing)
    assert set(result["milliseconds"]) == {
        "disk_to_slot",
        "host_to_slot",
        "peft_load",
        "peft_load_quick",
    }
    assert set(result["ratios"]) == {"peft_vs_disk_to_slot", "peft_quick_vs_disk_to_slot"}
    _has_spreads(result["spread"], result["milliseconds"], result["ratios"])


def test_prompts_are_read_alone_and_from_the_cache() -> None:
    result = bench_prompts(_BASE, repetitions=2, echo=_nothing)
    assert set(result["spread"]) == {*result["milliseconds"], *result["ratios"]}
    assert all(least > 0 for least, _ in result["spread"].values())


def test_promote_times_other_streams_and_both_handovers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(promote, "PAUSE_SECONDS", 0.01)
    result = promote.bench_promote(_BASE, repetitions=1, tokens=24, echo=_nothing)
    assert set(result["ratios"]) == {"stall_p99", "stall_sampled_p99", "sampled_vs_greedy"}
    assert result["promotions"] > 0
    handoff = {"merged_vs_adapter_handoff": result["merged_vs_adapter_handoff"]}
    _has_spreads(result["spread"], result["milliseconds"], result["ratios"], handoff)


def test_a_wave_loads_each_stack_from_disk() -> None:
    small = Serving(slots=4, max_batch=4, host_bytes=0)
    result = bench_wave(_BASE, 12, repetitions=1, tokens=2, serving=small, echo=_nothing)
    assert (result["users"], result["slots"], result["host_fits"]) == (12, 4, 0)
    assert result["read_from_disk"] >= 12 - result["slots"]
    assert set(result["ratios"]) == {"wave_vs_resident", "sampled_vs_greedy"}
    assert result["sampled_tokens_per_second"] > 0
    assert 0 < result["p50_first_token_seconds"] <= result["p95_first_token_seconds"]
    named = {key: result[key] for key in ("tokens_per_second", "p95_first_token_seconds")}
    _has_spreads(result["spread"], named, result["ratios"])


def test_a_server_is_measured_beside_the_library(shell: Shell) -> None:
    result = bench_server("fake", "fake", repetitions=2, tokens=8, echo=_nothing)
    assert set(result["first_token_ms"]) == {"library", "server"}
    assert set(result["tokens_per_second"]) == {"library", "server", "server, sampled"}
    assert all(
        each.least > 0
        for each in (*result["first_token_ms"].values(), *result["tokens_per_second"].values())
    )
    assert result["rate_ratio"].least > 0
    assert result["sampled_vs_greedy"].least > 0
    assert result["healthz_ms"].most < 10_000
    output = json.loads(
        shell.run("bench", "server", "--backend", "fake", "--repeat", "1", "--json").stdout
    )
    assert output["bench"] == "server"


def test_sixty_four_concurrent_streams_are_measured(shell: Shell) -> None:
    output = json.loads(
        shell.run(
            *("bench", "streams", "--backend", "fake", "--repeat", "1", "--tokens", "4", "--json")
        ).stdout
    )
    assert (output["bench"], output["streams"]) == ("streams", 64)
    assert set(output["spread"]) == {*output["seconds"], "sampled_vs_greedy"}
    assert min(output["seconds"].values()) > 0
    assert output["threads"] > 64


def test_a_wave_that_fits_into_memory_is_refused(shell: Shell, shared_cache: Path) -> None:
    args = ("bench", "wave", "--base", _BASE, "--users", "3", "--json")
    result = shell.run(*args, backend="torch", PERSONALPEFT_CACHE=str(shared_cache))
    assert result.exit_code == 2
    assert "3 " in json.loads(result.stderr)["error"]["message"]


@pytest.mark.parametrize("name", ["serve", "attach", "promote", "wave"])
def test_other_backends_than_torch_are_refused(shell: Shell, name: str) -> None:
    result = shell.run("bench", name)
    assert result.exit_code == 2
    assert "--backend" in result.stderr


@pytest.mark.parametrize(
    ("sent", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_the_server_ends_with_its_block_however_the_block_ends(
    server: Make, tmp_path: Path, sent: signal.Signals, raised: type[BaseException]
) -> None:
    log, python = tmp_path / "log", server(True)
    # Interrupts may be ignored where the tests run in the background of a shell.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def interrupted() -> None:
        with vllm.run_server(
            python,
            tmp_path,
            log,
            adapters=[tmp_path / "a"],
            slots=1,
            rank=8,
            longest=64,
            echo=_nothing,
        ) as served:
            assert served.write([(1, 2), (3,)], ["a", "a"], 5) == 10
            signal.raise_signal(sent)

    try:
        with pytest.raises(raised):
            interrupted()
    finally:
        signal.signal(signal.SIGINT, before)
    assert _gone(log)


def test_a_server_that_fails_to_start_reports_why(server: Make, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        pytest.raises(ServingFailed, match="no such model"),
        vllm.run_server(
            server(False),
            tmp_path,
            log,
            adapters=[tmp_path / "a"],
            slots=1,
            rank=8,
            longest=64,
            echo=_nothing,
        ),
    ):
        pass
    assert _gone(log)


def test_a_missing_python_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.VARIABLE, "/nowhere/python")
    with pytest.raises(InvalidInput, match="/nowhere/python"):
        vllm.python_with_vllm()


def test_measurements_alternate_and_ratios_pair_within_a_repetition() -> None:
    order: list[tuple[str, int]] = []

    def contestant(name: str, figures: list[float]) -> Callable[[int], float]:
        def run(repetition: int) -> float:
            order.append((name, repetition))
            return figures[repetition - 1]

        return run

    contestants = {
        "own": contestant("own", [4.0, 2.0, 9.0]),
        "peer": contestant("peer", [2.0, 1.0, 3.0]),
    }
    figures = alternate(contestants, 3, _nothing)
    assert order == [(name, repetition) for repetition in (1, 2, 3) for name in ("own", "peer")]
    assert ratio(figures["own"], figures["peer"]) == Spread(2.0, 2.0, 3.0)
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0

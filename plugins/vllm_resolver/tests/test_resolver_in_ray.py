"""The example for Ray Serve LLM: two replicas of vLLM, each of which pulls the stacks that it is asked for, and is asked again for those
that it has.

Where the Python with vLLM has Ray too: what ``PERSONALPEFT_BENCH_VLLM`` names, or ``make vllm-env`` made. It takes two minutes or more.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from socket import create_server

import pytest
from resolver_makers import PLUGIN, PYTHON, card_for_vllm, random_stack, written

import personalpeft
from personalpeft import Runtime
from personalpeft.bases.base import Base
from personalpeft.bases.prepare import prepare
from personalpeft.bases.shelf import find_card

EXAMPLE = PLUGIN / "examples" / "ray_serve_llm.yaml"
PEOPLE = 6

# The example as it stands but for where things lie here, and for how much of this machine it may take.
SERVE = """
import json, sys, yaml
import ray
from ray import serve
from ray.serve.llm import build_openai_app

said = json.loads(sys.argv[1])
(application,) = yaml.safe_load(open(said["example"]))["applications"]
(config,) = application["args"]["llm_configs"]
config["model_loading_config"]["model_source"] = said["base"]
config["engine_kwargs"] |= {"dtype": "float32", "max_model_len": 2048, "max_num_seqs": 16}
config["runtime_env"]["env_vars"] |= said["environment"]
config["log_engine_metrics"] = False
ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": said["port"]})
serve.run(build_openai_app(application["args"]))
print("it is up", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not list(PYTHON.parents[1].glob("lib/python*/site-packages/ray/serve")),
        reason="there is no vLLM with Ray here; make vllm-env makes an environment for both",
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ray")


@pytest.fixture(scope="module")
def base(place: Path) -> Base:
    return prepare(find_card(card_for_vllm(place)), cache=place / "personalpeft-cache")


@pytest.fixture(scope="module")
def url(base: Base, place: Path) -> Iterator[str]:
    """The address of two replicas."""
    with create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(place / "shared"),
        "PERSONALPEFT_RESOLVER_CACHE": str(place / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": str(PLUGIN),
    }
    said = {"example": str(EXAMPLE), "base": str(base.folder), "port": port, "environment": environment}
    # Else Ray's workers let every other process go first, for minutes on a machine that is busy.
    quiet = {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with (place / "ray.log").open("wb+") as log:
        process = subprocess.Popen(
            [PYTHON, "-c", SERVE, json.dumps(said)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=place,
            env={**os.environ, **environment, **quiet},
        )
        try:
            while b"it is up" not in (place / "ray.log").read_bytes():
                assert process.poll() is None, (place / "ray.log").read_text("utf-8", "replace")[-3000:]
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.communicate()


@pytest.fixture
def runtime(url: str, base: Base, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place / "personalpeft-cache"))
    monkeypatch.setenv("PERSONALPEFT_VLLM_URL", url)
    monkeypatch.setenv("PERSONALPEFT_VLLM_RESOLVES", "1")
    monkeypatch.setenv("PERSONALPEFT_VLLM_FOLDER", str(place / "shared"))
    with personalpeft.open(tmp_path / "home", base=card_for_vllm(place), backend="vllm") as opened:
        yield opened


def resident(place: Path) -> list[set[str]]:
    """Which stacks each replica has pulled."""
    parts = [{each.name for each in part.iterdir() if each.is_dir()} for part in (place / "cache").glob("process-*")]
    return [part for part in parts if part]


@pytest.mark.timeout(900)
def test_each_replica_pulls_the_stacks_that_it_is_asked_for_and_is_asked_again_for_those(
    runtime: Runtime, base: Base, place: Path, tmp_path: Path, url: str
) -> None:
    people = [runtime.user(f"user-{number}") for number in range(PEOPLE)]
    bare = people[0].chat("How do I boil an egg?", temperature=0, max_tokens=8).text
    for number, person in enumerate(people):
        person.import_peft(written(random_stack(base, number), tmp_path / person.id), layer="style")

    def round_of_all() -> list[str]:
        return [person.chat("How do I boil an egg?", temperature=0, max_tokens=8).text for person in people]

    said = round_of_all()
    assert len({bare, *said}) == PEOPLE + 1
    # Replicas tell the router now and then what they have.
    time.sleep(3)
    pulled = resident(place)
    assert [round_of_all() for _ in range(3)] == 3 * [said]
    assert resident(place) == pulled
    one, other = pulled
    assert not one & other
    assert len(one | other) >= PEOPLE


def test_a_stack_that_is_nowhere_to_be_had_is_not_found(url: str) -> None:
    body = json.dumps({"model": f"personalpeft:{'0' * 64}", "prompt": "Hello", "max_tokens": 1}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60)
    assert refused.value.code == 404
    assert b"does not exist" in refused.value.read()

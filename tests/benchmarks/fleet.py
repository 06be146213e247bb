"""Fleets of vLLM replicas behind Ray Serve LLM on this machine, as in the plugin's example.

``bench engines`` and the tests of plugins/vllm_resolver use them. A fleet is a process of the
Python that has vLLM, Ray and the plugin. It ends with the ``with`` block in any case, and listens
on the loopback interface only.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.vllm import end_session, free_port, raise_on_sigterm, wait_for_start

_START_SECONDS, _END_SECONDS = 900, 60

# The plugin's example with other paths, replica counts and resources.
_SERVE = """
import json, sys, yaml
import ray
from ray import serve
from ray.serve.llm import build_openai_app

said = json.loads(sys.argv[1])
ray.init(address="local", num_cpus=8 * len(said["fleets"]), include_dashboard=False, object_store_memory=100 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": said["port"]})
for fleet in said["fleets"]:
    (application,) = yaml.safe_load(open(said["example"]))["applications"]
    (config,) = application["args"]["llm_configs"]
    config["model_loading_config"]["model_source"] = said["base"]
    config["deployment_config"]["num_replicas"] = fleet["replicas"]
    config["engine_kwargs"] |= said["engine"]
    config["runtime_env"]["env_vars"] |= {**said["environment"], "PERSONALPEFT_RESOLVER_CACHE": fleet["cache"]}
    config["log_engine_metrics"] = False
    serve.run(build_openai_app(application["args"]), name=fleet["name"], route_prefix=fleet["route"])
print("it is up", flush=True)
sys.stdin.read()
serve.shutdown()
ray.shutdown()
"""
_FIND = """
from importlib.util import find_spec
from pathlib import Path
plugin = find_spec("ray") and find_spec("personalpeft_vllm_resolver")
print(Path(plugin.origin).parents[1] / "examples" / "ray_serve_llm.yaml" if plugin else "")
"""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas behind one address.

    Stacks are published below ``stacks``; copies lie below ``cache``.
    """

    url: str
    replicas: int
    stacks: Path
    cache: Path

    def pulled(self) -> list[set[str]]:
        """Return the digests of the stacks that each replica has pulled."""
        parts = [
            {each.name for each in part.iterdir() if each.is_dir()}
            for part in self.cache.glob("process-*")
        ]
        return [part for part in parts if part]


def example(python: Path) -> Path | None:
    """Return the example of this Python's plugin, or None without the plugin, its example or Ray."""
    found = subprocess.run(
        [python, "-c", _FIND], capture_output=True, text=True, check=False
    ).stdout.strip()
    return Path(found) if found and Path(found).is_file() else None


@contextmanager
def fleets(
    python: Path,
    example: Path,
    base: Path,
    work: Path,
    *,
    replicas: Sequence[int],
    threads: int = 1,
    dtype: str = "bfloat16",
    environment: Mapping[str, str],
    echo: Callable[[str], None],
) -> Iterator[list[Fleet]]:
    """Start a fleet for each number of replicas and wait until all respond.

    Each replica has ``threads`` threads; logs go to ``work``. Call it in the main thread.

    Raises:
        ServingFailed: A fleet does not start.
    """
    port, stacks, log = free_port(), work / "stacks", work / "ray.log"
    made = [
        Fleet(f"http://127.0.0.1:{port}/fleet-{number}", count, stacks, work / f"cache-{number}")
        for number, count in enumerate(replicas)
    ]
    environment = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(stacks),
        # The example's values do not fit this machine.
        "PERSONALPEFT_RESOLVER_BUCKET": "",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **environment,
    }
    said = {
        "example": str(example),
        "base": str(base),
        "port": port,
        "environment": environment,
        "engine": {"dtype": dtype, "max_model_len": 2048, "max_num_seqs": 16},
        "fleets": [
            {
                "name": f"fleet-{n}",
                "route": f"/fleet-{n}",
                "replicas": each.replicas,
                "cache": str(each.cache),
            }
            for n, each in enumerate(made)
        ],
    }
    # Otherwise Ray's workers yield to all other processes, for minutes on a busy machine.
    quiet = {
        "RAY_worker_niceness": "0",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    echo(f"starting {sum(replicas)} replicas behind Ray Serve, some minutes")
    with log.open("wb") as output, raise_on_sigterm():
        process = subprocess.Popen(
            [python, "-c", _SERVE, json.dumps(said)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=work,
            env={**os.environ, **environment, **quiet},
            start_new_session=True,
        )
        try:
            wait_for_start(
                process,
                lambda: b"it is up" in log.read_bytes(),
                "Ray Serve",
                log,
                _START_SECONDS,
            )
            yield made
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its replicas. Kill it if it does not end."""
    try:
        with suppress(subprocess.TimeoutExpired, BrokenPipeError):
            process.communicate(timeout=_END_SECONDS)
    finally:
        end_session(process)

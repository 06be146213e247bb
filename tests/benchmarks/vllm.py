"""The peer that runs in a process of its own: vLLM's OpenAI server, from the Python that ``PERSONALPEFT_BENCH_VLLM`` names
(``make vllm-env`` makes one).

Invariant: the server ends with the ``with`` block, however that ends, by Ctrl-C or SIGTERM too; it listens on the loopback
interface alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx2

from personalpeft.backends.base import Tokens
from personalpeft.errors import InvalidInput, MissingPackage, ServingFailed

VARIABLE = "PERSONALPEFT_BENCH_VLLM"
_START_SECONDS, _REPLY_SECONDS, _END_SECONDS = 600, 600, 15
_WITHOUT = "Leave it out: --without-vllm."
# Where a proxy is set for the outer world, the loopback interface must still be asked directly.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers, with adapters by name."""

    url: str

    def write(self, prompts: Sequence[Tokens], adapters: Sequence[str], count: int) -> int:
        """Sends all prompts at once, each for its adapter; every reply has so many tokens, greedy. How many all have."""

        def one(prompt: Tokens, adapter: str) -> int:
            body = {
                "model": adapter,
                "prompt": list(prompt),
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
            }
            said = _asked(f"{self.url}/v1/completions", body)
            return int(said["usage"]["completion_tokens"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            return sum(pool.map(one, prompts, adapters))

    def stream(
        self, prompts: Sequence[Tokens], adapters: Sequence[str], count: int, end: Tokens
    ) -> int:
        """As ``write``, but each reply is read token by token as it comes, and ends with ``end`` where the model says so: what a
        client does that people wait for. How many tokens all have without that. Raises ``ServingFailed``.
        """

        async def one(client: httpx2.AsyncClient, prompt: Tokens, adapter: str) -> int:
            body = {"model": adapter, "prompt": list(prompt), "max_tokens": count, "temperature": 0}
            body |= {"stop_token_ids": list(end), "stream": True, "return_token_ids": True}
            written = 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx2.codes.OK:
                    said = (await response.aread())[:300].decode("utf-8", "replace")
                    raise ServingFailed(f"vLLM refused a request: {said}", hint=_WITHOUT)
                async for event in httpx2.EventSource(response):
                    if event.data != "[DONE]":
                        tokens = json.loads(event.data)["choices"][0]["token_ids"]
                        written += sum(token not in end for token in tokens)
            return written

        async def all_of_them() -> int:
            # The loopback interface needs neither a proxy nor certificates.
            client = httpx2.AsyncClient(
                base_url=self.url, timeout=_REPLY_SECONDS, trust_env=False, verify=False
            )
            async with client:
                return sum(
                    await asyncio.gather(
                        *(one(client, *each) for each in zip(prompts, adapters, strict=True))
                    )
                )

        try:
            return asyncio.run(all_of_them())
        except httpx2.TransportError as error:
            raise ServingFailed(f"vLLM did not answer: {error}.", hint=_WITHOUT) from error

    def models(self) -> tuple[str, ...]:
        """What it can be asked for: its base, and all adapters that it knows now."""
        with _DIRECT.open(f"{self.url}/v1/models", timeout=_REPLY_SECONDS) as answer:
            return tuple(each["id"] for each in json.load(answer)["data"])


def python_with_vllm() -> Path | None:
    """The Python that is named; None where none is. Raises ``InvalidInput`` where it is no file."""
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    # Not resolved: what makes it the Python of its environment is the folder that its link lies in.
    python = Path(named).expanduser().absolute()
    if not python.is_file():
        raise InvalidInput(
            f"{VARIABLE} names {python}, which is no file.",
            hint="Name a Python, or run make vllm-env.",
        )
    return python


@contextmanager
def served(
    python: Path,
    base: Path,
    log: Path,
    *,
    adapters: Sequence[Path] = (),
    slots: int,
    rank: int,
    longest: int,
    dtype: str = "bfloat16",
    options: Sequence[str] = (),
    port: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
    say: Callable[[str], None],
) -> Iterator[Server]:
    """Starts the server on a base's folder, which it calls "base", with these PEFT folders by their names and with room for so
    many at once, and waits until it answers. Others can be loaded while it runs. Rows have up to ``longest`` tokens; what it says
    goes to ``log``. For the main thread. Raises ``MissingPackage``, ``ServingFailed``.
    """
    if subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        raise MissingPackage(
            f"{python} has no vLLM that can be imported.", hint="Run make vllm-env."
        )
    port = port or free_port()
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *(
            "--model",
            str(base),
            "--served-model-name",
            "base",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        ),
        *("--dtype", dtype, "--max-model-len", str(longest)),
        *("--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(rank)),
        *(
            ("--lora-modules", *(f"{folder.name}={folder}" for folder in adapters))
            if adapters
            else ()
        ),
        *options,
    ]
    # By default it leaves one processor idle, of two half the machine; what the caller has set wins.
    roomy = {"VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    quiet |= {"VLLM_CACHE_ROOT": str(log.parent / "vllm-cache")}
    environment = {
        **roomy,
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        **os.environ,
        **quiet,
        **environment,
    }
    say("starting vLLM's server, about a minute")
    with log.open("wb") as output, sigterm_unwinds():
        # A session of its own, so that its workers can be ended with it, and Ctrl-C reaches us first.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            _wait_for(process, f"http://127.0.0.1:{port}", log)
            yield Server(f"http://127.0.0.1:{port}")
        finally:
            ended(process)


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def sigterm_unwinds() -> Iterator[None]:
    """Inside, SIGTERM (that of ``timeout``, for one) ends this program as an exception does, and not at once."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_for(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + _START_SECONDS
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with _DIRECT.open(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.5)
    said = log.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
    raise ServingFailed(
        f"vLLM's server did not start. The last that it said: {said[-1][:300]}",
        hint=_WITHOUT,
    )


def _asked(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with _DIRECT.open(request, timeout=_REPLY_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ServingFailed(
            f"vLLM refused a request: {error.read(300).decode('utf-8', 'replace')}",
            hint=_WITHOUT,
        ) from error
    except OSError as error:
        raise ServingFailed(f"vLLM did not answer: {error}.", hint=_WITHOUT) from error


def ended(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that began a session, and all that it started there. Its own end comes first, since it may have shared memory
    to give back.
    """
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(_END_SECONDS)
    finally:
        # Once more for those that did not listen, also where a second Ctrl-C cut the waiting short.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

"""vLLM's OpenAI server as a baseline, from the Python in ``PERSONALPEFT_BENCH_VLLM``.

``make vllm-env`` creates one. The server ends with the ``with`` block in any case, even by Ctrl-C
or SIGTERM. It listens on the loopback interface only.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
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

from personalpeft.backends.sequence import Tokens
from personalpeft.errors import InvalidInput, MissingPackage, ServingFailed

VARIABLE = "PERSONALPEFT_BENCH_VLLM"
# More options of the server, such as its share of a GPU's memory.
OPTIONS = "PERSONALPEFT_BENCH_VLLM_OPTIONS"
_START_SECONDS, _REPLY_SECONDS, END_SECONDS = 600, 600, 15
_WITHOUT = "Leave it out: --without-vllm."
# Where a proxy is configured, the loopback interface must be reached directly.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server with named adapters."""

    url: str

    def write(self, prompts: Sequence[Tokens], adapters: Sequence[str], count: int) -> int:
        """Send all prompts at once, each to its adapter, and return the total of tokens.

        Each reply has ``count`` tokens.

        """

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
        """Stream the replies, each up to the base's ``end`` token, and return the total of tokens.

        Raises:
            ServingFailed: A reply failed.
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
        """Return the served models: the base and all loaded adapters."""
        with _DIRECT.open(f"{self.url}/v1/models", timeout=_REPLY_SECONDS) as answer:
            return tuple(each["id"] for each in json.load(answer)["data"])


def python_with_vllm() -> Path | None:
    """Return the named Python, or None.

    Raises:
        InvalidInput: It is no file.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return None
    # Not resolved: a virtual environment is found by the folder of its link.
    python = Path(named).expanduser().absolute()
    if not python.is_file():
        raise InvalidInput(
            f"{VARIABLE} names {python}, which is no file.",
            hint="Name a Python, or run make vllm-env.",
        )
    return python


@contextmanager
def run_server(
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
    echo: Callable[[str], None],
) -> Iterator[Server]:
    """Run the server on a base's folder, as "base", with PEFT folders by name.

    ``slots`` adapters fit at once; others can be loaded later. Rows have up to ``longest`` tokens.
    Output goes to ``log``. Call it in the main thread.

    Raises:
        MissingPackage: The Python has no vLLM.
        ServingFailed: The server does not start.
    """
    if subprocess.run([python, "-c", "import vllm"], capture_output=True, check=False).returncode:
        raise MissingPackage(
            f"{python} has no vLLM that can be imported.", hint="Run make vllm-env."
        )
    port = port or free_port()
    modules = [f"{folder.name}={folder}" for folder in adapters]
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(base), "--served-model-name", "base"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", dtype, "--max-model-len", str(longest)),
        *("--enable-lora", "--max-loras", str(slots), "--max-lora-rank", str(rank)),
        *(["--lora-modules", *modules] if modules else []),
        *options,
        *shlex.split(os.environ.get(OPTIONS, "")),
    ]
    # By default vLLM leaves one processor idle: of two, half the machine.
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
    echo("starting vLLM's server, about a minute")
    with log.open("wb") as output, raise_on_sigterm():
        # A session of its own, so that its workers end with it and Ctrl-C reaches this process
        # first.
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_for_start(process, lambda: _is_healthy(url), "vLLM's server", log)
            yield Server(url)
        finally:
            end_session(process)


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise an exception within the block, so that the block is unwound."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_for_start(
    process: subprocess.Popen[bytes],
    is_up: Callable[[], bool],
    name: str,
    log: Path,
    seconds: float = _START_SECONDS,
) -> None:
    """Wait until a server is up. Raises ``ServingFailed`` with the last line of its log."""
    until = time.monotonic() + seconds
    while not is_up():
        if process.poll() is not None or time.monotonic() > until:
            said = log.read_text("utf-8", "replace").strip().splitlines() or ["nothing"]
            raise ServingFailed(
                f"{name} did not start. The last that it said: {said[-1][:300]}", hint=_WITHOUT
            )
        time.sleep(0.5)


def _is_healthy(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


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


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process and its session, itself first, since it may own shared memory."""
    try:
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(END_SECONDS)
    finally:
        # Again for processes that ignored the first signal, also after a second Ctrl-C.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

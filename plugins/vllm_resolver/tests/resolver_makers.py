"""Stacks, caches that resolve them, hostile servers, and models for a real vLLM."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from personalpeft import User
from personalpeft.adapters.formats.peft import peft_tensors
from personalpeft.adapters.formats.peft_config import build_config
from personalpeft.adapters.formats.published import PublishedAdapter, compute_digest
from personalpeft.adapters.types import LoRAWeights
from personalpeft.base_models.types import Base
from personalpeft_vllm_resolver import settings
from personalpeft_vllm_resolver.cache import Cache, open_cache
from personalpeft_vllm_resolver.sources import FILES

PLUGIN = Path(__file__).parents[1]
PYTHON = Path(
    os.environ.get("PERSONALPEFT_BENCH_VLLM") or PLUGIN.parents[1] / ".venv-vllm" / "bin" / "python"
)
"""One with vLLM, where there is one: what the variable names, or what make vllm-env made."""

TOKEN = "pp_secret_of_a_worker"


def stack(seed: int = 0, size: int = 100_000) -> PublishedAdapter:
    files = {FILES[0]: b'{"r": %d}\n' % seed, FILES[1]: bytes([seed % 256]) * size}
    return PublishedAdapter(compute_digest(files), 8, files)


def cache(tmp_path: Path, **variables: Any) -> Cache:
    """Return a cache with settings, such as ``folder=...`` for PERSONALPEFT_RESOLVER_FOLDER."""
    environ = {f"{settings.PREFIX}{name.upper()}": str(value) for name, value in variables.items()}
    wanted = settings.read_settings({f"{settings.PREFIX}CACHE": str(tmp_path / "cache"), **environ})
    assert wanted is not None
    return open_cache(wanted)


def held(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def copies_in(tmp_path: Path) -> list[str]:
    """Return the names of all copies in the caches, whole and partial."""
    return sorted(path.name for path in (tmp_path / "cache").glob("process-*/*") if path.is_dir())


@contextmanager
def raw_server(
    answer: Callable[[socket.socket, bytes], None], tls: ssl.SSLContext | None = None
) -> Iterator[tuple[str, list[bytes]]]:
    """Serve each connection with ``answer``; yield the address and the received requests."""
    requests: list[bytes] = []
    listening = socket.create_server(("127.0.0.1", 0))

    def one(plain: socket.socket) -> None:
        with plain:
            try:
                line = tls.wrap_socket(plain, server_side=True) if tls else plain
                request = line.recv(65536)
                requests.append(request)
                answer(line, request)
            except OSError:
                # The client closed the connection.
                return

    def run() -> None:
        while True:
            try:
                line, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(line,), daemon=True).start()

    threading.Thread(target=run, daemon=True).start()
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listening.getsockname()[1]}", requests
    finally:
        # Closing alone would leave a thread blocked in accept.
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()


def learned(user: User) -> None:
    """Let a user of the fake model learn a style layer."""
    for number in range(5):
        user.feedback(
            user.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
        )
    assert user.learn().verdict == "promoted"


def file_of(made: PublishedAdapter, request: bytes) -> bytes:
    return made.files[request.split(b" ")[1].rpartition(b"/")[2].decode()]


def ok(data: bytes, length: int | None = None) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (len(data) if length is None else length)
        + data
    )


def card_for_vllm(folder: Path) -> Path:
    """Return the tiny base in a shape that vLLM's kernels accept."""
    tiny = (resources.files("personalpeft_models") / "tiny-random.toml").read_text("utf-8")
    path = folder / "tiny-vllm.toml"
    path.write_text(
        tiny.replace("tiny-random", "tiny-vllm").replace("hidden_size = 64", "hidden_size = 128"),
        "utf-8",
    )
    return path


def random_stack(base: Base, seed: int) -> PublishedAdapter:
    """Return a stack whose weights are large enough to change replies."""
    drawn, blocks, rank = np.random.default_rng(seed), base.architecture.blocks, 8
    pairs = {
        name: LoRAWeights(
            drawn.normal(size=(blocks, rank, wide)).astype(np.float16),
            drawn.normal(size=(blocks, high, rank)).astype(np.float16),
        )
        for name, (wide, high) in base.architecture.projections.items()
    }
    config = build_config(rank=rank, scaling=1.0, targets=list(pairs), base_name=base.card.name)
    tensors = save(peft_tensors(pairs, rank, base.architecture), metadata={"format": "pt"})
    files = {FILES[0]: json.dumps(config).encode(), FILES[1]: tensors}
    return PublishedAdapter(compute_digest(files), rank, files)


def change_weights(folder: Path) -> None:
    """Make a copy of a stack invalid: its weights are others."""
    (folder / FILES[1]).write_bytes(b"other numbers")


def delete_weights(folder: Path) -> None:
    """Make a copy of a stack invalid: its weights are missing."""
    (folder / FILES[1]).unlink()


def enlarge_config(folder: Path) -> None:
    """Make a copy of a stack invalid: its configuration is too large."""
    (folder / FILES[0]).write_bytes(bytes(2 << 20))


def request_completion(url: str, model: str) -> str:
    """Send a completion as any client of OpenAI's API does."""
    body = {"model": model, "prompt": "How do I boil an egg?", "max_tokens": 8, "temperature": 0}
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(asked, timeout=60) as answer:
        return str(json.loads(answer.read())["choices"][0]["text"])


def write_stack(made: PublishedAdapter, folder: Path) -> Path:
    """Write a stack's files into a folder of their own."""
    folder.mkdir()
    for name, data in made.files.items():
        (folder / name).write_bytes(data)
    return folder

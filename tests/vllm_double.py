"""A stand-in for vLLM's server that loses stacks, restarts, delays and fails on demand.

Its tokens depend only on the prompt's tokens and on the bytes of the adapter's folder.
``test_vllm_server.py`` checks its error messages against a real server.
"""

from __future__ import annotations

import hashlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from backend_makers import generate, row

from personalpeft.adapters.formats.published import FILES, build_published_adapter
from personalpeft.backends.base import Backend
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.backends.vllm.adapter_registry import neutral_stack
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.backends.vllm.model_check import check_prompt
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Request
from personalpeft.types import Message, Sampling, Stack

NO_LOAD = {
    "error": {
        "message": "Loading lora failed: LoRA rank 32 is greater than max_lora_rank 16.",
        "code": 500,
    }
}

Open = Callable[..., VllmBackend]
"""Opens the backend on a double. Keywords are its settings, or ``cache``, ``slots`` and ``rows``."""


class VllmDouble:
    """A fake vLLM server:

    ``requests`` logs (path, body), ``adapters`` are the loaded (name, path).
    """

    def __init__(self, base: Base, *, token: str = "", slots: int = 6) -> None:
        self.base, self.token, self.slots = base, token, slots
        self.text = ChatTokenizer(base)
        self._letters = self.text.encode("abcdefghijklmnopqrstuvwxyz")
        self.requests: list[tuple[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.bases = ["base"]
        self.updates = True
        # By path: (status, body) to answer next instead. Seconds of a load and of a token. Models
        # whose replies are cut after the third token.
        self.overrides: dict[str, list[tuple[int, Any]]] = {}
        self.load_seconds = 0.0
        self.token_seconds = 0.0
        self.cut_off: list[str] = []
        self.resolver: Path | None = None
        self.dropped = threading.Event()
        self.logprob = -1.0
        # The finish reason in a reply's last chunk. Then the error after its second token.
        self.finish: str | None = "length"
        self.late_error = ""
        # The most tokens of a reply; a token that replaces all others; the number of accepted
        # connections.
        self.longest = 32
        self.forced_token = 0
        self.connections = 0
        self.url = ""
        # Tokens of any text, where they differ from the base's tokenizer.
        self.tokenization: list[int] | None = None
        # Is called with each name after it was loaded.
        self.loaded: Callable[[str], None] = lambda name: None
        # Whether every response closes its connection; and whether connections are accepted.
        self.closes_connections = False
        self.accepts = threading.Event()
        self.accepts.set()

    def restart(self) -> None:
        """Drop all loaded stacks, as a restart does."""
        self.adapters.clear()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Accept no connection and fill the backlog within the block.

        For a client without an open connection, as with ``closes_connections``.
        """
        host, port = self.url.removeprefix("http://").split(":")
        self.accepts.clear()
        with ExitStack() as knocking:
            for _ in range(2 * ThreadingHTTPServer.request_queue_size):
                each = knocking.enter_context(socket.socket())
                each.setblocking(False)
                each.connect_ex((host, int(port)))
            try:
                yield
            finally:
                self.accepts.set()

    def request_count(self, path: str) -> int:
        """Return the number of requests to a path."""
        return sum(requested == path for requested, _ in self.requests)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.requests.append((path, body))
        if self.overrides.get(path):
            return self.overrides[path].pop(0)
        match path:
            case "/v1/models":
                return 200, {
                    "data": [
                        *map(self._listed, self.bases),
                        *map(self._lora, self.adapters.items()),
                    ]
                }
            case "/metrics":
                # A real server reports this only after its first completion.
                if not self.request_count("/v1/completions"):
                    return 200, "# TYPE vllm:lora_requests_info gauge"
                return (
                    200,
                    f'vllm:lora_requests_info{{max_lora="{self.slots}",running_lora_adapters=""}} 1.0',
                )
            case "/tokenize":
                return 200, {"tokens": self.tokenization or list(self.text.encode(body["prompt"]))}
            case "/v1/load_lora_adapter" if self.updates:
                return self._load(body["lora_name"], body["lora_path"])
            case "/v1/unload_lora_adapter" if self.updates:
                return (
                    (200, "gone")
                    if self.adapters.pop(body["lora_name"], None)
                    else (404, {"error": {"message": "?"}})
                )
        return 404, {"detail": "Not Found"}

    def tokens(self, body: Any) -> list[int] | None:
        """Return the tokens of a completion, or None for an unknown model."""
        name = body["model"]
        if self.resolver is not None and name.startswith("personalpeft:"):
            found = list(self.resolver.glob(f"*/{name.removeprefix('personalpeft:')}"))
            if not found:
                return None
            folder = found[0]
        elif name in self.adapters:
            folder = Path(self.adapters[name])
        else:
            return None
        digest = hashlib.sha256(
            repr(body["prompt"]).encode() + (folder / "adapter_model.safetensors").read_bytes()
        )
        return [
            self._letters[byte % 26]
            for byte in digest.digest()[: min(self.longest, body["max_tokens"])]
        ]

    def _load(self, name: str, path: str) -> tuple[int, Any]:
        time.sleep(self.load_seconds)
        if name in self.adapters:
            return 400, {
                "error": {"message": f"The lora adapter '{name}' has already been loaded."}
            }
        if not Path(path, "adapter_config.json").is_file():
            return 404, {
                "error": {"message": f"Loading lora {name} failed: No adapter found for {path}"}
            }
        self.adapters[name] = path
        self.loaded(name)
        return 200, "loaded"

    def _listed(self, name: str) -> Any:
        return {"id": name, "root": "/weights", "parent": None, "max_model_len": 2048}

    def _lora(self, known: tuple[str, str]) -> Any:
        return {"id": known[0], "root": known[1], "parent": "base"}


def cache_expected_tokens(double: VllmDouble, cache: Path) -> None:
    """Write the double's completion into the cache where the model check looks for torch's."""
    folder = build_published_adapter(neutral_stack(double.base), double.base)
    place = cache / "known"
    place.mkdir(parents=True, exist_ok=True)
    (place / FILES[1]).write_bytes(folder.files[FILES[1]])
    double.adapters["known"] = str(place)
    tokens = double.tokens(
        {"model": "known", "prompt": list(check_prompt(double.text)), "max_tokens": 24}
    )
    del double.adapters["known"]
    assert tokens is not None
    file = cache / "vllm" / f"{double.base.digest}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps([(token, -1.0) for token in tokens]))


@contextmanager
def run_double(double: VllmDouble, tls: ssl.SSLContext | None = None) -> Iterator[VllmDouble]:
    """Run the double on a free local port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            double.connections += 1
            super().setup()

        def do_GET(self) -> None:
            self._respond(*double.answer(self.path, None))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if double.token and self.headers.get("Authorization") != f"Bearer {double.token}":
                self._respond(401, {"error": "Unauthorized"})
            elif self.path == "/v1/completions" and not double.overrides.get(self.path):
                double.requests.append((self.path, body))
                self._write(body)
            else:
                self._respond(*double.answer(self.path, body))

        def _write(self, body: Any) -> None:
            tokens = double.tokens(body)
            if tokens is None:
                self._respond(
                    404,
                    {
                        "error": {
                            "message": f"The model `{body['model']}` does not exist.",
                            "code": 404,
                        }
                    },
                )
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self._end_headers()
            try:
                for count, token in enumerate(tokens):
                    time.sleep(double.token_seconds)
                    if count == 3 and double.cut_off and double.cut_off[0] == body["model"]:
                        double.cut_off.pop()
                        self.close_connection = True
                        return
                    if count == 2 and double.late_error:
                        self._event({"error": {"message": double.late_error, "code": 404}})
                        break
                    finish = double.finish if count + 1 == len(tokens) else None
                    choice = {"token_ids": [double.forced_token or token], "finish_reason": finish}
                    if body.get("logprobs") is not None:
                        choice["logprobs"] = {
                            "token_logprobs": [double.logprob],
                            "top_logprobs": [None],
                        }
                    self._event({"choices": [choice]})
                self._chunk(b"data: [DONE]\n\n")
                self._chunk(b"")
            except OSError:
                double.dropped.set()

        def _event(self, data: Any) -> None:
            self._chunk(b"data: " + json.dumps(data).encode() + b"\n\n")

        def _chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
            self.wfile.flush()

        def _respond(self, status: int, data: Any) -> None:
            body = data.encode() if isinstance(data, str) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self._end_headers()
            with suppress(OSError):
                self.wfile.write(body)

        def _end_headers(self) -> None:
            if double.closes_connections:
                self.send_header("Connection", "close")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    class PausableServer(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            double.accepts.wait()
            return super().get_request()

    ThreadingHTTPServer.request_queue_size = 64
    server = PausableServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    double.url = f"http{'s' if tls else ''}://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield double
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def generate_text(backend: Backend, stack: str | None, prompt: str = "hello", **more: Any) -> str:
    return generate(backend, [row(backend, prompt, stack, **more)])[0].text


def bare_request(base: Base) -> Request:
    """Return a short request on the bare base, for an engine."""
    stack = Stack(base.digest, ())
    return Request("ada", (Message("user", "hello"),), stack, Sampling(max_tokens=4))


def next_error(backend: Backend) -> Exception:
    """Return the error of the next row that fails."""
    while True:
        for piece in backend.step():
            if piece.error is not None:
                return piece.error


def wait_until(check: Callable[[], bool]) -> bool:
    until = time.monotonic() + 10
    while not check() and time.monotonic() < until:
        time.sleep(0.02)
    return check()

"""A server of Tinker's API in a process of its own, and a client for it without the SDK."""

from __future__ import annotations

import http.client
import itertools
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import child_environment

API = "/tinker/api/v1/"


class Client:
    """Sends one request at a time."""

    def __init__(self, port: int, secret: str) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        self._headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}

    def post(self, path: str, body: object, method: str = "POST") -> Any:
        """Return the answer to one request."""
        # The server closes a connection that was idle for a while.
        self._http.close()
        self._http.request(method, path, json.dumps(body), self._headers)
        response = self._http.getresponse()
        answer = response.read()
        if response.status not in {200, 201}:
            raise RuntimeError(f"{path}: {response.status} {answer[:300]!r}")
        return json.loads(answer)

    def call(self, route: str, **body: object) -> Any:
        """Post a call and wait for its result."""
        id_ = self.post(API + route, body)["request_id"]
        while True:
            found = self.post(API + "retrieve_future", {"request_id": id_})
            if "error" in found:
                raise RuntimeError(found["error"])
            if found.get("type") != "try_again":
                return found

    def open_session(self) -> tuple[str, str]:
        """Return the id of a new session, and the name of the base."""
        session = self.post(API + "create_session", {})["session_id"]
        served = self.post(API + "get_server_capabilities", {}, "GET")
        return session, served["supported_models"][0]["model_name"]

    def train(
        self, session: str, number: int, base: str, rank: int, data: list[Any]
    ) -> Iterator[None]:
        """Yield after each step of a run, which the first step creates."""
        run = self.call(
            "create_model",
            session_id=session,
            model_seq_id=number,
            base_model=base,
            lora_config={"rank": rank, "seed": number},
        )["model_id"]
        passed = {"data": data, "loss_fn": "cross_entropy"}
        for seq in itertools.count(1, 2):
            self.call("forward_backward", model_id=run, seq_id=seq, forward_backward_input=passed)
            self.call(
                "optim_step", model_id=run, seq_id=seq + 1, adam_params={"learning_rate": 1e-4}
            )
            yield

    def first_token_of_chat(self, text: str) -> float:
        """Return the seconds to the first text of a streamed chat."""
        body = {
            "model": "ada",
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 4,
            "stream": True,
        }
        began = time.perf_counter()
        self._http.close()
        self._http.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
        response = self._http.getresponse()
        for line in response:
            event = line.removeprefix(b"data: ").strip()
            if event.startswith(b"{"):
                choices = json.loads(event).get("choices")
                if choices is None:
                    raise RuntimeError(event)
                if choices and choices[0]["delta"].get("content"):
                    break
        seconds = time.perf_counter() - began
        response.read()
        return seconds


def datum(text: list[int]) -> dict[str, Any]:
    """Return a datum that predicts each next token."""
    count = len(text) - 1
    return {
        "model_input": {"chunks": [{"tokens": text[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": text[1:], "dtype": "int64", "shape": [count]},
            "weights": {"data": [1.0] * count, "dtype": "float32", "shape": [count]},
        },
    }


@contextmanager
def serving(base: str, home: Path, more: Mapping[str, str] = {}) -> Iterator[tuple[int, str, int]]:
    """Serve a home, and yield the port, an administrator's API key and the process id.

    Args:
        base: The base.
        home: The home, which is created.
        more: Further environment variables of the server.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**child_environment(), "PERSONALPEFT_HOME": str(home), **more}
    command = [sys.executable, "-m", "personalpeft_app", "--base", base]
    named = subprocess.run(
        [*command, "api-key", "first"], env=environment, capture_output=True, text=True, check=True
    )
    options = ["--tinker", "--port", str(port), "--max-queue", "512"]
    with (home / "server.log").open("ab") as log:
        server = subprocess.Popen([*command, "serve", *options], env=environment, stderr=log)
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if server.poll() is not None:
                    raise
                time.sleep(0.2)
        yield port, Path(named.stdout.strip()).read_text("utf-8").strip(), server.pid
    finally:
        server.terminate()
        server.wait(60)

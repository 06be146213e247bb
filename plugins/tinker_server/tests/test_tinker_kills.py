"""A server that is killed at random points loses nothing that it acknowledged."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from tinker_makers import BASE, TEXT, Client, datum, loss_of

import personalpeft

KILLS = int(os.environ.get("PERSONALPEFT_TINKER_KILLS", "3"))
_PATIENCE = 60.0


class RetryingClient(Client):
    """A client over a socket that repeats every request until it is answered."""

    patience = 600.0

    def __init__(self, port: int, secret: str) -> None:
        self._url, self.secret = f"http://127.0.0.1:{port}/tinker/api/v1", secret

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end:
            request = Request(
                f"{self._url}/{path}",
                json.dumps(body).encode(),
                {"X-Api-Key": self.secret, "Content-Type": "application/json"},
            )
            try:
                with urlopen(request, timeout=45) as answer:
                    return json.load(answer)
            except HTTPError as error:
                if error.code < 500:
                    raise AssertionError(error.read()) from error
            except (OSError, HTTPException, ValueError):
                # Killed meanwhile: the next server answers.
                time.sleep(0.05)
        raise AssertionError("no server answers")


class Trainer:
    """A run that saves after each step."""

    def __init__(self, client: Client) -> None:
        self._run = client.session().run()
        self.saved: list[str] = []
        self.losses: list[float] = []

    def step(self) -> None:
        self.losses.append(loss_of(self._run.forward_backward([datum(TEXT)])))
        self._run.step(1e-3)
        self.saved.append(self._run.save(f"step-{len(self.losses)}"))


@contextmanager
def running(home: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    program = Path(__file__).with_name("serve_program.py")
    with subprocess.Popen([sys.executable, program, str(home), str(port)]) as server:
        try:
            yield server
        finally:
            with suppress(ProcessLookupError):
                server.send_signal(signal.SIGKILL)


@pytest.mark.exhaustive
def test_every_acknowledged_save_is_there_after_kills_and_the_client_goes_on(
    tmp_path: Path,
) -> None:
    home = tmp_path / "home"
    with personalpeft.open(home, base=BASE, backend="torch") as runtime:
        secret = runtime.api_keys.create(None)[1]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    draw = random.Random(4)
    done = threading.Event()
    problems: list[BaseException] = []
    client = RetryingClient(port, secret)
    clients: list[Trainer] = []

    def train() -> None:
        try:
            clients.append(Trainer(client))
            while not done.is_set():
                clients[0].step()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            problems.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    for _ in range(KILLS):
        with running(home, port):
            before = len(clients[0].losses) if clients else 0
            end = time.monotonic() + _PATIENCE
            while (not clients or len(clients[0].losses) <= before) and not problems:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(draw.uniform(0, 0.5))
    with running(home, port):
        count = len(clients[0].losses)
        while len(clients[0].losses) < count + 2 and not problems:
            time.sleep(0.05)
        done.set()
        thread.join(_PATIENCE)
        assert problems == []
        (trainer,) = clients
        for path in trainer.saved:
            assert client.post("weights_info", {"tinker_path": path})["lora_rank"] == 4
        # As one run without a kill: no step was lost or made twice.
        again = Trainer(client)
        for _ in trainer.losses:
            again.step()
        assert trainer.losses == pytest.approx(again.losses, rel=1e-3)

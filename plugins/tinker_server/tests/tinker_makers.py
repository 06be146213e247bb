"""Servers in this process, and clients that speak the wire of the tinker SDK."""

from __future__ import annotations

import io
import os
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pytest
from flask import Flask

import personalpeft
from personalpeft import Runtime, plugins
from personalpeft.clock import SYSTEM, Clock
from personalpeft.settings import Serving
from personalpeft_app.http import security
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server
from personalpeft_tinker_server import TinkerExtension
from personalpeft_tinker_server.service import Options

BASE = "tiny-random"
PYTHONS = "PERSONALPEFT_TINKER_PYTHONS"
"""Python programs with an SDK, separated by colons; ``make tinker-env`` makes them."""
TEXT = list(b"the quick brown fox jumps over the lazy dog")
FIFTY_BATCHES = [
    [TEXT, list(b"pack my box with five dozen jugs")[: 8 + step % 20]] for step in range(50)
]
FIFTY_STEPS = {"learning_rate": 2e-3, "weight_decay": 0.1, "grad_clip_norm": 50.0}
"""The parameters of AdamW for these batches, beside the defaults of the API."""


@dataclass
class MovedClock:
    """A clock whose time a test moves on: the wall clock's, the timer's, or both."""

    wall: float = 0.0
    timer: float = 0.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.timer += seconds

    def clock(self) -> Clock:
        return Clock(
            now=lambda: datetime.now(UTC) + timedelta(seconds=self.wall),
            timer=lambda: time.monotonic() + self.timer,
        )


@dataclass
class TinkerServer:
    """A server on an open runtime."""

    runtime: Runtime
    app: Flask
    extension: TinkerExtension

    def client(self, user: str | None = None, token: str | None = None) -> Client:
        """Return a client with a token of its own, an administrator's without a user."""
        secret = token or self.runtime.api_keys.create(user)[1]
        return Client(self.app, secret)

    def session(self, user: str | None = None) -> Session:
        return self.client(user).session()

    def maintain(self) -> None:
        """Do now what the server does every few seconds."""
        self.extension.service.run_maintenance()


@contextmanager
def open_server(
    home: Path,
    options: Options = Options(),  # noqa: B008
    max_queue: int = Serving().max_queue,
    clock: Clock = SYSTEM,
) -> Iterator[TinkerServer]:
    serving = Serving(max_queue=max_queue)
    with personalpeft.open(home, base=BASE, backend="torch", serving=serving) as runtime:
        extension = TinkerExtension(runtime, security.plugin_host(), options, clock)
        try:
            yield TinkerServer(runtime, make_app(runtime, more=[extension.blueprint]), extension)
        finally:
            extension.close()


@contextmanager
def serving(server: TinkerServer) -> Iterator[str]:
    """Serve on a free port, and yield the address for clients."""
    socket = Server(server.app, limiter_of(server.runtime), host="127.0.0.1", port=0)
    thread = threading.Thread(target=lambda: socket.run(grace=1, close=server.extension.close))
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.port}/tinker"
    finally:
        socket.stop()
        thread.join(20)


def declare_entry_points(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Have the entry points of a group in pyproject.toml found, and no others."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))
    declared = project["project"]["entry-points"][group].items()
    entries = {group: [EntryPoint(name, value, group) for name, value in declared]}
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries.get(group, []))


def sdk_pythons() -> list[str]:
    """Return the Python programs with an SDK that PERSONALPEFT_TINKER_PYTHONS names."""
    named = os.environ.get(PYTHONS, "").split(os.pathsep)
    # Not resolved: a link to a Python is that of its environment.
    return [str(Path(each).absolute()) for each in named if each]


class CallFailed(Exception):
    """A call that ended with an error: its text and category."""


@contextmanager
def refused(problem: str) -> Iterator[None]:
    """Expect that a call ends as the client's mistake, whose text has the problem."""
    with pytest.raises(CallFailed, match=problem) as failed:
        yield
    assert failed.value.args[1] == "user"


@dataclass
class Client:
    """Sends requests with a token, as an SDK does. A call may take ``patience`` seconds."""

    app: Flask
    secret: str
    patience: ClassVar[float] = 30.0

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> Any:
        headers = {
            "X-Api-Key": f"tml-{self.secret}",
            "Host": "127.0.0.1",
            **more.pop("headers", {}),
        }
        return self.app.test_client().open(
            f"/tinker/api/v1/{path}",
            method=method,
            json=body,
            headers=headers,
            buffered=True,
            **more,
        )

    def post(self, path: str, body: Any, status: int = 200) -> Any:
        response = self.ask("POST", path, body)
        assert response.status_code == status, response.get_data(as_text=True)
        return response.get_json()

    def get(self, path: str) -> Any:
        response = self.ask("GET", path)
        assert response.status_code == 200, response.get_data(as_text=True)
        return response.get_json()

    def result(self, request_id: str) -> Any:
        """Poll for the result of a call. Raises ``CallFailed``."""
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            found = self.post("retrieve_future", {"request_id": request_id})
            if "error" in found:
                raise CallFailed(found["error"], found["category"])
            if found.get("type") != "try_again":
                return found
        raise AssertionError("there is no result")

    def session(self) -> Session:
        made = self.post("create_session", {"sdk_version": "0.24.1", "tags": []})
        return Session(self, made["session_id"])

    def archive(self, path: str, folder: Path) -> Path:
        """Download a checkpoint as a PEFT folder."""
        redirect = self.ask("GET", f"{checkpoint_route(path)}/archive")
        assert redirect.status_code == 302
        link = redirect.headers["Location"].partition("/tinker/api/v1/")[2]
        # The link needs no token.
        found = self.app.test_client().get(
            f"/tinker/api/v1/{link}", headers={"Host": "127.0.0.1"}, buffered=True
        )
        with tarfile.open(fileobj=io.BytesIO(found.data)) as tar:
            tar.extractall(folder, filter="data")
        return folder


@dataclass
class Session:
    client: Client
    id: str
    runs: int = 0
    samplers: int = 0

    def beat(self) -> None:
        self.client.post("session_heartbeat", {"session_id": self.id})

    def run(self, rank: int = 4, seed: int = 1, **lora: Any) -> Run:
        body = {
            "session_id": self.id,
            "model_seq_id": self.runs,
            "base_model": BASE,
            "lora_config": {"rank": rank, "seed": seed, **lora},
        }
        self.runs += 1
        made = self.client.post("create_model", body)
        self.client.result(made["request_id"])
        return Run(self, made["model_id"])

    def sampler(self, path: str | None = None) -> str:
        body = {
            "session_id": self.id,
            "sampling_session_seq_id": self.samplers,
            "base_model": BASE,
            "model_path": path,
        }
        self.samplers += 1
        made: str = self.client.post("create_sampling_session", body)["sampling_session_id"]
        return made

    def sample(self, sampler: str, prompt: Sequence[int], **more: Any) -> Any:
        body = {
            "sampling_session_id": sampler,
            "prompt": tokens(prompt),
            "sampling_params": {
                "max_tokens": 8,
                "temperature": 1.0,
                "seed": 7,
                **more.pop("params", {}),
            },
            **more,
        }
        return self.client.result(self.client.post("asample", body)["request_id"])


@dataclass
class Run:
    """A training run. Each call takes the next number."""

    session: Session
    id: str
    seq: int = 0

    def on(self, server: TinkerServer) -> Run:
        """Return this run for its client on a server that was started again."""
        client = server.client(token=self.session.client.secret)
        return Run(Session(client, self.session.id), self.id, self.seq)

    def submit(self, route: str, seq: int | None = None, **body: Any) -> str:
        """Post a call and return the id of its request."""
        if seq is None:
            self.seq += 1
            seq = self.seq
        call = {"model_id": self.id, "seq_id": seq, **body}
        made: str = self.session.client.post(route, call)["request_id"]
        return made

    def call(self, route: str, **body: Any) -> Any:
        """Post a call and wait for its result."""
        return self.session.client.result(self.submit(route, **body))

    def forward_backward(
        self, data: Sequence[Any], loss: str = "cross_entropy", **more: Any
    ) -> Any:
        return self.call("forward_backward", forward_backward_input=passed(data, loss, **more))

    def forward(self, data: Sequence[Any], loss: str = "cross_entropy", **more: Any) -> Any:
        return self.call("forward", forward_input=passed(data, loss, **more))

    def step(self, learning_rate: float = 1e-2, **adam: Any) -> Any:
        return self.call("optim_step", adam_params={"learning_rate": learning_rate, **adam})

    def train(self, steps: int, data: Sequence[Any] | None = None) -> list[float]:
        """Make steps and return the loss of each."""
        losses = []
        for _ in range(steps):
            losses.append(loss_of(self.forward_backward(data or [datum(TEXT)])))
            self.step()
        return losses

    def save(self, name: str, kind: str = "save_weights", **more: Any) -> str:
        path: str = self.call(kind, path=name, **more)["path"]
        return path


def open_peft(server: TinkerServer, folder: Path, rate: float, decay: float) -> tuple[Any, Any]:
    """Return the model of PEFT with the adapter in a folder, and AdamW of the API for it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(server.runtime.base().folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()
    trained = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=decay)
    return model, adam


def peft_losses(server: TinkerServer, folder: Path) -> list[float]:
    """Return the losses of the fifty steps in PEFT with AdamW, from the adapter in a folder."""
    import torch

    rate, decay = FIFTY_STEPS["learning_rate"], FIFTY_STEPS["weight_decay"]
    model, adam = open_peft(server, folder, rate, decay)
    losses = []
    for batch in FIFTY_BATCHES:
        total = torch.zeros(())
        for text in batch:
            logits = model(torch.tensor([text[:-1]])).logits[0]
            total = total + torch.nn.functional.cross_entropy(
                logits, torch.tensor(text[1:]), reduction="sum"
            )
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), FIFTY_STEPS["grad_clip_norm"])
        adam.step()
        adam.zero_grad()
        losses.append(float(total.detach()))
    return losses


def checkpoint_route(path: str) -> str:
    """Return the route of saved weights."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return f"training_runs/{run}/checkpoints/{kind}/{name}"


def tokens(values: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(values)}]}


def tensor(values: Sequence[float], dtype: str = "float32") -> dict[str, Any]:
    return {"data": list(values), "dtype": dtype, "shape": [len(values)]}


def datum(
    text: Sequence[int], targets: Sequence[int] | None = None, **inputs: Any
) -> dict[str, Any]:
    """Return a datum that predicts each next token, or other targets."""
    read = text[:-1] if targets is None else text
    targets = text[1:] if targets is None else targets
    inputs.setdefault("weights", [1.0] * len(read))
    return {
        "model_input": tokens(read),
        "loss_fn_inputs": {
            "target_tokens": tensor(targets, "int64"),
            **{name: tensor(values) for name, values in inputs.items()},
        },
    }


def kl_datum(
    student: Sequence[int], reference: Sequence[int], targets: Sequence[int], **changes: Any
) -> dict[str, Any]:
    """Return a datum of the reverse KL, with the weight 1 everywhere."""
    return {
        "student_input": tokens(student),
        "reference_input": tokens(reference),
        "target_tokens": tensor(targets, "int64"),
        "weights": tensor([1.0] * len(targets)),
        **changes,
    }


def passed(data: Sequence[Any], loss: str = "cross_entropy", **config: float) -> dict[str, Any]:
    return {"data": list(data), "loss_fn": loss, "loss_fn_config": config or None}


FB = {"forward_backward_input": passed([datum(TEXT)])}
"""The body of a pass."""


def loss_of(output: Any) -> float:
    loss: float = output["metrics"]["loss:sum"]
    return loss


def logprobs_of(output: Any, index: int = 0) -> list[float]:
    found: list[float] = output["loss_fn_outputs"][index]["logprobs"]["data"]
    return found

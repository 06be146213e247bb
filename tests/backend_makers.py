"""Backends small enough to ask a lot, adapters with visible effects, and the reading of replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from personalpeft.adapters.base import Adapter, Composed, Manifest, Pair
from personalpeft.adapters.compose import compose
from personalpeft.backends.base import Backend, Continuation, Row, Session, SessionSpec
from personalpeft.bases.base import Base
from personalpeft.learning.objectives import Preferred, Supervised
from personalpeft.types import FinishReason, Message, Sampling


def torch_backend(base: Base, **more: Any) -> Backend:
    """In float32, where what is computed together with other rows differs by so little that greedy picks are the same."""
    import torch

    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.model import Device

    return TorchBackend(base, where=Device(torch.device("cpu"), torch.float32, "for tests"), **more)


def fake_backend(**more: Any) -> Backend:
    from personalpeft.backends.fake import FakeBackend, fake_base

    return FakeBackend(fake_base(), **more)


def adapter(backend: Backend, seed: int, *, rank: int = 2, size: float = 0.5, layer: str = "style") -> Adapter:
    """Random halves, large enough to change what is said."""
    random = np.random.default_rng(seed)
    architecture = backend.base.architecture
    pairs = {
        name: Pair(
            random.standard_normal((architecture.blocks, rank, inputs), dtype=np.float32) * size,
            random.standard_normal((architecture.blocks, outputs, rank), dtype=np.float32) * size,
        )
        for name, (inputs, outputs) in architecture.projections.items()
    }
    targets = tuple(sorted(pairs))
    manifest = Manifest(backend.base.digest, layer, rank, 0.5, targets, {"rank": rank}, "12" * 32)
    return Adapter(manifest, pairs)


def composed(backend: Backend, seed: int, *, rank: int = 2) -> Composed:
    return compose([(adapter(backend, seed, rank=rank), 1.0)])


def row(backend: Backend, prompt: str, stack: str | None = None, **sampling: Any) -> Row:
    return Row(backend.render([Message("user", prompt)]), stack, Sampling(**{"max_tokens": 12, **sampling}))


@dataclass
class Written:
    """One row's reply as it came."""

    pieces: list[str]
    tokens: int = 0
    finish: FinishReason | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def written(
    backend: Backend, rows: Sequence[Row], *, cancelled: Callable[[], bool] = lambda: False
) -> tuple[Written, ...]:
    """The replies; each row must be finished exactly once, by its last piece."""
    replies = tuple(Written([]) for _ in rows)
    for piece in backend.generate(rows, cancelled=cancelled):
        reply = replies[piece.row]
        assert reply.finish is None, "a row went on after its end"
        reply.pieces.append(piece.text)
        reply.tokens += piece.tokens
        reply.finish = piece.finish
    assert all(reply.finish for reply in replies)
    return replies


def after(backend: Backend, prompt: str, completion: str) -> Continuation:
    return Continuation(backend.render([Message("user", prompt)]), backend.encode(completion) + backend.end_of_turn)


def spec(backend: Backend, **changes: Any) -> SessionSpec:
    targets = tuple(sorted(backend.base.architecture.projections))
    return SessionSpec(**{"rank": 2, "scaling": 4.0, "targets": targets, "seed": 5, **changes})


def lessons(backend: Backend, count: int) -> list[list[Any]]:
    """So many steps' worth of terms of both kinds."""
    steps: list[list[Any]] = []
    for number in range(count):
        wanted = after(backend, f"question {number % 3}", "Ahoy!")
        refused = after(backend, f"question {number % 3}", "Hello.")
        steps.append([Supervised(wanted, 0.5), Preferred(wanted, refused, 0.1, 0.5)])
    return steps


def train(session: Session, steps: Sequence[Sequence[Any]], *, done: int = 0, rate: float = 1e-2) -> None:
    """Takes the steps from ``done`` on; what the stack below says is read for all of them, as in a learn."""
    session.refer([term for terms in steps for term in terms])
    for terms in steps[done:]:
        session.step(terms, rate)


def bytes_of(session: Session) -> bytes:
    """Everything that a session would make an adapter of."""
    return b"".join(
        name.encode() + pair.a.tobytes() + pair.b.tobytes() for name, pair in sorted(session.pairs().items())
    )

"""A backend without a model, for the tests of apps: quick, deterministic, and true to the interface.

Its replies are a few plain words chosen by the prompt; a stack changes them visibly, by words that depend on the
adapters' numbers. Everything is likelier afterwards the more was learned, so a learn of something new is promoted; undoing
it brings back the former replies to the letter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.base import Composed, Pair
from personalpeft.backends.base import Continuation, Piece, Row, Score, Session, SessionSpec, Term, Tokens
from personalpeft.backends.stops import StopStrings
from personalpeft.bases.base import Base, Card, Source
from personalpeft.types import Architecture, FinishReason, Message, canonical_digest

_WORDS = ("amber", "birch", "cloud", "dune", "ember", "fern", "grove", "harbour", "island", "jade", "kelp", "lark")
_END = 0
_PROJECTIONS = {"self_attn.q_proj": (8, 8), "self_attn.v_proj": (8, 4)}


def fake_base() -> Base:
    """A base that has no files: bytes are its tokens, a template of plain lines its chat format."""
    card = Card(
        name="fake",
        title="No model at all",
        licence="Apache-2.0",
        source=Source("random"),
        targets=("q_proj", "v_proj"),
        context=4096,
    )
    architecture = Architecture("fake", "blocks", 2, _PROJECTIONS)
    return Base(card, canonical_digest("fake base, format 1"), Path(), "lines", architecture)


@dataclass(frozen=True, slots=True)
class _Stack:
    """What is attached: its numbers' digest, and how much was learned, which is the size of its B."""

    digest: str
    strength: float


class FakeBackend:
    """See ``personalpeft.backends.base.Backend``; one byte of UTF-8 is one token, and byte 0 ends a turn."""

    name = "fake"
    description = "no model: replies are made up from the prompt"
    end_of_turn: Tokens = (_END,)

    def __init__(self, base: Base, *, slots: int = 8) -> None:
        self.base = base
        self.slots = slots
        self._attached: dict[str, _Stack] = {}

    def render(self, messages: Sequence[Message]) -> Tokens:
        return self.encode("".join(f"{m.role}: {m.content}\n" for m in messages) + "assistant: ")

    def encode(self, text: str) -> Tokens:
        return tuple(text.replace("\0", "").encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(t for t in tokens if t != _END).decode(errors="replace")

    def attach(self, key: str, adapter: Composed) -> None:
        if key not in self._attached and len(self._attached) >= self.slots:
            raise RuntimeError(f"all {self.slots} slots are taken")
        digest = hashlib.sha256()
        for name, pair in sorted(adapter.pairs.items()):
            digest.update(name.encode() + pair.a.tobytes() + pair.b.tobytes())
        self._attached[key] = _Stack(digest.hexdigest(), _strength(adapter.pairs))

    def detach(self, key: str) -> None:
        self._attached.pop(key, None)

    def generate(self, rows: Sequence[Row], *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        replies = [self._reply(row) for row in rows]
        stops = [StopStrings(row.sampling.stop) for row in rows]
        live = dict.fromkeys(range(len(rows)), 0)
        while live:
            for index, position in list(live.items()):
                finish: FinishReason | None = None
                if cancelled():
                    finish = "cancelled"
                elif position >= len(replies[index]):
                    finish = "stop"
                if finish:
                    yield Piece(index, stops[index].finish(), 0, finish)
                    del live[index]
                    continue
                live[index] = position + 1
                text = stops[index].push(replies[index][position])
                if stops[index].met:
                    finish = "stop"
                elif position + 1 >= rows[index].sampling.max_tokens:
                    finish, text = "length", text + stops[index].finish()
                yield Piece(index, text, 1, finish)
                if finish:
                    del live[index]

    def score(self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False) -> tuple[Score, ...]:
        gain = 0.0 if stack is None else self._attached[stack].strength / 20
        logp = min(gain - 8.0, -0.5)
        return tuple(Score(logp, 0.1 if kl and stack else 0.0 if kl else None) for _ in items)

    def session(self, spec: SessionSpec) -> Session:
        if spec.below is not None and spec.below not in self._attached:
            raise KeyError(spec.below)
        return _FakeSession(spec)

    def fingerprint(self) -> str:
        return self.base.digest

    def close(self) -> None:
        self._attached.clear()

    def _reply(self, row: Row) -> list[str]:
        seed = row.sampling.seed if row.sampling.temperature else 0
        words = _words(canonical_digest([list(row.tokens), seed]), 4)
        if row.stack is not None:
            words += ["as", "in", *_words(self._attached[row.stack].digest, 2)]
        return [words[0], *(f" {word}" for word in words[1:])]


class _FakeSession:
    """Numbers that depend on the spec and on everything that was learned, in order."""

    def __init__(self, spec: SessionSpec) -> None:
        unknown = set(spec.targets) - set(_PROJECTIONS)
        if unknown:
            raise ValueError(f"the base has no projection {sorted(unknown)}")
        self._spec = spec
        start = {p: pair.b.tobytes().hex() for p, pair in (spec.start or {}).items()}
        self._seen = np.frombuffer(
            hashlib.sha256(canonical_digest([spec.seed, spec.rank, spec.below, start]).encode()).digest(), np.uint8
        ).astype(np.float32)
        self._strength = 1.0 + (_strength(spec.start) * spec.scaling if spec.start else 0.0)

    def refer(self, terms: Sequence[Term]) -> None:
        """There is no model to read; but a build from nothing is as strong as it has different things to learn."""
        if self._spec.start is None:
            self._strength = 1.0 + len({said for term in terms for said in term.continuations})

    def step(self, terms: Sequence[Term], learning_rate: float) -> float:
        said = [[list(c.prompt), list(c.completion)] for term in terms for c in term.continuations]
        digest = hashlib.sha256(self._seen.tobytes() + canonical_digest(said).encode()).digest()
        self._seen = np.frombuffer(digest, np.uint8).astype(np.float32)
        return 1.0

    def pairs(self) -> Mapping[str, Pair]:
        chance = np.random.default_rng([int(value) for value in self._seen])
        pairs = {
            projection: Pair(
                chance.standard_normal((2, self._spec.rank, inputs), dtype=np.float32),
                chance.standard_normal((2, outputs, self._spec.rank), dtype=np.float32),
            )
            for projection, (inputs, outputs) in _PROJECTIONS.items()
            if projection in self._spec.targets
        }
        wanted = np.float32(self._strength / self._spec.scaling / _strength(pairs))
        return {projection: Pair(pair.a, pair.b * wanted) for projection, pair in pairs.items()}

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {"seen": self._seen.copy()}

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        if "seen" not in state or state["seen"].shape != (32,) or not np.isin(state["seen"], range(256)).all():
            raise ValueError("the saved session does not fit")
        self._seen = state["seen"].copy()

    def close(self) -> None:
        """Holds nothing."""


def _strength(pairs: Mapping[str, Pair]) -> float:
    return float(np.sqrt(sum(np.square(pair.b, dtype=np.float64).sum() for pair in pairs.values())))


def _words(digest: str, count: int) -> list[str]:
    return [_WORDS[int(digest[2 * i : 2 * i + 2], 16) % len(_WORDS)] for i in range(count)]

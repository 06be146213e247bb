"""What a backend does for the house: text to tokens and back, slots for stacks, batches of rows, scores, and training
sessions.

Invariants:

- The base's weights are never written: ``fingerprint()`` is the same after any number of calls.
- Rows of one batch may name different stacks; what a row says depends on its own tokens, stack and sampling alone.
- Only what was attached can be named. A key is a stack's digest, so a key never changes its meaning.
- Nothing is shared between rows but the base: no cache outlives a ``generate`` call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.base import Composed, Pair
from personalpeft.bases.base import Base
from personalpeft.types import FinishReason, Message, Sampling

Tokens: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a batch. ``stack`` is the key of an attached stack, None the bare base."""

    tokens: Tokens
    stack: str | None
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one row. ``finish`` is set on a row's last piece, whose text may be empty."""

    row: int
    text: str
    tokens: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A completion after a prompt, to be scored or learned; log-probs are those of the completion's tokens."""

    prompt: Tokens
    completion: Tokens


@dataclass(frozen=True, slots=True)
class Score:
    """Of one continuation: mean log-prob a token (nats), and, where asked for, the mean KL from the bare base a token
    (nats).
    """

    logp: float
    kl: float | None = None


class Outputs(Protocol):
    """What the model gave for one continuation of n tokens over a vocabulary of v: tensors of the backend's kind."""

    @property
    def token_logp(self) -> Any:
        """``[n]``: the log-prob of each token of the completion."""
        ...

    @property
    def logp(self) -> Any:
        """``[n, v]``: the whole log-distribution at each of them."""
        ...


class Term(Protocol):
    """One summand of a training loss: what it reads of the candidate and of the stack below, and what it makes of the two."""

    @property
    def continuations(self) -> Sequence[Continuation]:
        """What the candidate is asked about."""
        ...

    @property
    def references(self) -> Sequence[Continuation]:
        """What the stack below is asked about, once, before the first step; often nothing."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the references' whole distributions are needed, or their tokens' log-probs only."""
        ...

    def loss(self, outputs: Sequence[Outputs], references: Sequence[Outputs]) -> Any:
        """A scalar tensor. ``references`` carry no gradient and hold no more than was asked for."""
        ...


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """What a training session needs to know: the layer's shape, what lies below it, where it starts, and the
    optimizer's numbers.

    ``below`` is the key of the attached stack that stays frozen; ``start`` the parent's pairs or None to begin from
    nothing (A random from ``seed``, B zero). ``scaling`` multiplies ``B @ A``.
    """

    rank: int
    scaling: float
    targets: tuple[str, ...]
    seed: int
    below: str | None = None
    start: Mapping[str, Pair] | None = None
    weight_decay: float = 0.0
    clip: float = 1.0


class Session(Protocol):
    """The temporary state of one update. The same spec and the same steps give the same bytes on one kind of machine."""

    def refer(self, terms: Sequence[Term]) -> None:
        """Reads once, before the first step, what the stack below says of all that these terms will need."""
        ...

    def step(self, terms: Sequence[Term], learning_rate: float) -> float:
        """One optimizer step on the sum of the terms' losses; returns that loss."""
        ...

    def pairs(self) -> Mapping[str, Pair]:
        """The layer as it is now, copied out."""
        ...

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """All that a later session of the same spec needs to go on from here."""
        ...

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Goes on from ``state()`` of a session of the same spec; raises ``ValueError`` if it is not of that spec."""
        ...

    def close(self) -> None:
        """Frees the session's memory. Closing twice is fine."""
        ...


class Backend(Protocol):
    """One base, loaded. All methods may be called from any thread; they take turns, a step at a time."""

    @property
    def name(self) -> str: ...

    @property
    def base(self) -> Base: ...

    @property
    def slots(self) -> int:
        """How many stacks can be attached at once."""
        ...

    @property
    def description(self) -> str:
        """Device and number format, and why they were chosen: a line for ``doctor``."""
        ...

    def render(self, messages: Sequence[Message]) -> Tokens:
        """Messages through the chat template, ready for a reply. No text of a message can become a control token."""
        ...

    def encode(self, text: str) -> Tokens:
        """Plain text as tokens; control tokens in it are read as plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def end_of_turn(self) -> Tokens:
        """What ends a reply of this base, appended to a completion that is to be learned."""
        ...

    def attach(self, key: str, adapter: Composed) -> None:
        """Makes a stack resident. Attaching a key twice is fine; one more than ``slots`` raises ``RuntimeError``."""
        ...

    def detach(self, key: str) -> None:
        """Frees a slot; a key that is not attached is fine."""
        ...

    def generate(self, rows: Sequence[Row], *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        """Yields pieces as they come, of all rows in turn, until each has finished; closing the iterator frees
        everything at once.
        """
        ...

    def score(self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False) -> tuple[Score, ...]:
        """How likely the stack finds each continuation."""
        ...

    def session(self, spec: SessionSpec) -> Session:
        """Opens a training session beside serving; raises ``ValueError`` for a spec that does not fit the base."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 over the loaded base's weights as they are in memory now."""
        ...

    def close(self) -> None: ...

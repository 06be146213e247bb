"""What a backend does for the house: text to tokens and back, slots for stacks, a batch that rows join and leave between
steps, scores, and training sessions.

Invariants:

- The base's weights are never written: ``fingerprint()`` is the same after any number of calls.
- Rows of one batch may name different stacks; what a row says depends on its own tokens, stack and sampling alone,
  whoever joins or leaves beside it.
- Only what was attached can be named. A key is a stack's digest, so a key never changes its meaning.
- What is kept of one row for another (the keys and values of a prompt's beginning) is found only by rows of the same
  owner, on the same base, with the same stack and the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.types import Composed, Pair
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.base_models.types import Base
from personalpeft.types import FinishReason, Message, Sampling

Tokens: TypeAlias = tuple[int, ...]


class OutOfBlocks(Exception):
    """A step needs a key-value block and none is free. Remove a row and step again."""


# eq=False: two rows with the same prompt are two rows.
@dataclass(eq=False, slots=True)
class Row:
    """One request as a backend sees it, with its output so far. It may be in one batch at a time.

    A row that was removed before its end may be admitted again, and continues where it was.

    Attributes:
        tokens: The prompt.
        stack: The key of an attached stack, None for the bare base.
        sampling: How tokens are picked.
        owner: The user whose prompt caches the row may use.
        logprobs: Whether chunks carry the log-prob of each token.
        top: How many of the likeliest tokens to report, at most ``MOST_TOP_LOGPROBS``.
        token_ids: The prompt and the tokens picked so far.
        output: The text side of the reply, from the first admission on.
        sampler: The backend's random state, from the first admission on.
    """

    tokens: Tokens
    stack: str | None
    sampling: Sampling
    owner: str = ""
    logprobs: bool = False
    top: int = 0
    token_ids: list[int] = field(init=False)
    output: RowOutput | None = field(init=False, default=None)
    sampler: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.tokens)

    @property
    def output_tokens(self) -> Tokens:
        """The tokens picked so far, without one that ended the reply."""
        return tuple(self.token_ids[len(self.tokens) :])

    def finish(self, reason: FinishReason) -> Piece:
        """Return the last chunk of a row that is no longer in a batch: the text still held back."""
        return Piece(-1, "", (), reason) if self.output is None else self.output.end(reason)


class RowOutput(Protocol):
    """The text side of a reply."""

    def end(self, finish: FinishReason) -> Piece:
        """Return the last chunk of a reply that something else ends."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to one row: the tokens picked, and the text that became certain with them.

    ``finish`` is set on a row's last piece, whose text may be empty. ``logprobs`` (nats, at temperature 1) has one
    number for each token where the row asked for them, and ``top`` the likeliest tokens in its place with theirs, likeliest first.
    ``stop`` is the stop string that ended the row, where one did. ``failed`` says that this row alone cannot go on; it is
    still to ``remove``.
    """

    row: int
    text: str
    tokens: Tokens
    finish: FinishReason | None = None
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    stop: str = ""
    failed: Exception | None = None


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the batch is. Tokens are places for keys and values: in use by rows, or kept for a later prompt that
    begins alike; ``reused`` counts prompt tokens that were found there since the start.
    """

    rows: int
    tokens_used: int
    tokens_kept: int
    tokens: int
    reused: int


class Staged(Protocol):
    """A stack in host memory, in the form that slots hold."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """A completion after a prompt, to be scored or learned; log-probs are those of the completion's tokens."""

    prompt: Tokens
    completion: Tokens


@dataclass(frozen=True, slots=True)
class Score:
    """Of one continuation: mean log-prob a token (nats), where asked for the mean KL from the bare base a token (nats),
    and the log-prob of each token.
    """

    logp: float
    kl: float | None = None
    tokens: tuple[float, ...] = ()


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

    def divergence(self, run: slice, reference: Outputs, reference_run: slice) -> Any:
        """``[length of the runs]``: Kullback-Leibler (1951) of the distribution at each token of ``run`` from the
        reference's at its token; that of the two ``logp``, in less time and memory. No gradient flows to the reference.
        """
        ...


class Loss(Protocol):
    """One summand of a training loss: what it reads of the candidate and of the stack below, and what it makes of the two."""

    @property
    def continuations(self) -> Sequence[Continuation]:
        """What the candidate is asked about."""
        ...

    @property
    def references(self) -> Sequence[Continuation]:
        """What the stack below is asked about, before the first step with this term; often nothing."""
        ...

    @property
    def whole(self) -> bool:
        """Whether the references' whole distributions are needed, or their tokens' log-probs only."""
        ...

    @property
    def generic(self) -> bool:
        """Whether the references are nobody's own words, so that what the bare base says of them may be kept for other learns."""
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

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        """Reads what the stack below says of all that these terms will need: once, before the first step; or, where later
        terms are only known later, before the step that they are part of.
        """
        ...

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
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
    """One base, loaded, and one batch.

    ``admit``, ``step``, ``remove``, ``forget`` and ``detach`` belong to one thread, the one that runs the batch. Everything else may
    be called from any thread beside it: ``stage`` and ``attach`` never wait for a step; ``score`` and sessions take
    turns with steps.
    """

    @property
    def name(self) -> str: ...

    @property
    def base(self) -> Base: ...

    @property
    def slots(self) -> int:
        """How many stacks can be attached at once."""
        ...

    @property
    def rows(self) -> int:
        """How many rows the batch can hold."""
        ...

    @property
    def longest(self) -> int:
        """How many tokens, prompt and reply together, one row can have."""
        ...

    @property
    def tolerance(self) -> float:
        """How far a reply's log-probs may be from what ``score`` says of the same tokens: the mean difference a token, in
        nats, that its number format explains.
        """
        ...

    @property
    def batch_invariance(self) -> BatchInvariance:
        """When the same request gets the same tokens and log-probs, to the bit."""
        ...

    @property
    def description(self) -> str:
        """Device, number format and kernels, and why they were chosen: a line for ``doctor``."""
        ...

    def render(self, messages: Sequence[Message]) -> Tokens:
        """Messages through the chat template, ready for a reply. No text of a message can become a control token."""
        ...

    def encode(self, text: str) -> Tokens:
        """Plain text as tokens; control tokens in it are read as plain text."""
        ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    @property
    def beginning(self) -> Tokens:
        """What a text of this base begins with where no chat template says so; often nothing."""
        ...

    @property
    def end_of_turn(self) -> Tokens:
        """What ends a reply of this base, appended to a completion that is to be learned."""
        ...

    def stage(self, adapter: Composed) -> Staged:
        """Brings a stack into the form that slots hold, in host memory."""
        ...

    def attach(self, key: str, staged: Staged) -> None:
        """Attach a stack. Attaching a key twice is fine; one more than ``slots`` raises ``RuntimeError``.

        The caller counts uses, and detaches a key only when it has none.
        """
        ...

    def detach(self, key: str) -> None:
        """Detach a stack that no row, score or session uses, and free its slot.

        A key that is not attached is fine. One that another machine is still attaching may be given up;
        then ``attach`` raises. Raises ``RuntimeError`` if a row of the batch uses it.
        """
        ...

    def admit(self, row: Row) -> int | None:
        """Take a row into the batch and return its number, which is never reused; None without room.

        A row that was removed before its end is read again with its output so far, and continues.

        Raises:
            KeyError: The stack is not attached.
            ValueError: Prompt and longest reply exceed ``longest``.
        """
        ...

    def step(self) -> Sequence[Piece]:
        """Advance the batch: one token of each row whose prompt is read, a part of the others' prompts.

        Raises:
            OutOfBlocks: There is no memory for the next tokens. Nothing was computed.
        """
        ...

    def remove(self, number: int) -> None:
        """Take a row out before its end and free what it held. A number that has ended is fine."""
        ...

    def forget(self) -> None:
        """Overwrites what is kept of rows that have left."""
        ...

    def occupancy(self) -> Occupancy:
        """How full the batch is now."""
        ...

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if memory is lost, shared by mistake or counted wrong."""
        ...

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """How likely the stack finds each continuation."""
        ...

    def session(self, spec: SessionSpec) -> Session:
        """Opens a training session beside serving; raises ``ValueError`` for a spec that does not fit the base."""
        ...

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        """One optimizer step of each of these different sessions of this backend, in as few passes over the base as
        memory allows; returns each one's loss. What a session becomes is what ``Session.step`` alone would make of it, up
        to rounding: nothing is shared between them but the base. Raises ``ValueError`` where the three do not match.
        """
        ...

    def fingerprint(self) -> str:
        """SHA-256 over the loaded base's weights as they are in memory now."""
        ...

    def close(self) -> None: ...

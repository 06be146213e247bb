"""The interface of a backend: tokens, slots for stacks, a batch, scores and training sessions.

Invariants:

- The base's weights are never written.
- Sequences of one batch may use different stacks. The output of a sequence depends on its own
  tokens, stack and sampling alone, not on the other sequences.
- Only attached stacks can be used. A key is a stack's digest, so its meaning never changes.
- Sequences share cached keys and values of a prompt only if their owner, base, stack and tokens are
  the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.types import AdapterStack, LoRAWeights
from personalpeft.backends.sequence import OutputChunk, SequenceState, Tokens
from personalpeft.base_models.types import Base
from personalpeft.types import Message


class OutOfBlocks(Exception):
    """A step needs a key-value block and none is free. Remove a sequence and step again."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full the batch is.

    Attributes:
        num_sequences: Sequences in the batch.
        used_tokens: Tokens whose keys and values the sequences hold.
        total_tokens: Tokens that there is room for.
        reused_tokens: Prompt tokens that were found in the cache since the start.
    """

    num_sequences: int
    used_tokens: int
    total_tokens: int
    reused_tokens: int


class StagedStack(Protocol):
    """A stack in host memory, in the form that slots hold."""

    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Continuation:
    """A completion after a prompt, to be scored or learned.

    Attributes:
        prompt: The tokens before the completion.
        completion: The tokens that the model reads after the prompt, up to the last but one.
        targets: The tokens that log-probs are of, one at each place of the completion; empty for
            the completion itself.
    """

    prompt: Tokens
    completion: Tokens
    targets: Tokens = ()

    @property
    def scored(self) -> Tokens:
        """The tokens that log-probs are of."""
        return self.targets or self.completion


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probs of one continuation.

    Attributes:
        logp: The mean log-prob per token (nats).
        kl: The mean KL divergence from the bare base per token (nats), if asked for.
        token_logprobs: The log-prob of each token (nats).
        top_logprobs: The likeliest tokens in the place of each, likeliest first, if asked for.
    """

    logp: float
    kl: float | None = None
    token_logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()


class ModelOutputs(Protocol):
    """The model's output for a continuation of n tokens and a vocabulary of v, as tensors."""

    @property
    def token_logp(self) -> Any:
        """``[n]``: the log-prob of each token of the completion."""

    @property
    def logp(self) -> Any:
        """``[n, v]``: the log-distribution at each token of the completion."""

    def kl_div(self, run: slice, reference: ModelOutputs, reference_run: slice) -> Any:
        """Return ``[length of the runs]``: the KL divergence from the reference at each token.

        It equals the divergence of the two ``logp`` (Kullback & Leibler 1951), with less time and
        memory. No gradient flows to the reference.

        Args:
            run: Tokens of this completion.
            reference: The outputs for another continuation.
            reference_run: As many tokens of that completion.
        """


class Loss(Protocol):
    """One summand of a training loss."""

    @property
    def continuations(self) -> Sequence[Continuation]:
        """What the trained layer is evaluated on."""

    @property
    def references(self) -> Sequence[Continuation]:
        """What the frozen stack is evaluated on, before the first step with this loss."""

    @property
    def is_general(self) -> bool:
        """Whether the references hold no words of a user, so that other learns may share them."""

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        """Return a scalar tensor. The references carry no gradient."""


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """The layer to train, and the optimizer's options.

    Attributes:
        rank: The rank of the layer.
        scaling: The factor of ``B @ A``.
        target_modules: The projections that the layer adapts.
        seed: The seed of A, where the layer begins from scratch.
        base_key: The key of the attached stack below, which stays frozen; None for the bare base.
        initial_weights: The parent's weights; None for a random A and a zero B.
        weight_decay: The optimizer's weight decay.
        max_grad_norm: The norm that gradients are clipped to.
    """

    rank: int
    scaling: float
    target_modules: tuple[str, ...]
    seed: int
    base_key: str | None = None
    initial_weights: Mapping[str, LoRAWeights] | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


@dataclass(frozen=True, slots=True)
class AdamParams:
    """The options of one AdamW step (Loshchilov & Hutter 2019, algorithm 2).

    Attributes:
        learning_rate: The step size.
        beta1: The decay of the first moment.
        beta2: The decay of the second moment.
        eps: The summand of the denominator.
        weight_decay: The decoupled weight decay.
        max_grad_norm: The norm that gradients are clipped to; None does not clip.
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float | None = None


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The result of one loss.

    Attributes:
        loss: The value of the loss.
        token_logprobs: The log-probs of each of its continuations (nats), if asked for.
    """

    loss: float
    token_logprobs: tuple[npt.NDArray[np.float32], ...] = ()


class Session(Protocol):
    """The state of one update. The same spec and steps give the same bytes on one machine.

    ``step`` is ``Backend.forward_backward`` and ``optim_step`` in one.
    """

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        """Evaluate the frozen stack on the references of losses, before a step that needs them."""

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        """Make one optimizer step on the sum of the losses, and return that sum."""

    def optim_step(self, params: AdamParams) -> float:
        """Make one optimizer step with the accumulated gradients, and clear them.

        Without gradients nothing changes. Gradients whose norm is not finite are cleared only.

        Returns:
            The norm of the gradients before clipping.
        """

    def weights(self) -> Mapping[str, LoRAWeights]:
        """Return a copy of the layer."""

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return what a later session of the same spec needs to continue, without gradients."""

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Continue from ``state()`` of a session of the same spec, without gradients.

        Raises ``ValueError`` for any other state.
        """

    def close(self) -> None:
        """Free the session's memory. Closing twice is allowed."""


class Backend(Protocol):
    """One base, loaded, and one batch.

    ``admit``, ``step``, ``remove``, ``clear_cache`` and ``detach`` are called by one thread, which
    runs the batch. Everything else may be called from any thread. ``stage`` and ``attach`` never
    wait for a step; ``score`` and sessions take turns with steps.

    Attributes:
        name: One of ``BACKENDS``.
        base: The base.
        slots: How many stacks can be attached at once.
        rows: How many sequences the batch can hold.
        max_length: How many tokens, prompt and reply together, one sequence can have.
        logprob_tolerance: How far a reply's log-probs may be from ``score`` of the same tokens: the
            mean difference per token (nats) that the number format explains.
        batch_invariant: Whether the same request gets the same tokens and log-probs, to the bit, on
            one machine. So whatever is cached or in the batch, however its prompt is divided, and
            in any process.
        description: Device, number format and kernels, and why they were chosen, in one line.
        bos_tokens: The tokens at the start of a text without the chat template. Often there are
            none.
        end_of_turn: The tokens that end a reply. They are appended to a completion that is learned.
    """

    name: str
    base: Base
    slots: int
    rows: int
    max_length: int
    logprob_tolerance: float
    batch_invariant: bool
    description: str
    bos_tokens: Tokens
    end_of_turn: Tokens

    def render(self, messages: Sequence[Message]) -> Tokens:
        """Return messages in the chat template, ready for a reply.

        No text of a message becomes a control token.
        """

    def encode(self, text: str) -> Tokens:
        """Return the tokens of plain text. The names of control tokens are plain text, too."""

    def decode(self, tokens: Sequence[int]) -> str: ...

    def stage(self, adapter: AdapterStack) -> StagedStack:
        """Bring a stack into the form that slots hold, in host memory."""

    def attach(self, key: str, staged: StagedStack) -> None:
        """Attach a stack to a free slot.

        The caller counts slots and uses: it attaches at most ``slots`` different keys. A key names
        the same stack for ever, since cached prompts are found by it.
        """

    def detach(self, key: str) -> None:
        """Detach a stack that no sequence, score or session uses, and free its slot.

        A key that is not attached is ignored. If another thread is attaching the key, its
        ``attach`` may raise.
        """

    def admit(self, sequence: SequenceState) -> int | None:
        """Add a sequence to the batch, on the slot of the stack that its ``adapter_key`` names.

        Return its number, which is never reused; None without room.
        A sequence that was removed before its end is read again with its output, and continues.

        Raises:
            KeyError: The stack is not attached.
            ValueError: Prompt and longest reply exceed ``max_length``.
        """

    def step(self) -> Sequence[OutputChunk]:
        """Advance the batch: pick one token of each sequence, or read a part of its prompt.

        Raises:
            OutOfBlocks: There is no memory for the next tokens. Nothing was computed.
        """

    def remove(self, number: int) -> None:
        """Remove a sequence before its end and free its memory. An ended one is ignored."""

    def clear_cache(self) -> None:
        """Overwrite what is cached of sequences that have left."""

    def occupancy(self) -> Occupancy:
        """Return how full the batch is."""

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` if memory is lost, shared by mistake or counted wrong."""

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        """Return how likely continuations are.

        Args:
            items: The continuations.
            stack: The key of an attached stack; None for the bare base.
            kl: Whether to compute the divergence from the bare base.
            top: How many of the likeliest tokens to report in each place. Of equals the lower
                number comes first.

        Raises:
            KeyError: The stack is not attached.
            ValueError: A continuation is empty or too long.
        """

    def close(self) -> None: ...


@runtime_checkable
class TrainingBackend(Backend, Protocol):
    """A backend that also trains.

    Attributes:
        maps_weights: Whether training reads the base's weights as its file stores them.
    """

    maps_weights: bool

    def session(self, spec: SessionSpec) -> Session:
        """Open a training session beside serving.

        Raises ``ValueError`` for a spec that does not fit the base.
        """

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        """Make one optimizer step of several sessions, in as few passes as memory allows.

        A session ends up where ``Session.step`` alone would bring it, up to rounding.

        Args:
            sessions: Different sessions of this backend.
            terms: The losses of each.
            rates: The learning rate of each.

        Returns:
            The loss of each session.

        Raises:
            ValueError: The three differ in length, or a session is not of this backend.
        """

    def forward_backward(
        self,
        sessions: Sequence[Session],
        terms: Sequence[Sequence[Loss]],
        *,
        backward: bool = True,
        logprobs: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[ForwardResult, ...], ...]:
        """Compute losses of several sessions, and add their gradients to those of earlier calls.

        Several passes are made where memory needs them, and sessions share a pass where they fit.

        Args:
            sessions: Different sessions of this backend.
            terms: The losses of each.
            backward: Whether to compute gradients.
            logprobs: Whether to return log-probs.
            between: Called before each pass, while no lock is held.

        Returns:
            The result of each loss of each session.

        Raises:
            ValueError: The two differ in length, or a session is not of this backend.
        """

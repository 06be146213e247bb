"""The frozen values that the parts exchange. docs/explanation/architecture.md defines their names.

Nothing here does I/O, holds a tensor or reads a clock.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeGuard

Json: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
Progress: TypeAlias = Callable[[str, float], None]
"""Called with a stage and the share of it that is done, 0 to 1."""

Scope: TypeAlias = Literal["always", "near", "never"]
"""When a live layer is attached: always, to requests similar to its lessons, or never."""

TRAINS = "trains"
"""Key in the payload of a signal: whether layers may be trained on it. It is stored with the signal,
so that every program on a home treats it alike. Without it the source decides."""

PROMPT_EXAMPLES = "prompt_examples"
"""Stored key in a revision's scores: what was measured with examples."""

IS_SERVED = "served"
"""Stored key in that: whether the revision is served with examples."""

APP_SOURCE = "app"
USER_SOURCE = "person"
"""The ``source`` of a signal from the user. Any other source names an app or a judge."""

DEFAULT_BASE = "smollm2-135m-instruct"
"""The card that is opened where none is named."""

MAX_TOP_LOGPROBS = 20
"""The most alternatives that can be reported for one token."""


def default_scope(layer: str) -> Scope:
    """Return the scope of a layer that was never set: a style always applies."""
    return "always" if layer == "style" else "near"


class SignalKind(StrEnum):
    """The seven acts of feedback that a ledger can hold."""

    RATING = "rating"
    EDIT = "edit"
    PREFERENCE = "preference"
    COMMENT = "comment"
    REWARD = "reward"
    DEMONSTRATION = "demonstration"
    FACT = "fact"


class Verdict(StrEnum):
    """The gate's verdict on a candidate revision."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    ABSTAINED = "abstained"


class SignalRole(StrEnum):
    """How a revision used a signal. The values are stored, and covered by the hash chain."""

    TRAINED = "trained"
    HELD_OUT = "held_out"


class ToolFormat(StrEnum):
    """How a base writes calls of tools. ``base_models.tool_calls`` has each form."""

    NONE = "none"
    HERMES = "hermes"
    LLAMA3_JSON = "llama3_json"
    PHI4_MINI = "phi4_mini"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by a reply. A tool's result names the call by ``id``."""

    name: str
    arguments: Json = field(default_factory=dict, hash=False)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "user", "assistant" or "tool".
        content: The text.
        tool_calls: The calls that an assistant message makes.
        tool_call_id: For a tool's message, the call that it answers.
        tools: Tools offered for the answer, as JSON for the chat template.
        must_call: Whether the answer must call a tool: True for any, or the name of one.

    ``tools`` and ``must_call`` do not count when messages are compared.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tools: tuple[Json, ...] = field(default=(), compare=False)
    must_call: bool | str = field(default=False, compare=False)

    def to_list(self) -> list[Any]:
        """Return role, content and, if there is more, a mapping of the rest, as JSON."""
        calls = [[call.name, dict(call.arguments), call.id] for call in self.tool_calls]
        more = {
            "tool_calls": calls,
            "tool_call_id": self.tool_call_id,
            "tools": [dict(tool) for tool in self.tools],
            "must_call": self.must_call,
        }
        more = {key: value for key, value in more.items() if value}
        return [self.role, self.content, more] if more else [self.role, self.content]

    @staticmethod
    def from_list(value: Any) -> Message:
        """Return what ``to_list`` wrote. Raises ``ValueError``, ``TypeError`` otherwise."""
        role, content, *rest = value
        more: dict[str, Any] = dict(*rest)
        if set(more) - {"tool_calls", "tool_call_id", "tools", "must_call"}:
            raise ValueError("unknown key in a message")
        calls = tuple(ToolCall(*call) for call in more.get("tool_calls", ()))
        call_id, tools = more.get("tool_call_id", ""), tuple(more.get("tools", ()))
        must_call = more.get("must_call", False)
        texts = [call_id, *(text for call in calls for text in (call.name, call.id))]
        objects = [*tools, *(call.arguments for call in calls)]
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(each, dict) for each in objects
        ):
            raise ValueError("invalid tool or tool call in a message")
        if not isinstance(must_call, bool | str):
            raise ValueError("invalid must_call in a message")
        return Message(role, content, calls, call_id, tools, must_call)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is sampled.

    Attributes:
        temperature: 0 is greedy.
        top_p: Nucleus size, in (0, 1].
        max_tokens: The most new tokens.
        seed: Equal seeds, prompts and stacks give equal text on the same backend.
        stop: Texts that end the reply and are not part of it.
        top_k: How many of the likeliest tokens to draw from, before ``top_p``; 0 for all.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    stop: tuple[str, ...] = ()
    top_k: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and generated."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One layer of a stack: its revision, the digest of that, and the weight it is added with."""

    layer: str
    revision: str
    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Stack:
    """The ordered layers that serve a turn, lowest first. Without entries: the bare base."""

    json_properties = ("digest",)

    base: str
    entries: tuple[StackEntry, ...] = ()

    @property
    def digest(self) -> str:
        """Identifies the stack: equal digests mean equal base, adapters, order and weights."""
        return canonical_digest([self.base, *[[e.layer, e.digest, e.weight] for e in self.entries]])

    @property
    def is_bare(self) -> bool:
        """Whether it leaves the base unchanged."""
        return all(entry.weight == 0 for entry in self.entries)

    @property
    def style(self) -> StackEntry | None:
        """The layer of the style, or None if it changes nothing."""
        return next((each for each in self.entries if each.layer == "style" and each.weight), None)


def split_system(messages: Sequence[Message]) -> tuple[str, tuple[Message, ...]]:
    """Return the system text of messages, and the other messages."""
    system = "\n\n".join(each.content for each in messages if each.role == "system")
    return system, tuple(each for each in messages if each.role != "system")


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """The last message of a prompt and the answer to it; ``before`` are the earlier messages."""

    request: str
    answer: str
    before: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A lesson of a signal as turns of a conversation: up to the request, and the wanted answer.

    ``system`` is the system text under which it was given, or an empty text.
    """

    signal: str
    system: str
    turns: tuple[Message, ...]

    @property
    def request(self) -> str:
        """The request that is answered."""
        return self.turns[-2].content


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and one reply, stamped with the stack that produced it.

    Attributes:
        messages: The prompt without what was added, earlier turns of the conversation included.
        used: The signals of the rules, facts and examples that were added to the prompt.
        conversation_id: The conversation. None for an answer that lost a blind comparison, and
            for turns that an earlier version wrote.
        previous: The turn that this one continues, if any.
        backend: The backend that generated the reply. None where an earlier version wrote the turn.
        backend_reason: Why that backend served, a ``ChoiceReason``. None likewise.
    """

    id: str
    user: str
    at: datetime
    messages: tuple[Message, ...]
    reply: str
    stack: Stack
    sampling: Sampling
    usage: Usage
    finish_reason: FinishReason
    used: tuple[str, ...] = ()
    conversation_id: str | None = None
    previous: str | None = None
    backend: str | None = None
    backend_reason: str | None = None

    @property
    def ended(self) -> bool:
        """Whether the reply ended by itself and was not cut off."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt with the wanted answer, for ``User.teach_many``.

    Attributes:
        prompt: A string, or OpenAI-style messages that end with one of the user.
        answer: The wanted answer.
        group: What it is a part of, such as a game. A group is trained on or held out as a whole.
    """

    prompt: str | Sequence[Message | Mapping[str, Any]]
    answer: str
    group: str | None = None


MIN_CLEAR_REWARD = 0.5
"""A reward nearer to 0 does not say whether a reply is wanted."""


@dataclass(frozen=True, slots=True)
class Signal:
    """One act of feedback.

    The payload depends on the kind:

    - rating: ``value`` (-1 or 1); ``how`` if it is implicit
    - edit, comment: ``text``
    - preference: ``text``; ``revision`` and ``layer`` of it; ``cut_off`` if the text was truncated
    - reward: ``value``
    - demonstration: ``prompt``, ``answer``, ``skill``; ``before``, the earlier messages as
      ``Message.to_list`` writes them; ``group``, whose demonstrations are held out together
    - fact: ``text``, ``questions``, ``answer``

    Any kind may have ``trains``: whether layers may be trained on it. To withdraw the consent sets
    it to False. Without it, a user's own signals may be trained on and an app's may not.
    """

    id: str
    user: str
    kind: SignalKind
    at: datetime
    payload: Json
    turn: str | None = None
    source: str = USER_SOURCE
    supersedes: str | None = None

    @property
    def is_trainable(self) -> bool:
        """Whether layers may be trained on it: the user's own act, or an observation that an app
        allows."""
        if self.source == APP_SOURCE:
            return self.payload.get(TRAINS) is True
        return self.source == USER_SOURCE and not self.forbids_training

    @property
    def forbids_training(self) -> bool:
        """Whether training on it is forbidden."""
        return self.payload.get(TRAINS) is False

    @property
    def is_unclear_reward(self) -> bool:
        """Whether it is a reward too near to 0 to say whether the reply is wanted."""
        return self.kind is SignalKind.REWARD and abs(self.payload["value"]) < MIN_CLEAR_REWARD

    @property
    def rating(self) -> float:
        """How much a reply was liked, negative if disliked, 0 if the signal does not say."""
        is_rating = self.kind in (SignalKind.RATING, SignalKind.REWARD)
        return self.payload["value"] if is_rating and not self.is_unclear_reward else 0.0


@dataclass(frozen=True, slots=True)
class Layer:
    """One named line of revisions. ``head`` is None before the first promotion and at the base."""

    name: str
    position: int
    head: str | None
    weight: float = 1.0
    scope: Scope = "always"


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable adapter and how it was built.

    Attributes:
        id: ``<layer>@<first 12 hex digits of digest>``.
        digest: SHA-256 of the packed file.
        base: Digest of the base.
        parent: The revision that the build started from; None for a build from scratch.
        below: The stack that it was trained on.
        recipe: The training configuration.
        inputs: Digest of all inputs of the build: signals, recipe, base and the revisions below.
        signals: Role of each signal by id, a ``SignalRole``.
        scores: The evaluation.
        verdict: The gate's verdict, with its ``reason``.
        probation: Whether it is live on thin evidence.
        seconds: How long the build took.
    """

    id: str
    user: str
    layer: str
    digest: str
    base: str
    parent: str | None
    below: tuple[StackEntry, ...]
    recipe: Json
    inputs: str
    signals: Mapping[str, str]
    scores: Json
    verdict: Verdict
    reason: str
    probation: bool
    at: datetime
    seconds: float


@dataclass(frozen=True, slots=True)
class HeadMove:
    """One step in a layer's history: the head moved between revisions (None: the base)."""

    user: str
    layer: str
    before: str | None
    after: str | None
    cause: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a base as far as adapters need it.

    ``projections`` maps a path inside a block, such as ``self_attn.q_proj``, to (inputs, outputs).
    They are the same in every block.
    """

    model_type: str
    block_path: str
    blocks: int
    projections: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is an int or a float. A bool is neither here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def canonical_json(value: Any) -> str:
    """Return JSON with sorted keys, without spaces and NaN. Equal values give equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def parse_strict_json(text: str, *, unique_keys: bool = False) -> Any:
    """Parse JSON that has no NaN, no infinity and no number too large for a float.

    With ``unique_keys`` no object may have a key twice. Raises ``ValueError``, ``RecursionError``.
    """

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"{number:.20} is not a finite number")
        return value

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the key {twice!a:.40} occurs twice")
        return found

    hook = unique if unique_keys else None
    return json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=hook)


def canonical_digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()

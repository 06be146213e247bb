"""The frozen values that travel between the parts of the house.

Nothing here opens a file, holds a tensor or knows the time. The words are those of docs/architecture.md: a *turn* is
one prompt and one reply, a *signal* one act of feedback, a *layer* one named line of *revisions* in a user's *stack*.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal, TypeAlias

Json: TypeAlias = Mapping[str, Any]
Role: TypeAlias = Literal["system", "user", "assistant", "tool"]
FinishReason: TypeAlias = Literal["stop", "length", "cancelled"]
Progress: TypeAlias = Callable[[str, float], None]
"""Hears a stage and how much of it is done, 0 to 1."""

Scope: TypeAlias = Literal["always", "near", "never"]


def usual_scope(layer: str) -> Scope:
    """Of a layer of which nobody said anything: a style is for everything, what else is learned is about something."""
    return "always" if layer == "style" else "near"


"""When a live layer is attached: to every request, to those that are near its own lessons, to none."""

APP = "app"
PERSON = "person"
"""The ``source`` of a signal that somebody gave themselves; any other is the name of what gave it."""


MOST_TOP_LOGPROBS = 20
"""How many of the likeliest tokens can be told of in the place of one."""


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
    """What the gate said of a candidate revision."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    ABSTAINED = "abstained"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """What a reply asks the app to do: a tool by its name, with the arguments for it. ``id`` is what a result names it by."""

    name: str
    arguments: Json = field(default_factory=dict, hash=False)
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation, as the app gave it.

    ``tool_calls`` are those of an assistant; a message of a tool is the result of the call ``tool_call_id``. ``tools`` are what may be
    called in answer to it, as JSON that the chat template reads, and ``must_call`` says that one is to be: True any, a name that one.
    Both are asked beside what is said, and no part of what makes two messages the same.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tools: tuple[Json, ...] = field(default=(), compare=False)
    must_call: bool | str = field(default=False, compare=False)

    def plain(self) -> list[Any]:
        """As JSON: role and content, and what there is besides. ``of_plain`` is the reverse."""
        more: dict[str, Any] = {}
        if self.tool_calls:
            more["tool_calls"] = [
                [call.name, dict(call.arguments), call.id] for call in self.tool_calls
            ]
        if self.tool_call_id:
            more["tool_call_id"] = self.tool_call_id
        if self.tools:
            more["tools"] = [dict(tool) for tool in self.tools]
        if self.must_call:
            more["must_call"] = self.must_call
        return [self.role, self.content, more] if more else [self.role, self.content]

    @staticmethod
    def of_plain(found: Any) -> Message:
        """Raises ``ValueError`` or ``TypeError`` for what ``plain`` did not write."""
        role, content, *rest = found
        more: dict[str, Any] = dict(*rest)
        if set(more) - {"tool_calls", "tool_call_id", "tools", "must_call"}:
            raise ValueError("a message with more to it than is known")
        calls = tuple(ToolCall(*call) for call in more.get("tool_calls", ()))
        call_id, tools = more.get("tool_call_id", ""), tuple(more.get("tools", ()))
        texts = [call_id, *(text for call in calls for text in (call.name, call.id))]
        values, must_call = (
            [*tools, *(call.arguments for call in calls)],
            more.get("must_call", False),
        )
        if not all(isinstance(text, str) for text in texts) or not all(
            isinstance(value, dict) for value in values
        ):
            raise ValueError("a message with a call or a tool that is none")
        if not isinstance(must_call, bool | str):
            raise ValueError("a message with a call to be made that is none")
        return Message(role, content, calls, call_id, tools, must_call)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is picked.

    ``temperature`` 0 is greedy. ``top_p`` in (0, 1]. ``max_tokens`` counts new tokens. A ``stop`` string ends the reply
    and is not part of it. The same seed, prompt and stack give the same text on the same backend.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int = 256
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and tokens written."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class StackEntry:
    """One layer of a stack: the revision that is live in it and the weight it is added with."""

    layer: str
    revision: str
    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Stack:
    """The ordered layers that answer a turn, lowest first, on one base. No entries: the bare base."""

    base: str
    entries: tuple[StackEntry, ...] = ()

    @property
    def digest(self) -> str:
        """Names what served a turn: equal digests mean equal base, adapters, order and weights."""
        return canonical_digest([self.base, *[[e.layer, e.digest, e.weight] for e in self.entries]])

    @property
    def is_bare(self) -> bool:
        """Whether nothing in it changes what the base says."""
        return all(entry.weight == 0 for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and one reply, stamped with the stack that produced it.

    ``messages`` is what the app sent; ``used`` names the signals (facts, rules) that memory added to the prompt.
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

    @property
    def ended(self) -> bool:
        """Whether the reply came to its own end, rather than to be cut off."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class Signal:
    """One act of feedback. ``payload`` holds what the kind says:

    rating {"value": -1|1, "how"?}, edit {"text"}, preference {"text", "revision"?, "layer"?, "cut_off"?}, comment {"text"},
    reward {"value"}, demonstration {"prompt", "answer", "skill"}, fact {"text", "questions", "answer"}. ``source`` is who gave
    it; "how" is there where an app took a rating from what it saw, "cut_off" where a text ended since it had to.
    """

    id: str
    user: str
    kind: SignalKind
    at: datetime
    payload: Json
    turn: str | None = None
    source: str = PERSON
    supersedes: str | None = None


@dataclass(frozen=True, slots=True)
class Layer:
    """One named line of revisions. ``head`` is None before the first promotion and after a rollback to the base;
    ``scope`` says when it is attached.
    """

    name: str
    position: int
    head: str | None
    weight: float = 1.0
    scope: Scope = "always"


@dataclass(frozen=True, slots=True)
class Revision:
    """An immutable adapter and how it came to be.

    ``id`` is ``<layer>@<first 12 hex digits of digest>``; ``digest`` is the SHA-256 of the packed file. ``inputs`` is
    the digest of all that went into the build: signals, recipe, base and the revisions below. ``signals`` maps a
    signal's id to its role, "train" or "pinned". ``probation`` means live on thin evidence.
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
    """One step in a layer's history: the head went from one revision to another (None: the base), and why."""

    user: str
    layer: str
    before: str | None
    after: str | None
    cause: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Architecture:
    """What an adapter must know of a base's shape: where the blocks are and which projections can be adapted.

    ``projections`` maps a path inside a block (``self_attn.q_proj``) to (inputs, outputs); they are the same in every
    block.
    """

    model_type: str
    block_path: str
    blocks: int
    projections: Mapping[str, tuple[int, int]] = field(default_factory=dict)


def canonical_json(value: Any) -> str:
    """JSON in one spelling: sorted keys, no spaces, no NaN. Equal values give equal text."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def canonical_digest(value: Any) -> str:
    """SHA-256 (hex) of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()

"""One request of a user, from what was asked to a stream that records its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from personalpeft.parts import Parts
from personalpeft.replies import Reply, Stream
from personalpeft.serving.engine import Request
from personalpeft.stacks import live, only
from personalpeft.types import Message, Sampling

# What memory may add to a prompt, as a share of the base's context.
_MEMORY_SHARE = 8
_MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, checked: ``layers`` are the only ones to attach, None those whose scope covers the request."""

    messages: tuple[Message, ...]
    sampling: Sampling
    memory: bool
    layers: Sequence[str] | None
    timeout: float | None


def begin(parts: Parts, user: str, asked: Asked, cancelled: Callable[[], bool] | None) -> Stream:
    """As ``User.stream``."""
    engine = parts.engine()
    # Before anything else is made of the request: its turn, its reply and the prompt caches all name this stack.
    layers = asked.layers
    stack = (
        parts.scopes.narrowed(user, live(parts, user), asked.messages) if layers is None else only(parts, user, layers)
    )
    heard, used = recall(parts, user, asked.messages) if asked.memory else (asked.messages, ())
    request = Request(user, heard, stack, asked.sampling, asked.timeout)
    prompt_tokens = len(engine.tokens(request))

    def record(reply: Reply) -> Reply:
        turn = parts.store.ledger.add_turn(
            user,
            messages=asked.messages,
            reply=reply.text,
            stack=stack,
            sampling=asked.sampling,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            used=used,
        )
        return replace(reply, turn_id=turn.id)

    stream = Stream(engine.replies([request], cancelled=cancelled), stack, prompt_tokens, record, _marked(parts))
    parts.streams.add(stream)
    return stream


def _marked(parts: Parts) -> Callable[[], None]:
    """Notes that a person is being answered, for other processes on the same home: at once, and once a second at most."""
    upkeep, timer = parts.store.upkeep, parts.clock.timer
    upkeep.serving()
    last = timer()

    def mark() -> None:
        nonlocal last
        if timer() - last >= _MARK_SECONDS:
            last = timer()
            upkeep.serving()

    return mark


def recall(parts: Parts, user: str, messages: tuple[Message, ...]) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages as the model hears them, with the rules and facts that apply, and the ids of those."""
    backend = parts.engine().backend
    recalled = parts.memory.recall(
        user,
        messages,
        budget_tokens=backend.base.card.context // _MEMORY_SHARE,
        count=lambda text: len(backend.encode(text)),
        system=backend.base.card.system,
    )
    return recalled.messages, recalled.used

"""One request of a user, from what was asked to a stream that records its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from personalpeft.base_models.chat_template import takes_tools
from personalpeft.chat.reply import Reply, Stream
from personalpeft.chat.validation import about_tools
from personalpeft.engine.engine import Request
from personalpeft.errors import InvalidInput
from personalpeft.learning.data.facts import memorized
from personalpeft.learning.evaluate.rule_gain import internalized_rules
from personalpeft.services import Services
from personalpeft.stacks import live, only, with_head
from personalpeft.types import Message, Sampling, Stack

# What memory may add to a prompt, as a share of the base's context.
_MEMORY_SHARE = 8
_MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked, checked: ``layers`` are the only ones to attach, None those whose scope covers the request;
    ``revision`` stands for its layer's head.
    """

    messages: tuple[Message, ...]
    sampling: Sampling
    memory: bool
    layers: Sequence[str] | None
    timeout: float | None
    revision: str | None = None
    template: bool = True
    logprobs: bool = False
    top_logprobs: int = 0


def begin(
    services: Services, user: str, asked: Asked, cancelled: Callable[[], bool] | None
) -> Stream:
    """As ``User.stream``."""
    check_heard(services, asked.messages)
    engine = services.engine
    # Before anything of the user is read: what is forgotten from here on may be in the reply.
    removed = services.store.ledger.count_removed(user)
    # Before anything else is made of the request: its turn, its reply and the prompt caches all name this stack.
    stack = _stack(services, user, asked)
    heard, used = (
        recall(services, user, asked.messages, stack) if asked.memory else (asked.messages, ())
    )
    request = Request(
        user,
        heard,
        stack,
        asked.sampling,
        asked.timeout,
        template=asked.template,
        logprobs=asked.logprobs,
        top_logprobs=asked.top_logprobs,
    )
    prompt_tokens = len(engine.tokens(request))

    def record(reply: Reply) -> Reply:
        turn = services.store.ledger.add_turn(
            user,
            messages=asked.messages,
            reply=reply.text,
            stack=stack,
            sampling=asked.sampling,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            used=used,
            removed=removed,
        )
        return replace(reply, turn_id=turn.id)

    decode = engine.backend.decode if asked.logprobs else None
    stream = Stream(
        engine.replies([request], cancelled=cancelled),
        stack,
        prompt_tokens,
        record,
        _marked(services),
        decode,
    )
    services.streams.add(stream)
    return stream


def check_heard(services: Services, messages: Sequence[Message]) -> None:
    """Raises ``InvalidInput`` where the base's template would leave out what is said of tools."""
    if about_tools(messages) and not takes_tools(services.base):
        raise InvalidInput(
            "The chat template of this base knows no tools.",
            hint="Ask without them, or open a base that does.",
        )


def _marked(services: Services) -> Callable[[], None]:
    """Notes that a person is being answered, for other processes on the same home: at once, and once a second at most."""
    upkeep, timer = services.store.upkeep, services.clock.timer
    upkeep.serving()
    last = timer()

    def mark() -> None:
        nonlocal last
        if timer() - last >= _MARK_SECONDS:
            last = timer()
            upkeep.serving()

    return mark


def _stack(services: Services, user: str, asked: Asked) -> Stack:
    """What answers: the layers that were named, or those whose scope covers the request; a revision that was named stands
    in its layer's place, whatever the layer's scope.
    """
    if asked.layers is not None:
        return only(services, user, asked.layers)
    if asked.revision is None:
        return services.router.select(user, live(services, user), asked.messages)
    revision = services.store.catalog.revision(user, asked.revision)
    return answering_with(services, user, asked.messages, revision.layer, revision.id)


def answering_with(
    services: Services, user: str, messages: Sequence[Message], layer: str, head: str | None
) -> Stack:
    """What these messages are answered with where this is the head of a layer, which is there whatever its scope. Raises as
    ``with_head``.
    """
    stack = with_head(services, user, layer, head)
    near = services.router.select(user, stack, messages).entries
    return replace(stack, entries=tuple(e for e in stack.entries if e in near or e.layer == layer))


def recall(
    services: Services, user: str, messages: tuple[Message, ...], stack: Stack
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """The messages as the model hears them, with the rules and facts that apply, and the ids of those. What the memory in
    the stack knows by heart is not looked up, and what its style has taken over is not said.
    """
    whole = {entry.layer: entry.revision for entry in stack.entries if entry.weight == 1}
    revision = partial(services.store.catalog.revision, user)
    known = memorized(revision(whole["memory"])) if "memory" in whole else frozenset[str]()
    known |= internalized_rules(revision(whole["style"])) if "style" in whole else frozenset()
    backend = services.engine.backend
    recalled = services.memory.recall(
        user,
        messages,
        budget_tokens=backend.base.card.context // _MEMORY_SHARE,
        count=lambda text: len(backend.encode(text)),
        system=backend.base.card.system,
        known=known,
    )
    return recalled.messages, recalled.used

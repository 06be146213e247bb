"""Turn a checked chat request into a stream that records its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from personalpeft.base_models.chat_template import supports_tools
from personalpeft.chat.reply import Reply, Stream
from personalpeft.chat.validation import uses_tools
from personalpeft.engine.engine import Request
from personalpeft.errors import InvalidInput
from personalpeft.learning.data.facts import memorized
from personalpeft.learning.evaluate.measures import internalized_rules
from personalpeft.services import Services
from personalpeft.stacks import live_stack, select_layers, stack_with_head
from personalpeft.types import Message, Sampling, Stack

# Memory may add an eighth of the base's context to a prompt.
_MEMORY_SHARE = 8
_MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The checked arguments of ``User.stream``.

    ``layers`` are the only layers to attach; None selects by scope. ``revision`` replaces the head
    of its layer.
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


def start_stream(
    services: Services, user: str, chat: ChatRequest, cancelled: Callable[[], bool] | None
) -> Stream:
    """Implement ``User.stream``."""
    check_tool_support(services, chat.messages)
    engine = services.engine
    # First: whatever is forgotten after this line may be in the reply, which is then not recorded.
    tombstones = services.store.ledger.count_tombstones(user)
    stack = _select_stack(services, user, chat)
    messages, item_ids = chat.messages, tuple[str, ...]()
    if chat.memory:
        messages, item_ids = augment_prompt(services, user, messages, stack)
    request = Request(
        user,
        messages,
        stack,
        chat.sampling,
        chat.timeout,
        template=chat.template,
        logprobs=chat.logprobs,
        top_logprobs=chat.top_logprobs,
    )
    outputs = engine.stream([request], cancelled=cancelled)

    def record(reply: Reply) -> Reply:
        turn = services.store.ledger.add_turn(
            user,
            messages=chat.messages,
            reply=reply.text,
            stack=stack,
            sampling=chat.sampling,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            used=item_ids,
            tombstones=tombstones,
        )
        return replace(reply, turn_id=turn.id)

    stream = Stream(
        outputs,
        stack,
        len(outputs.prompts[0]),
        record,
        _activity_marker(services),
        engine.backend.decode if chat.logprobs else None,
    )
    services.streams.add(stream)
    return stream


def check_tool_support(services: Services, messages: Sequence[Message]) -> None:
    """Raise ``InvalidInput`` if the base's chat template would drop the tools in the messages."""
    if uses_tools(messages) and not supports_tools(services.base):
        raise InvalidInput(
            "The chat template of this base does not support tools.",
            hint="Leave tools out, or open a base that supports them.",
        )


def stack_with_revision(
    services: Services, user: str, messages: Sequence[Message], layer: str, head: str | None
) -> Stack:
    """Return the stack that serves messages with another head in a layer, whatever its scope.

    Raises as ``stack_with_head``.
    """
    stack = stack_with_head(services, user, layer, head)
    near = services.router.select(user, stack, messages).entries
    return replace(stack, entries=tuple(e for e in stack.entries if e in near or e.layer == layer))


def augment_prompt(
    services: Services, user: str, messages: tuple[Message, ...], stack: Stack
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Return the messages with the user's rules and relevant facts, and the ids of those.

    Facts that the stack's memory layer has memorized and rules that its style layer has
    internalized are left out.
    """
    whole = {entry.layer: entry.revision for entry in stack.entries if entry.weight == 1}
    revision = partial(services.store.catalog.revision, user)
    exclude = memorized(revision(whole["memory"])) if "memory" in whole else frozenset[str]()
    exclude |= internalized_rules(revision(whole["style"])) if "style" in whole else frozenset()
    backend = services.engine.backend
    recall = services.memory.add_to_prompt(
        user,
        messages,
        budget_tokens=backend.base.card.context // _MEMORY_SHARE,
        count_tokens=lambda text: len(backend.encode(text)),
        system=backend.base.card.system,
        exclude=exclude,
    )
    return recall.messages, recall.item_ids


def _select_stack(services: Services, user: str, chat: ChatRequest) -> Stack:
    if chat.layers is not None:
        return select_layers(services, user, chat.layers)
    if chat.revision is None:
        return services.router.select(user, live_stack(services, user), chat.messages)
    revision = services.store.catalog.revision(user, chat.revision)
    return stack_with_revision(services, user, chat.messages, revision.layer, revision.id)


def _activity_marker(services: Services) -> Callable[[], None]:
    """Mark the home as serving, now and at most once a second, for other processes on it."""
    maintenance, timer = services.store.maintenance, services.clock.timer
    maintenance.mark_activity()
    last = timer()

    def mark() -> None:
        nonlocal last
        if timer() - last >= _MARK_SECONDS:
            last = timer()
            maintenance.mark_activity()

    return mark

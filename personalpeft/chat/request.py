"""Turn a checked chat request into a stream that records its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from personalpeft.chat.conversation import (
    conversation_of,
    drop_oldest,
    find_previous,
    read_conversation,
)
from personalpeft.chat.examples import is_short
from personalpeft.chat.implicit_feedback import classify_message
from personalpeft.chat.reply import Reply, ReplyReader, Stream
from personalpeft.engine.engine import Request
from personalpeft.engine.request import OutputStream
from personalpeft.errors import InvalidInput, PersonalPeftError, PromptTooLong
from personalpeft.feedback import record_implicit_feedback
from personalpeft.memory.types import AugmentedPrompt
from personalpeft.services import Services
from personalpeft.stacks import live_stack, select_layers, stack_with_head
from personalpeft.types import Message, Sampling, Stack, ToolFormat

# Memory may add an eighth of the base's context to a prompt.
_MEMORY_SHARE = 8
_MARK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """The checked arguments of ``User.stream``.

    ``layers`` are the only layers to attach; None selects by scope. ``revision`` replaces the head
    of its layer. ``replaces`` is the id of a turn.
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
    conversation_id: str | None = None
    replaces: str | None = None
    truncate: bool = False


def start_stream(
    services: Services, user: str, chat: ChatRequest, cancelled: Callable[[], bool] | None
) -> Stream:
    """Implement ``User.stream``, which documents the arguments. ``chat`` holds the checked ones."""
    services.store.check_writable()
    check_tool_support(services, chat.messages)
    engine = services.engine
    # First: an item forgotten after this line may be in the reply, so the reply is not recorded.
    erasure_mark = services.store.ledger.erasure_mark(user)
    conversation_id, previous, prompt = _continue_conversation(services, user, chat)
    stack = _select_stack(services, user, chat, prompt)
    messages, item_ids, outputs = _submit(services, user, chat, prompt, stack, cancelled)
    dropped = len(prompt) - len(messages)
    turn_id = services.store.ledger.new_turn_id()

    def record(reply: Reply) -> Reply:
        turn = services.store.ledger.add_turn(
            user,
            turn_id=turn_id,
            messages=messages,
            reply=reply.text,
            stack=stack,
            sampling=chat.sampling,
            usage=reply.usage,
            finish_reason=reply.finish_reason,
            used=item_ids,
            erasure_mark=erasure_mark,
            conversation_id=conversation_id,
            previous=previous,
            backend=engine.backend.name,
            backend_reason=services.model.choice().reason,
        )
        # The turn is recorded, so what this raises must not fail the reply.
        with suppress(PersonalPeftError):
            _record_implicit_feedback(services, user, chat.replaces, previous, messages[-1])
        return replace(reply, conversation_id=turn.conversation_id, dropped_messages=dropped)

    def check_stack() -> None:
        for entry in stack.entries:
            services.store.catalog.revision(user, entry.revision)

    reader = ReplyReader(
        turn_id,
        outputs,
        stack,
        record,
        check_stack,
        _activity_marker(services),
        engine.backend.decode if chat.logprobs else None,
        services.base.tool_format,
    )
    stream = Stream(reader)
    services.streams.add(stream)
    return stream


def _continue_conversation(
    services: Services, user: str, chat: ChatRequest
) -> tuple[str | None, str | None, tuple[Message, ...]]:
    """Return the conversation of a new turn, the turn before it, and the prompt with the history.

    The conversation is None if the turn starts one, and "" if it is outside of any.
    """
    store, tool_format = services.store, services.base.tool_format
    if not chat.template:
        return "", None, chat.messages
    name = chat.conversation_id
    if name is None and chat.replaces is None:
        before = find_previous(store, user, chat.messages, tool_format)
        if before is None:
            return None, None, chat.messages
        name = before.conversation_id or conversation_of(store, user, before.id)
        return name, before.id, chat.messages
    if name is None and chat.replaces is not None:
        name = conversation_of(store, user, chat.replaces)
        if name is None:
            raise InvalidInput(
                f"{chat.replaces} is in no conversation.", hint="Chat without replaces."
            )
    conversation = read_conversation(store, user, name or "", replaces=chat.replaces)
    history = conversation.messages(tool_format)
    system = [m for m in chat.messages if m.role == "system"] or conversation.system
    messages = [m for m in (*history, *chat.messages) if m.role != "system"]
    last = conversation.turns[-1].id if conversation.turns else None
    return conversation.id, last, (*system, *messages)


def _submit(
    services: Services,
    user: str,
    chat: ChatRequest,
    messages: tuple[Message, ...],
    stack: Stack,
    cancelled: Callable[[], bool] | None,
) -> tuple[tuple[Message, ...], tuple[str, ...], OutputStream]:
    """Return the messages that fit into the context, the ids of memory's items, and the output."""
    engine = services.engine
    with_examples = chat.memory
    while True:
        prompt = AugmentedPrompt(messages, ())
        if chat.memory:
            prompt = augment_prompt(services, user, messages, stack, with_examples=with_examples)
        request = Request(
            user,
            prompt.messages,
            stack,
            chat.sampling,
            chat.timeout,
            template=chat.template,
            logprobs=chat.logprobs,
            top_logprobs=chat.top_logprobs,
        )
        try:
            return messages, prompt.item_ids, engine.stream([request], cancelled=cancelled)
        except PromptTooLong as error:
            if with_examples:
                with_examples = False
                continue
            shorter = drop_oldest(
                messages, error.excess, lambda text: len(engine.backend.encode(text))
            )
            if not chat.truncate or len(shorter) == len(messages):
                raise
            messages = shorter


def _record_implicit_feedback(
    services: Services, user: str, replaced: str | None, previous: str | None, message: Message
) -> None:
    """Record the implicit feedback that a new turn gives on the one it replaces or continues."""
    if services.implicit_feedback == "off":
        return
    if replaced is not None:
        record_implicit_feedback(services, user, replaced, "regenerated", None)
    elif previous is not None and message.role == "user":
        turn = services.store.ledger.turn(user, previous)
        event = classify_message(message.content, turn.reply)
        if event is not None:
            record_implicit_feedback(services, user, turn, event, None)


def check_tool_support(services: Services, messages: Sequence[Message]) -> None:
    """Raise ``InvalidInput`` if the base's chat template would drop the tools in the messages."""
    uses_tools = any(each.tools or each.tool_calls or each.role == "tool" for each in messages)
    if uses_tools and services.base.tool_format is ToolFormat.NONE:
        raise InvalidInput(
            "The chat template of this base does not support tools.",
            hint="Leave tools out, or open a base that supports them.",
        )


def stack_with_revision(
    services: Services, user: str, messages: Sequence[Message], layer: str, head: str | None
) -> Stack:
    """Return the stack that serves messages with another head in a layer, whatever its scope.

    The messages select the other layers by their scopes. Raises as ``stack_with_head``.
    """
    stack = stack_with_head(services, user, layer, head)
    others = replace(stack, entries=tuple(e for e in stack.entries if e.layer != layer))
    near = services.router.select(user, others, messages).entries
    return replace(stack, entries=tuple(e for e in stack.entries if e in near or e.layer == layer))


def augment_prompt(
    services: Services,
    user: str,
    messages: tuple[Message, ...],
    stack: Stack,
    *,
    with_examples: bool = True,
) -> AugmentedPrompt:
    """Return the messages with the user's rules, relevant facts, and examples of the style.

    What layers have learned stays in the prompt: a user who stated a rule may rely on it, and the
    lookup of facts understands more wordings than a layer.

    Args:
        services: The wired parts.
        user: The user.
        messages: The prompt.
        stack: What answers. Without a style there are no examples.
        with_examples: Whether to add examples.
    """
    backend = services.engine.backend
    prompt = services.memory.add_to_prompt(
        user,
        messages,
        budget_tokens=backend.base.card.context // _MEMORY_SHARE,
        count_tokens=lambda text: len(backend.encode(text)),
        system=backend.base.card.system,
    )
    # Beside demonstrations of a fact no examples are added.
    if not with_examples or stack.style is None or prompt.demonstrated:
        return prompt
    examples = services.examples.select(user, stack.style.revision, messages)
    turns = [turn for each in examples for turn in each.turns]
    if not is_short(turns, backend):
        return prompt
    *before, request = prompt.messages
    return AugmentedPrompt(
        (*before, *turns, request), (*prompt.item_ids, *(each.signal for each in examples))
    )


def _select_stack(
    services: Services, user: str, chat: ChatRequest, messages: tuple[Message, ...]
) -> Stack:
    if chat.layers is not None:
        return select_layers(services, user, chat.layers)
    if chat.revision is None:
        return services.router.select(user, live_stack(services, user), messages)
    revision = services.store.catalog.revision(user, chat.revision)
    return stack_with_revision(services, user, messages, revision.layer, revision.id)


def _activity_marker(services: Services) -> Callable[[], None]:
    """Mark the home as serving, now and at most once a second, for other processes on it."""
    maintenance, timer = services.maintenance, services.clock.timer
    maintenance.mark_activity()
    last = timer()

    def mark() -> None:
        nonlocal last
        if timer() - last >= _MARK_SECONDS:
            last = timer()
            maintenance.mark_activity()

    return mark

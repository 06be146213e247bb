"""Conversations: turns that continue each other.

A turn names its conversation and the turn before it. A conversation is the chain of turns that ends
at its newest one. So a regenerated reply replaces the old one. Turns of earlier versions name
neither; their place is inferred from their messages.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from personalpeft.arguments import check_number
from personalpeft.base_models.tool_calls import assistant_message, read_calls
from personalpeft.errors import Forgotten, InvalidInput, NotFound, suggest_nearest
from personalpeft.store.id_lookup import check_is_text, choose_id
from personalpeft.store.store import Store
from personalpeft.store.types import ConversationLink
from personalpeft.types import USER_SOURCE, Message, Signal, SignalKind, ToolFormat, Turn

# Each but a comment is a field of ``TurnFeedback``.
_FEEDBACK_KINDS = (
    SignalKind.RATING,
    SignalKind.EDIT,
    SignalKind.PREFERENCE,
    SignalKind.REWARD,
    SignalKind.COMMENT,
)

_RECENT_TURNS = 20
"""Turns among which a reply that calls tools is looked for. Clients send its calls, not its text."""


@dataclass(frozen=True, slots=True)
class ConversationSummary:
    """One conversation in a list. ``title`` is its first prompt, on one line."""

    id: str
    title: str
    updated_at: datetime
    num_turns: int
    last_turn: str


@dataclass(frozen=True, slots=True)
class TurnFeedback:
    """The current feedback of the user on a turn. It leaves out implicit and foreign feedback.

    Attributes:
        rating: 1 or -1.
        edit: The reply as it should have been.
        preference: A text that is better.
        reward: From -1 to 1.
        comments: The rules that were given with this reply, oldest first.
    """

    rating: int | None = None
    edit: str | None = None
    preference: str | None = None
    reward: float | None = None
    comments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation.

    Attributes:
        turns: Oldest first, without those that were regenerated.
        feedback: By turn, for each turn that has any.
        system: The newest system messages.
    """

    json_properties = ("title",)

    id: str
    turns: tuple[Turn, ...]
    feedback: Mapping[str, TurnFeedback]
    system: tuple[Message, ...] = ()

    @property
    def title(self) -> str:
        """The first prompt, on one line."""
        return _title(self.turns[0])

    def messages(self, tool_format: ToolFormat = ToolFormat.HERMES) -> tuple[Message, ...]:
        """Return the messages so far, each reply as it was edited.

        A turn without a reply is left out. Tool calls in another format than ``tool_format`` stay
        text.
        """
        messages: list[Message] = []
        for number, turn in enumerate(self.turns):
            edit = self.feedback.get(turn.id, TurnFeedback()).edit
            reply = turn.reply if edit is None else edit
            if reply.strip():
                new = _new_messages(turn) if number else turn.messages
                messages += [replace(m, tools=(), must_call=False) for m in new]
                messages.append(assistant_message(reply, turn.id, tool_format))
        return (*self.system, *(m for m in messages if m.role != "system"))


def list_conversations(
    store: Store, user: str, limit: int | None, before: str | None
) -> tuple[ConversationSummary, ...]:
    """Implement ``User.conversations``, which documents the arguments."""
    if limit is not None:
        check_number("limit", limit, 0, whole=True)
    links = _links(store, user)
    newest = _newest(links)
    order = list(newest)
    if before is not None:
        order = order[order.index(_resolve(store, order, user, before)) + 1 :]
    by_id = {link.turn: link for link in links}
    summaries = []
    for conversation in order[:limit]:
        chain = _chain(by_id, newest[conversation].turn)
        first = store.ledger.turn(user, chain[0].turn)
        last = chain[-1]
        summaries.append(
            ConversationSummary(conversation, _title(first), last.at, len(chain), last.turn)
        )
    return tuple(summaries)


def read_conversation(
    store: Store, user: str, conversation_id: str, *, replaces: str | None = None
) -> Conversation:
    """Return a conversation by its id or a unique prefix, up to the turn before ``replaces``.

    Raises ``NotFound``, ``Forgotten``, and ``InvalidInput`` for an ambiguous prefix, or if
    ``replaces`` is in another conversation.
    """
    links = _links(store, user)
    by_id = {link.turn: link for link in links}
    newest_links = _newest(links)
    wanted = _resolve(store, newest_links, user, conversation_id)
    if replaces is None:
        end: str | None = newest_links[wanted].turn
    elif by_id[replaces].conversation == wanted:
        end = by_id[replaces].previous
    else:
        raise InvalidInput(
            f"{replaces} is not in the conversation {wanted}.",
            hint="Leave conversation_id out, or name a turn of that conversation.",
        )
    chain = [] if end is None else _chain(by_id, end)
    turns = tuple(store.ledger.turn(user, link.turn) for link in chain)
    newest = store.ledger.turn(user, replaces) if replaces is not None else turns[-1]
    system = tuple(message for message in newest.messages if message.role == "system")
    return Conversation(wanted, turns, _read_feedback(store, user, turns), system)


def _read_feedback(store: Store, user: str, turns: Sequence[Turn]) -> dict[str, TurnFeedback]:
    found: dict[str, dict[str, Any]] = {turn.id: {} for turn in turns}
    for signal in store.ledger.signals(user, kinds=_FEEDBACK_KINDS):
        payload = signal.payload
        if signal.turn not in found or signal.source != USER_SOURCE or "how" in payload:
            continue
        fields = found[signal.turn]
        if signal.kind is SignalKind.COMMENT:
            fields["comments"] = (*fields.get("comments", ()), payload["text"])
        else:
            fields[signal.kind] = payload["value"] if "value" in payload else payload["text"]
    return {turn: TurnFeedback(**fields) for turn, fields in found.items() if fields}


def conversation_of(store: Store, user: str, turn_id: str) -> str | None:
    """Return the conversation that a turn is in, by its full id. None if it is in none."""
    return next(link for link in _links(store, user) if link.turn == turn_id).conversation or None


def turns_of_conversation(store: Store, user: str, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the id of a conversation and all its turns, regenerated ones too, oldest first.

    ``name`` is its id or that of one of its turns, or a unique prefix. Raises ``NotFound``,
    ``Forgotten``, and ``InvalidInput`` for a turn in no conversation or an ambiguous prefix.
    """
    links = _links(store, user)
    wanted: str | None = name
    if all(link.conversation != name for link in links):
        try:
            wanted = conversation_of(store, user, store.ledger.turn(user, name).id)
        except (NotFound, Forgotten):
            # A conversation is named after its first turn, which may have been erased.
            known = [each for each in _newest(links) if each.startswith(name)]
            if not name or not known:
                raise
            wanted = _resolve(store, known, user, name)
    if not wanted:
        raise InvalidInput(f"{name} is in no conversation.", hint="Forget the turn alone.")
    return wanted, tuple(link.turn for link in links if link.conversation == wanted)


def find_previous(
    store: Store, user: str, messages: Sequence[Message], tool_format: ToolFormat
) -> Turn | None:
    """Return the turn that a whole prompt continues, for clients that send no ids.

    That is a turn whose prompt and reply precede the new messages: one of the user, or the results
    of tools. Of several, the one that the same message continued before, which is then regenerated.
    Else one that nothing continues yet: two chats may begin alike. Else the newest.
    """
    answers = [at for at, message in enumerate(messages) if message.role == "assistant"]
    if not answers:
        return None
    end = answers[-1]
    reply, new = messages[end], messages[end + 1 :]
    if len(new) != 1 and any(each.role != "tool" for each in new):
        return None
    candidates = _turns_with(store, user, reply, tool_format)
    found = [turn for turn in candidates if _continues(messages[:end], turn)]
    if len(found) < 2:
        return found[0] if found else None
    following: dict[str | None, list[str]] = {}
    for link in store.ledger.conversation_links(user):
        following.setdefault(link.previous, []).append(link.turn)

    def rank(turn: Turn) -> int:
        later = [store.ledger.turn(user, each) for each in following.get(turn.id, ())]
        is_same = any(each.messages[-1] == messages[-1] for each in later)
        return 0 if is_same else 2 if later else 1

    return min(found, key=rank)


def _turns_with(store: Store, user: str, reply: Message, tool_format: ToolFormat) -> Sequence[Turn]:
    """Return the turns with a reply, newest first. Of calls of tools, only recent turns."""
    if not reply.tool_calls:
        return store.ledger.turns_with_reply(user, reply.content)
    wanted = [(call.name, call.arguments) for call in reply.tool_calls]
    return [
        turn
        for turn in store.ledger.turns(user, limit=_RECENT_TURNS)
        if [(x.name, x.arguments) for x in read_calls(turn.reply, tool_format)[1]] == wanted
    ]


def drop_oldest(
    messages: Sequence[Message], excess: int, count_tokens: Callable[[str], int]
) -> tuple[Message, ...]:
    """Return a prompt without its oldest exchanges, at least ``excess`` tokens if it has so many.

    An exchange is a user message and what follows up to the next one. System messages and the last
    exchange stay. ``count_tokens`` counts those of a text.
    """
    system = [m for m in messages if m.role == "system"]
    rest = [m for m in messages if m.role != "system"]
    starts = [at for at, m in enumerate(rest) if m.role == "user"]
    start, dropped = 0, 0
    for start in starts[1:]:
        dropped = sum(count_tokens(m.content) for m in rest[:start])
        if dropped >= excess:
            break
    return (*system, *rest[start:])


def _links(store: Store, user: str) -> tuple[ConversationLink, ...]:
    """Return the place of each turn, oldest first, with the missing ones inferred."""
    links = store.ledger.conversation_links(user)
    if all(link.conversation is not None for link in links):
        return links
    turns = store.ledger.turns(user)
    signals = store.ledger.signals(user, current=False)
    return tuple(_infer_links(links, {turn.id: turn for turn in turns}, signals))


def _newest(links: Sequence[ConversationLink]) -> dict[str, ConversationLink]:
    """Return the newest turn of each conversation, the newest first."""
    newest: dict[str, ConversationLink] = {}
    for link in reversed(links):
        if link.conversation:
            newest.setdefault(link.conversation, link)
    return newest


def _infer_links(
    links: Iterable[ConversationLink], turns: Mapping[str, Turn], signals: Iterable[Signal]
) -> Iterator[ConversationLink]:
    """Yield links whose conversation is known, oldest first.

    Earlier versions recorded the losing answer of a blind comparison as a turn of its own. They did
    the same with a prompt that was sent again at once.
    """
    compared = set()
    edits: dict[str, list[str]] = {}
    for signal in signals:
        if signal.kind is SignalKind.PREFERENCE and "revision" in signal.payload:
            compared.add(signal.turn)
        elif signal.kind is SignalKind.EDIT and signal.turn:
            edits.setdefault(signal.turn, []).append(str(signal.payload["text"]))
    by_reply: dict[str, list[ConversationLink]] = {}
    last: ConversationLink | None = None

    def infer(link: ConversationLink, turn: Turn) -> ConversationLink:
        if turn.id in compared:
            return replace(link, conversation="")
        messages = turn.messages
        candidates = by_reply.get(messages[-2].content, []) if len(messages) > 2 else []
        for each in reversed(candidates):
            if messages[-2].role == "assistant" and _continues(messages[:-2], turns[each.turn]):
                return replace(link, conversation=each.conversation, previous=each.turn)
        if last is not None and last.previous is None and turns[last.turn].messages == messages:
            return replace(link, conversation=last.conversation)
        return replace(link, conversation=turn.id)

    for link in links:
        turn = turns[link.turn]
        if link.conversation is None:
            link = infer(link, turn)
        if link.conversation:
            last = link
            for reply in {turn.reply, *edits.get(turn.id, ())}:
                by_reply.setdefault(reply, []).append(link)
        yield link


def _continues(before: Sequence[Message], turn: Turn) -> bool:
    """Return whether the messages before a reply end with a turn's prompt.

    Only user messages are compared: replies may have been edited, and the beginning of a long
    conversation dropped.
    """
    if not before or before[-1].role not in ("user", "tool"):
        return False
    prompts = [m.content for m in before if m.role == "user"]
    earlier = [m.content for m in turn.messages if m.role == "user"]
    is_same_step = [m.role for m in turn.messages[-1:]] == [before[-1].role]
    return is_same_step and earlier[-len(prompts) :] == prompts


def _chain(links: Mapping[str, ConversationLink], end: str) -> list[ConversationLink]:
    """Return the links from the first turn to ``end``."""
    chain: list[ConversationLink] = []
    at: str | None = end
    while at is not None and at in links:
        chain.append(links[at])
        at = links[at].previous
    return chain[::-1]


def _new_messages(turn: Turn) -> tuple[Message, ...]:
    """Return the messages after the last reply."""
    answers = [at for at, m in enumerate(turn.messages) if m.role == "assistant"]
    return turn.messages[answers[-1] + 1 :] if answers else turn.messages


def _title(turn: Turn) -> str:
    prompts = [m.content for m in turn.messages if m.role == "user"]
    return " ".join((prompts or [turn.messages[-1].content])[0].split())


def _resolve(store: Store, known: Collection[str], user: str, prefix: str) -> str:
    """Return the id of a conversation. Raises ``NotFound``, ``Forgotten``, ``InvalidInput``."""
    check_is_text(prefix, "id of a conversation")
    matches = [each for each in known if each.startswith(prefix)]
    if (found := choose_id(prefix, matches, "conversation")) is not None:
        return found
    try:
        # A conversation is named after its first turn, so it was forgotten if that turn was.
        store.ledger.turn(user, prefix)
    except Forgotten:
        raise
    except (NotFound, InvalidInput):
        pass
    raise NotFound(
        f"{user} has no conversation {prefix[:80]!a}.",
        hint=suggest_nearest(prefix, known, what="conversation"),
    )

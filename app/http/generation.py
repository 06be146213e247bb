"""From the checked fields of a request to streams of a user's model, and from a reply to what every dialect says of it.

Invariants: all replies of a request are begun, or none; whatever keeps the first piece away is an answer with a status of its
own, since nothing was sent yet; streams are closed when the response is, also where nobody read any of it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from flask import Response, request

from personalpeft import Reply, ServingFailed, Stream
from personalpeft_app.http import error_responses, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.models import Model
from personalpeft_app.http.tools import about_tools
from personalpeft_app.http.validation import Body

MOST_TOKENS = 1_000_000
_MOST_MESSAGES = 10_000


def sampling(
    body: Body, *, length: str = "max_tokens", stop: str = "stop", hottest: float = 2.0
) -> dict[str, Any]:
    """The fields of sampling that every dialect has, as ``User.stream`` takes them. Without a seed one is drawn."""
    seed = validation.read_int(body, "seed", least=0, most=2**62)
    asked = {
        "temperature": validation.read_float(body, "temperature", least=0, most=hottest),
        "top_p": validation.read_float(body, "top_p", least=1e-6, most=1),
        "max_tokens": validation.read_int(body, length, least=1, most=MOST_TOKENS),
        "stop": validation.read_texts(body, stop, most=16),
    }
    return {**asked, "seed": secrets.randbits(32) if seed is None else seed}


def model_name(body: Body) -> str:
    """What the request calls its model."""
    name = validation.read_text(body, "model", longest=256)
    if not name:
        raise InvalidParameter("model is missing. GET /v1/models lists what can be asked.", "model")
    return name


def messages(
    listed: Any, where: str, kinds: Sequence[str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A list of messages with text as the library takes them, and with what they say of tools as OpenAI's chats have it. ``kinds``
    are the types of the parts that are text, ``roles`` what the roles are here.
    """
    if not isinstance(listed, list) or not 0 < len(listed) <= _MOST_MESSAGES:
        raise InvalidParameter(f"{where} must be a list of messages.", where)
    found: list[dict[str, Any]] = []
    for number, each in enumerate(listed):
        place = f"{where}[{number}]"
        role = each.get("role") if isinstance(each, dict) else None
        if not isinstance(role, str) or role not in roles:
            raise InvalidParameter(
                f"{place}.role must be one of {', '.join(roles)}.", f"{place}.role"
            )
        if each.get("function_call"):
            raise InvalidParameter(
                f"{place}.function_call: give tool_calls in its place.", f"{place}.function_call"
            )
        said = about_tools(each, place)
        # Who only calls need say nothing.
        silent = bool(said.get("tool_calls")) and each.get("content") is None
        text = "" if silent else text_of(each.get("content"), f"{place}.content", kinds)
        found.append({"role": roles[role], "content": text, **said})
    return found


def text_of(content: Any, where: str, kinds: Sequence[str]) -> str:
    """A text, or the joined texts of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > _MOST_MESSAGES:
        raise InvalidParameter(f"{where} must be a text or a list of parts.", where)
    said = []
    for number, part in enumerate(content):
        fits = (
            isinstance(part, dict)
            and part.get("type") in kinds
            and isinstance(part.get("text"), str)
        )
        if not fits:
            raise InvalidParameter(
                f"{where}[{number}]: only parts of type {kinds[0]} can be read.",
                f"{where}[{number}]",
            )
        said.append(part["text"])
    return "".join(said)


class Generation:
    """The replies of one request, begun side by side. Close it, or read all of it."""

    def __init__(self, model: Model, prompts: Sequence[Any], **how: Any) -> None:
        self.model = model
        self.streams: list[Stream] = []
        gone = request.environ.get("waitress.client_disconnected")
        first = how.pop("seed")
        with ExitStack() as undo:
            undo.callback(self.close)
            for number, prompt in enumerate(prompts):
                # The same prompt again is another reply, and each can be asked for alone.
                seed = first + number
                self.streams.append(
                    model.user.stream(
                        prompt, **{**how, **model.options, "seed": seed, "cancelled": gone}
                    )
                )
            for stream in self.streams:
                stream.begin()
            undo.pop_all()

    def replies(self) -> list[Reply]:
        """All of them, whole. Raises what the library raises."""
        try:
            for stream in self.streams:
                for _ in stream:
                    pass
            return [read_all(stream) for stream in self.streams]
        finally:
            self.close()

    def close(self) -> None:
        """Ends what is still being written."""
        for stream in self.streams:
            stream.close()


def read_all(stream: Stream) -> Reply:
    """The reply of a stream that was read to its end. Raises ``ServingFailed`` where something else ended it."""
    reply = stream.reply
    if reply.finish_reason == "cancelled":
        raise ServingFailed("The reply was ended before it was complete.", hint="Try again.")
    return reply


def metadata(model: Model, reply: Reply) -> dict[str, Any]:
    """What feedback on this reply needs, in every body that carries one."""
    return {
        "turn": reply.turn_id,
        "user": model.user.id,
        "stack": reply.stack.digest,
        "revisions": [entry.revision for entry in reply.stack.entries],
        "conversation_id": reply.conversation_id,
        "dropped_messages": reply.dropped_messages,
    }


def headers(model: Model, stack: str, turn: str = "") -> dict[str, str]:
    """The same as headers. A stream has no turn before its end."""
    said = {"X-PersonalPeft-User": model.user.id, "X-PersonalPeft-Stack": stack}
    return {**said, "X-PersonalPeft-Turn": turn} if turn else said


def sse_response(
    asked: Generation, events: Iterator[str], fault: Callable[[dict[str, Any]], str]
) -> Response:
    """A response of server-sent events. The first is made here: what keeps it away is an error like any other; ``fault`` is
    the event that tells of one that comes later.
    """
    try:
        first = next(events, "")
    except BaseException:
        asked.close()
        raise

    say = error_responses.error_formatter()

    def written() -> Iterator[str]:
        try:
            yield from chain([first], events)
        except Exception as error:  # noqa: BLE001 - its status has gone out already; who reads has to hear that this is no end
            yield fault(say(error))
        finally:
            asked.close()

    stack = asked.streams[0].stack.digest
    response = Response(
        written(), mimetype="text/event-stream", headers=headers(asked.model, stack)
    )
    response.headers["X-Accel-Buffering"] = "no"
    response.call_on_close(asked.close)
    return response


def format_event(value: Any, name: str = "") -> str:
    """One server-sent event."""
    data = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"

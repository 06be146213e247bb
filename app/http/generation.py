"""Generate the replies of a request, whole or streamed, for OpenAI's and Anthropic's routes.

Invariants: either all replies of a request start or none. An error before the first piece is a
response with a status. Streams close with the response.
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
    """Return the sampling options for ``User.stream``. Without a seed one is drawn."""
    seed = validation.read_int(body, "seed", least=0, most=2**62)
    asked = {
        "temperature": validation.read_float(body, "temperature", least=0, most=hottest),
        "top_p": validation.read_float(body, "top_p", least=1e-6, most=1),
        "max_tokens": validation.read_int(body, length, least=1, most=MOST_TOKENS),
        "stop": validation.read_texts(body, stop, most=16),
    }
    return {**asked, "seed": secrets.randbits(32) if seed is None else seed}


def model_name(body: Body) -> str:
    """Return the model's name in a request."""
    name = validation.read_text(body, "model", longest=256)
    if not name:
        raise InvalidParameter("model is missing. GET /v1/models lists the models.", "model")
    return name


def messages(
    listed: Any, where: str, kinds: Sequence[str], roles: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return a request's messages for the library.

    ``kinds`` are the types of text parts, ``roles`` the library's role for each role.
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
        tool_fields = about_tools(each, place)
        # Who only calls need say nothing.
        is_silent = bool(tool_fields.get("tool_calls")) and each.get("content") is None
        text = "" if is_silent else text_of(each.get("content"), f"{place}.content", kinds)
        found.append({"role": roles[role], "content": text, **tool_fields})
    return found


def text_of(content: Any, where: str, kinds: Sequence[str]) -> str:
    """Return a text, or the joined texts of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or len(content) > _MOST_MESSAGES:
        raise InvalidParameter(f"{where} must be a text or a list of parts.", where)
    texts = []
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
        texts.append(part["text"])
    return "".join(texts)


class Generation:
    """The replies of one request, generated side by side. Close it, or read it to the end."""

    def __init__(self, model: Model, prompts: Sequence[Any], **how: Any) -> None:
        self.model = model
        self.streams: list[Stream] = []
        gone = request.environ.get("waitress.client_disconnected")
        first = how.pop("seed")
        with ExitStack() as undo:
            undo.callback(self.close)
            for number, prompt in enumerate(prompts):
                # Each reply of a prompt has its own seed, by which it can be repeated.
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
        """Return the whole replies. Raises as ``User.chat``."""
        try:
            for stream in self.streams:
                for _ in stream:
                    pass
            return [read_all(stream) for stream in self.streams]
        finally:
            self.close()

    def close(self) -> None:
        """Cancel the replies that are unfinished."""
        for stream in self.streams:
            stream.close()


def read_all(stream: Stream) -> Reply:
    """Return the reply of a stream. Raises ``ServingFailed`` if it was cut off."""
    reply = stream.reply
    if reply.finish_reason == "cancelled":
        raise ServingFailed("The reply was cut off.", hint="Try again.")
    return reply


def metadata(model: Model, reply: Reply) -> dict[str, Any]:
    """Return what feedback on a reply needs, for the body of a response."""
    return {
        "turn": reply.turn_id,
        "user": model.user.id,
        "stack": reply.stack.digest,
        "revisions": [entry.revision for entry in reply.stack.entries],
        "conversation_id": reply.conversation_id,
        "dropped_messages": reply.dropped_messages,
    }


def headers(model: Model, stack: str, turn: str = "") -> dict[str, str]:
    """Return the same as headers. A stream has no turn before its end."""
    found = {"X-PersonalPeft-User": model.user.id, "X-PersonalPeft-Stack": stack}
    return {**found, "X-PersonalPeft-Turn": turn} if turn else found


def sse_response(
    generation: Generation, events: Iterator[str], fault: Callable[[dict[str, Any]], str]
) -> Response:
    """Return a response of server-sent events.

    An error before the first event is raised here. ``fault`` formats a later one as an event.
    """
    try:
        first = next(events, "")
    except BaseException:
        generation.close()
        raise

    format_error = error_responses.error_formatter()

    def written() -> Iterator[str]:
        try:
            yield from chain([first], events)
        except Exception as error:  # noqa: BLE001 - the status is sent already
            yield fault(format_error(error))
        finally:
            generation.close()

    stack = generation.streams[0].stack.digest
    response = Response(
        written(), mimetype="text/event-stream", headers=headers(generation.model, stack)
    )
    response.headers["X-Accel-Buffering"] = "no"
    response.call_on_close(generation.close)
    return response


def format_event(value: Any, name: str = "") -> str:
    """Return one server-sent event."""
    data = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"

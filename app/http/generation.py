"""Generate the replies of OpenAI's and Anthropic's routes, whole or streamed, and write streams.

Invariants: either all replies of a request start or none. An error before the first piece is a
response with a status. Streams close with the response. If it ends early, what each reply has by
then is recorded, also of those that were not sent yet.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeAlias

from annotated_types import Ge, Gt, Le, Len
from flask import Response, jsonify, request

from personalpeft import PersonalPeftError, PromptTooLong, QueueFull, Reply, ServingFailed, Stream
from personalpeft.base_models.tool_calls import ReplyPart
from personalpeft.chat.reply import TokenLogprob
from personalpeft.types import ToolCall
from personalpeft_app.http.error_responses import error_formatter
from personalpeft_app.http.models import Model
from personalpeft_app.http.tools import ToolOptions
from personalpeft_app.http.validation import Body, Part

MAX_MESSAGES = 10_000
_LEAST_ROOM = 256
"""The least tokens of a reply that the end of the context shortens. Less is an error."""

Tokens: TypeAlias = Annotated[int, Ge(1), Le(1_000_000)]
Seed: TypeAlias = Annotated[int, Ge(0), Le(2**62)]
StopText: TypeAlias = Annotated[str, Len(1, 1000)]
StopTexts: TypeAlias = StopText | Annotated[list[StopText], Len(0, 16)]


class TextPart(Part):
    """A part of a message, in the formats of all three routes."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Content: TypeAlias = str | Annotated[list[TextPart], Len(0, MAX_MESSAGES)]


class GenerationBody(Body):
    """What the bodies of all routes that answer have in common."""

    model: Annotated[str, Len(1, 256)]
    temperature: Annotated[float, Ge(0), Le(2)] | None = None
    top_p: Annotated[float, Gt(0), Le(1)] | None = None
    stream: bool = False

    def sampling(
        self, max_tokens: int | None, *, stop: StopTexts | tuple[()] = (), seed: int | None = None
    ) -> dict[str, Any]:
        """Return the sampling options for ``User.stream``. Without a seed one is drawn."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": max_tokens,
            "stop": (stop,) if isinstance(stop, str) else tuple(stop),
            "seed": secrets.randbits(32) if seed is None else seed,
        }


def text_of(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class Generation:
    """The replies of one request, generated side by side. Close it, or read it to the end.

    ``how`` has the sampling options for ``User.stream``, its seed included.
    """

    def __init__(
        self,
        model: Model,
        prompts: Sequence[Any],
        how: Mapping[str, Any],
        tool_options: ToolOptions,
    ) -> None:
        self.streams: list[Stream] = []
        self._model, self._tool_options = model, tool_options
        self._num_read = 0
        self._ended = False
        gone = request.environ.get("waitress.client_disconnected", lambda: False)
        common = {
            **tool_options.options(how),
            **model.options,
            "cancelled": lambda: self._ended or gone(),
        }
        with ExitStack() as undo:
            undo.callback(self._close_streams)
            for number, prompt in enumerate(prompts):
                # Each reply of a prompt has its own seed, by which it can be repeated.
                options = {**common, "seed": how["seed"] + number}
                self.streams.append(_open_stream(model, prompt, options))
            for stream in self.streams:
                try:
                    stream.begin()
                except QueueFull as error:
                    if error.limit is None or len(prompts) <= error.limit:
                        raise
                    # The engine counts one reply at a time. So many can never wait.
                    raise QueueFull(
                        f"{len(prompts)} replies are asked for at once, and {error.limit} may wait.",
                        hint="Ask for fewer at once.",
                    ) from error
            undo.pop_all()

    def readers(self) -> Iterator[ReplyReader]:
        """Yield the reader of each reply, which waits for its first piece."""
        for stream in self.streams:
            self._num_read += 1
            yield ReplyReader(stream, self._tool_options)

    def read(self) -> list[ReplyReader]:
        """Return the readers of the whole replies. Raises as ``User.chat`` and ``ReplyReader``."""
        with closing(self):
            return [reader.finish() for reader in self.readers()]

    def metadata(self, reply: Reply) -> dict[str, Any]:
        """Return what feedback on a reply needs, for the body of a response."""
        return {
            "turn": reply.turn_id,
            "user": self._model.user.id,
            "stack": reply.stack.digest,
            "revisions": [entry.revision for entry in reply.stack.entries],
            "conversation_id": reply.conversation_id,
            "dropped_messages": reply.dropped_messages,
        }

    def response(self, body: Mapping[str, Any]) -> Response:
        """Return a whole response. Its body has the ``metadata`` of its (first) reply."""
        response = jsonify(body)
        response.headers.update(self._headers)
        return response

    def stream(self, events: Iterator[str], fault: Callable[[dict[str, Any]], str]) -> Response:
        """Return a response of server-sent events. Raises as ``sse_response``."""

        def closing_events() -> Generator[str, None, None]:
            with closing(self):
                yield from events

        return sse_response(closing_events(), fault, self._headers)

    def close(self) -> None:
        """Cancel the replies that are unfinished, and record what each has by then."""
        self._ended = True
        with ExitStack() as streams:
            streams.callback(self._close_streams)
            # Closing a stream that nobody has read records nothing. The engine ends it in a step.
            for stream in self.streams[self._num_read :]:
                with suppress(PersonalPeftError):
                    for _ in stream:
                        pass

    def _close_streams(self) -> None:
        for stream in self.streams:
            stream.close()

    @property
    def turn_id(self) -> str:
        """The id of the (first) turn. Some client libraries keep nothing but a reply's id."""
        return self.streams[0].turn_id

    @property
    def _headers(self) -> dict[str, str]:
        return {
            "X-PersonalPeft-Turn": self.turn_id,
            "X-PersonalPeft-User": self._model.user.id,
            "X-PersonalPeft-Stack": self.streams[0].stack.digest,
        }


def check_whole(reply: Reply) -> Reply:
    """Return a reply. Raises ``ServingFailed`` if the server closed during it."""
    if reply.finish_reason == "cancelled":
        raise ServingFailed("The reply was cut off.", hint="Try again.")
    return reply


def _open_stream(model: Model, prompt: Any, options: Mapping[str, Any]) -> Stream:
    """Start a reply, of fewer tokens than asked for if the context has no room for more."""
    try:
        return model.user.stream(prompt, **options)
    except PromptTooLong as error:
        # Many clients send the limit of the largest model that they know, whatever the prompt.
        room = (options["max_tokens"] or 0) - error.excess
        # Clients that drop the oldest messages do so only after an error.
        if room < _LEAST_ROOM:
            raise
        return model.user.stream(prompt, **{**options, "max_tokens": room})


class ReplyReader:
    """Reads one reply as texts and tool calls. Waits for its first piece at once.

    Attributes:
        texts: The texts so far.
        calls: The calls so far, with that of the part that was read last.
        reply: The whole reply, after the last part.
        is_cut: Whether the reply has ended at its longest length.
        letters: The characters of the tokens whose log-probs were taken.
    """

    reply: Reply

    def __init__(self, stream: Stream, tool_options: ToolOptions) -> None:
        self.texts: list[str] = []
        self.calls: list[ToolCall] = []
        self.letters = 0
        self.is_cut = False
        self._stream = stream
        self._tool_options = tool_options
        self._first = next(stream, "")
        self._tokens = 0

    def __iter__(self) -> Iterator[ReplyPart]:
        """Yield the parts.

        Raises ``ServingFailed`` if the reply was cut off, and as ``ToolOptions.check``.
        """
        pieces = chain([self._first] if self._first else [], self._stream)
        for part in self._tool_options.parts(pieces):
            if not isinstance(part, ToolCall):
                self.texts.append(part)
            elif self.calls and self._tool_options.single:
                continue
            else:
                self.calls.append(part)
            yield part
        self.reply = check_whole(self._stream.reply)
        self.is_cut = self.reply.finish_reason == "length"
        self._tool_options.check(self.reply, self.calls)

    def finish(self) -> Self:
        """Read the parts to the end. Raises as reading them."""
        for _ in self:
            pass
        return self

    def take_logprobs(self) -> Sequence[TokenLogprob]:
        """Return the log-probs of the tokens since the last call."""
        tokens = self._stream.logprobs[self._tokens :]
        self._tokens += len(tokens)
        self.letters += sum(len(token.text) for token in tokens)
        return tokens


def sse_response(
    events: Generator[str, None, None],
    fault: Callable[[dict[str, Any]], str],
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response of server-sent events, which closes them at its end.

    An error before the first event is raised here. ``fault`` formats a later one as an event.
    """
    first = next(events, "")
    format_error = error_formatter()

    def written() -> Iterator[str]:
        try:
            yield from chain([first], events)
        except Exception as error:  # noqa: BLE001 - the status is sent already
            yield fault(format_error(error))

    response = Response(written(), mimetype="text/event-stream", headers=headers)
    response.headers["X-Accel-Buffering"] = "no"
    # Also if the client disconnects before the first byte, when ``written`` has not started.
    response.call_on_close(events.close)
    return response


def format_event(value: Any, name: str = "") -> str:
    # JSON is written without line ends, so one line of data holds it.
    data = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"

"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``.

A chat uses the base's chat template and the user's rules and facts. A completion continues the
prompt as it is.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from flask import Blueprint, Response, jsonify

from personalpeft import Reply, Stream
from personalpeft.base_models.tool_calls import Said
from personalpeft.chat.reply import LikelyToken, TokenLogprob
from personalpeft.types import MAX_TOP_LOGPROBS, ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import Generation
from personalpeft_app.http.models import Models
from personalpeft_app.http.tools import ToolOptions
from personalpeft_app.http.validation import Body

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_SAMPLING = (
    "temperature",
    "top_p",
    "max_tokens",
    "stop",
    "seed",
    "n",
    "stream",
    "stream_options",
    "model",
)
# They concern billing, caching and routing, and change no reply.
IGNORED = (
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "service_tier",
)
_CHAT = (
    *(*_SAMPLING, "messages", "max_completion_tokens", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)
_NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
_CHAT_NEUTRAL = {
    **_NEUTRAL,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "store": False,
    # The former name of tools.
    "functions": [],
}
_COMPLETION_NEUTRAL = {**_NEUTRAL, "echo": False, "best_of": 1, "suffix": ""}
_MOST_REPLIES = 16
# OpenAI's default for a completion.
_COMPLETION_TOKENS = 16


def blueprint(models: Models) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("openai_chat", __name__)

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        body = validation.read_object()
        validation.check_names(body, known=_CHAT, ignored=IGNORED, neutral=_CHAT_NEUTRAL)
        length = (
            "max_tokens" if body.get("max_completion_tokens") is None else "max_completion_tokens"
        )
        how = generation.sampling(body, length=length)
        messages = generation.messages(body.get("messages"), "messages", ("text",), _ROLES)
        how["logprobs"] = validation.read_bool(body, "logprobs")
        how["top_logprobs"] = (
            validation.read_int(body, "top_logprobs", least=0, most=MAX_TOP_LOGPROBS) or 0
        )
        if how["top_logprobs"] and not how["logprobs"]:
            raise InvalidParameter("top_logprobs goes with logprobs.", "top_logprobs")
        alone = not validation.read_bool(body, "parallel_tool_calls", True)
        offer = tools.offered(
            models, body, body.get("tools"), tools.openai_choice(body), alone=alone
        )
        return _answer(
            models, body, [tools.checked(models, messages)], offer.options(how), _Chat(offer)
        )

    @routes.post("/v1/completions")
    def completion() -> Response:
        body = validation.read_object()
        known = (*_SAMPLING, "prompt", "logprobs")
        validation.check_names(body, known=known, ignored=IGNORED, neutral=_COMPLETION_NEUTRAL)
        how = generation.sampling(body)
        how["max_tokens"] = how["max_tokens"] or _COMPLETION_TOKENS
        likely = validation.read_int(body, "logprobs", least=0, most=MAX_TOP_LOGPROBS)
        how |= {"logprobs": likely is not None, "top_logprobs": likely or 0}
        prompts = validation.read_texts(body, "prompt", most=_MOST_REPLIES, longest=100_000)
        if not prompts:
            raise InvalidParameter("prompt is missing.", "prompt")
        return _answer(models, body, prompts, {**how, "template": False}, _Completion())

    return routes


class _Chat:
    """The format of a chat."""

    prefix, whole, piece = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, offer: ToolOptions) -> None:
        self.offer = offer

    def choice(self, reply: Reply, logprobs: bool) -> dict[str, Any]:
        parts = self.offer.read(reply)
        text, calls = tools.text_of(parts), tools.calls_of(parts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {
                "content": text or None,
                "tool_calls": [tools.openai_call(call) for call in calls],
            }
        finish = _finish(reply, called=bool(calls))
        return {
            "message": message,
            "logprobs": self.logprobs(reply.logprobs, 0) if logprobs else None,
            "finish_reason": finish,
        }

    def opening(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def delta(self, part: Said, number: int) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            return {"delta": {"tool_calls": [{"index": number, **tools.openai_call(part)}]}}
        return {"delta": {"content": part} if part else {}}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        return {"content": format_logprobs(tokens), "refusal": None}


class _Completion:
    """The format of a completion."""

    prefix, whole, piece = "cmpl", "text_completion", "text_completion"
    offer = ToolOptions()

    def choice(self, reply: Reply, logprobs: bool) -> dict[str, Any]:
        known = self.logprobs(reply.logprobs, 0) if logprobs else None
        return {"text": reply.text, "logprobs": known, "finish_reason": reply.finish_reason}

    def opening(self) -> dict[str, Any] | None:
        return None

    def delta(self, part: Said, number: int) -> dict[str, Any]:
        return {"text": part}

    def logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # Two tokens can have one text: the likelier one stays.
            "top_logprobs": [
                {other.text: other.logprob for other in reversed(each.top)} for each in tokens
            ]
            if any(each.top for each in tokens)
            else None,
            "text_offset": offsets,
        }


def _answer(
    models: Models,
    body: Body,
    prompts: Sequence[Any],
    how: dict[str, Any],
    form: _Chat | _Completion,
) -> Response:
    count = validation.read_int(body, "n", least=1, most=_MOST_REPLIES) or 1
    if count * len(prompts) > _MOST_REPLIES:
        raise InvalidParameter(f"n: at most {_MOST_REPLIES} replies can be asked for at once.", "n")
    stream = validation.read_bool(body, "stream")
    usage = _wants_usage(body, stream)
    model = models.named(generation.model_name(body))
    asked = Generation(model, [prompt for prompt in prompts for _ in range(count)], **how)
    head = {
        "id": f"{form.prefix}-{secrets.token_hex(12)}",
        "created": int(time.time()),
        "model": model.name,
    }
    if stream:
        events = _events(asked, {**head, "object": form.piece}, form, how["logprobs"], usage)
        return generation.sse_response(asked, events, generation.format_event)
    replies = asked.replies()
    choices = [
        {"index": n, **form.choice(reply, how["logprobs"])} for n, reply in enumerate(replies)
    ]
    metadata = [generation.metadata(model, reply) for reply in replies]
    response_body = {**head, "object": form.whole, "choices": choices, "usage": _usage(replies)}
    response = jsonify(
        {
            **response_body,
            "personalpeft": {**metadata[0], "turns": [each["turn"] for each in metadata]},
        }
    )
    response.headers.update(generation.headers(model, replies[0].stack.digest, replies[0].turn_id))
    return response


class _StreamCursor:
    """The position in one streamed reply."""

    def __init__(self, stream: Stream, form: _Chat | _Completion, logprobs: bool) -> None:
        self.calls: list[ToolCall] = []
        self._stream, self._form, self._logprobs = stream, form, logprobs
        # The log-probs that were sent.
        self._tokens = self._letters = 0

    def delta(self, part: Said) -> dict[str, Any]:
        """Return the next part, with the log-probs of the tokens since the last one."""
        delta = self._form.delta(part, len(self.calls))
        self.calls += tools.calls_of([part])
        if not self._logprobs:
            return delta
        tokens = self._stream.logprobs[self._tokens :]
        known = self._form.logprobs(tokens, self._letters)
        self._tokens += len(tokens)
        self._letters += sum(len(token.text) for token in tokens)
        return {**delta, "logprobs": known}


def _events(
    asked: Generation, head: dict[str, Any], form: _Chat | _Completion, logprobs: bool, usage: bool
) -> Iterator[str]:
    def chunk(number: int, choice: dict[str, Any], finish: str | None = None, **more: Any) -> str:
        made = {**head, "choices": [{"index": number, **choice, "finish_reason": finish}], **more}
        return generation.format_event({**made, "usage": None} if usage else made)

    replies = []
    for number, stream in enumerate(asked.streams):
        begun = False
        reading = form.offer.reader()
        written = _StreamCursor(stream, form, logprobs)
        for piece in stream:
            if not begun and (opening := form.opening()):
                yield chunk(number, opening)
            begun = True
            for part in reading.push(piece):
                yield chunk(number, written.delta(part))
        reply, rest = generation.read_all(stream), reading.finish()
        form.offer.check(reply, [*written.calls, *tools.calls_of(rest)])
        for part in rest:
            yield chunk(number, written.delta(part))
        replies.append(reply)
        finish = _finish(reply, called=bool(written.calls))
        yield chunk(
            number, written.delta(""), finish, personalpeft=generation.metadata(asked.model, reply)
        )
    if usage:
        yield generation.format_event({**head, "choices": [], "usage": _usage(replies)})
    yield generation.format_event("[DONE]")


def format_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log-probs in OpenAI's format."""
    return [
        {**_token(each), "top_logprobs": [_token(other) for other in each.top]} for each in tokens
    ]


def _token(known: TokenLogprob | LikelyToken) -> dict[str, Any]:
    return {"token": known.text, "logprob": known.logprob, "bytes": list(known.text.encode())}


def _finish(reply: Reply, *, called: bool) -> str:
    return "tool_calls" if called and reply.finish_reason == "stop" else reply.finish_reason


def _wants_usage(body: Body, stream: bool) -> bool:
    options = body.get("stream_options")
    if options is None:
        return False
    if not stream or not isinstance(options, dict):
        raise InvalidParameter("stream_options goes with stream.", "stream_options")
    # Obfuscation hides lengths from others on the network, which is not supported.
    validation.check_names(options, known=("include_usage",), ignored=("include_obfuscation",))
    return validation.read_bool(options, "include_usage")


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    read = sum(reply.usage.prompt_tokens for reply in replies)
    written = sum(reply.usage.completion_tokens for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

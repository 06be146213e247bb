"""OpenAI's ``/v1/chat/completions`` and ``/v1/completions``.

A chat uses the base's chat template and the user's rules and facts. A completion continues the
prompt as it is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from annotated_types import Ge, Le, Len
from flask import Blueprint, Response
from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from personalpeft import Reply
from personalpeft.base_models.tool_calls import ReplyPart
from personalpeft.chat.reply import LikelyToken, TokenLogprob
from personalpeft.types import MAX_TOP_LOGPROBS, ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import (
    MAX_MESSAGES,
    Content,
    Generation,
    GenerationBody,
    ReplyReader,
    Seed,
    StopTexts,
    Tokens,
    text_of,
)
from personalpeft_app.http.models import Models
from personalpeft_app.http.tools import ChoiceWord, NamedTool, ToolOptions
from personalpeft_app.http.validation import Body, Ignored, LongText, Part, only

MAX_REPLIES = 16
# OpenAI's default for a completion.
_COMPLETION_TOKENS = 16

TopLogprobs: TypeAlias = Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS)]


class OpenAIBody(GenerationBody):
    """What the bodies of OpenAI's routes have in common."""

    user: Ignored = None
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    service_tier: Ignored = None


class _StreamOptions(Body):
    include_usage: bool = False
    # Hiding lengths from others on the network is not supported.
    include_obfuscation: Ignored = None


class _Body(OpenAIBody):
    """What a chat and a completion have in common. Their classes have the format of the answers."""

    kind: ClassVar[str]
    event_kind: ClassVar[str]
    opening: ClassVar[Sequence[dict[str, Any]]] = ()

    seed: Seed | None = None
    stop: StopTexts = Field(default_factory=list)
    max_tokens: Tokens | None = None
    n: Annotated[int, Ge(1), Le(MAX_REPLIES)] = 1
    stream_options: _StreamOptions | None = None
    frequency_penalty: Annotated[Any, *only(0)] = 0
    presence_penalty: Annotated[Any, *only(0)] = 0
    logit_bias: Annotated[Any, *only({})] = None

    def whole(self, reader: ReplyReader) -> dict[str, Any]:
        """Return what a whole choice has of a reply."""
        raise NotImplementedError

    def delta(self, part: ReplyPart, number: int) -> dict[str, Any]:
        """Return what an event has of a part; ``number`` counts the calls."""
        raise NotImplementedError

    def token_logprobs(self, offset: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return log-probs; ``offset`` counts the characters before them."""
        raise NotImplementedError

    def answer(
        self, models: Models, prompts: Sequence[Any], how: dict[str, Any], options: ToolOptions
    ) -> Response:
        if self.n * len(prompts) > MAX_REPLIES:
            raise InvalidParameter("n", f"must lead to at most {MAX_REPLIES} replies")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "goes with stream")
        model = models.resolve(self.model)
        prompts = [prompt for prompt in prompts for _ in range(self.n)]
        batch = Generation(model, prompts, how, options)
        head = {
            "id": batch.turn_id,
            "created": int(time.time()),
            "model": model.name,
            "object": self.event_kind if self.stream else self.kind,
        }
        if self.stream:
            events = self._events(batch, head, how["logprobs"])
            return batch.stream(events, generation.format_event)
        readers = batch.read()
        replies = [reader.reply for reader in readers]
        choices = [
            {
                "index": number,
                **self.whole(reader),
                "logprobs": self.token_logprobs(0, reader.reply.logprobs)
                if how["logprobs"]
                else None,
                "finish_reason": _finish(reader),
            }
            for number, reader in enumerate(readers)
        ]
        turns = [reply.turn_id for reply in replies]
        return batch.response(
            {
                **head,
                "choices": choices,
                "usage": _usage(replies),
                "personalpeft": {**batch.metadata(replies[0]), "turns": turns},
            }
        )

    def _events(self, batch: Generation, head: dict[str, Any], logprobs: bool) -> Iterator[str]:
        usage = self.stream_options is not None and self.stream_options.include_usage

        def chunk(
            number: int, choice: dict[str, Any], finish: str | None = None, **more: Any
        ) -> str:
            made = {
                **head,
                "choices": [{"index": number, **choice, "finish_reason": finish}],
                **more,
            }
            return generation.format_event({**made, "usage": None} if usage else made)

        def delta(reader: ReplyReader, part: ReplyPart) -> dict[str, Any]:
            made = self.delta(part, len(reader.calls) - 1)
            if logprobs:
                made["logprobs"] = self.token_logprobs(reader.letters, reader.take_logprobs())
            return made

        replies = []
        for number, reader in enumerate(batch.readers()):
            for opening in self.opening:
                yield chunk(number, opening)
            for part in reader:
                yield chunk(number, delta(reader, part))
            replies.append(reader.reply)
            about = batch.metadata(reader.reply)
            yield chunk(number, delta(reader, ""), _finish(reader), personalpeft=about)
        if usage:
            yield generation.format_event({**head, "choices": [], "usage": _usage(replies)})
        yield generation.format_event("[DONE]")


class _Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    # The library checks them.
    tool_calls: list[Any] = Field(default_factory=list)
    tool_call_id: str | None = None
    # The former name of tool_calls.
    function_call: Annotated[Any, *only(None)] = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("content", "must have content or tool_calls")
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("tool_call_id", "must have a tool_call_id")
        return self

    def for_library(self) -> dict[str, Any]:
        about = {"tool_calls": self.tool_calls, "tool_call_id": self.tool_call_id}
        return {
            "role": "system" if self.role == "developer" else self.role,
            # An assistant that only calls says nothing.
            "content": text_of(self.content or ""),
            **{name: value for name, value in about.items() if value},
        }


class ChatBody(_Body):
    """The body of ``/v1/chat/completions``."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    opening = ({"delta": {"role": "assistant", "content": ""}},)

    messages: Annotated[list[_Message], Len(1, MAX_MESSAGES)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool = False
    top_logprobs: TopLogprobs = 0
    # The library checks them.
    tools: list[Any] = Field(default_factory=list)
    tool_choice: ChoiceWord | NamedTool = "auto"
    parallel_tool_calls: bool = True
    response_format: Annotated[Any, *only({"type": "text"})] = None
    modalities: Annotated[Any, *only(["text"])] = None
    store: Annotated[Any, *only(False)] = False
    # As in /v1/responses.
    truncation: Literal["auto", "disabled"] = "disabled"
    # The former name of tools.
    functions: Annotated[Any, *only([])] = None

    def whole(self, reader: ReplyReader) -> dict[str, Any]:
        text = "".join(reader.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reader.calls:
            message["content"] = text or None
            message["tool_calls"] = list(map(tools.openai_call, reader.calls))
        return {"message": message}

    def delta(self, part: ReplyPart, number: int) -> dict[str, Any]:
        if isinstance(part, ToolCall):
            return {"delta": {"tool_calls": [{"index": number, **tools.openai_call(part)}]}}
        return {"delta": {"content": part} if part else {}}

    def token_logprobs(self, offset: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {"content": format_logprobs(tokens), "refusal": None}


class CompletionBody(_Body):
    """The body of ``/v1/completions``."""

    kind = event_kind = "text_completion"

    prompt: LongText | Annotated[list[LongText], Len(1, MAX_REPLIES)]
    logprobs: TopLogprobs | None = None
    echo: Annotated[Any, *only(False)] = False
    best_of: Annotated[Any, *only(1)] = 1
    suffix: Annotated[Any, *only("")] = ""

    def whole(self, reader: ReplyReader) -> dict[str, Any]:
        return {"text": "".join(reader.texts)}

    def delta(self, part: ReplyPart, number: int) -> dict[str, Any]:
        return {"text": part}

    def token_logprobs(self, offset: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        likely = [{each.text: each.logprob for each in reversed(token.top)} for token in tokens]
        lengths = (len(token.text) for token in tokens)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            # Two tokens can have one text: the likelier one stays.
            "top_logprobs": likely if any(likely) else None,
            "text_offset": list(accumulate(lengths, initial=offset))[:-1],
        }


def blueprint(models: Models) -> Blueprint:
    routes = Blueprint("openai_chat", __name__)

    @routes.post("/v1/chat/completions")
    def chat() -> Response:
        body = validation.read_body(ChatBody)
        if body.top_logprobs and not body.logprobs:
            raise InvalidParameter("top_logprobs", "goes with logprobs")
        prompt = tools.check_calls(models, [each.for_library() for each in body.messages])
        options = tools.tool_options(
            models,
            body.tools,
            tools.openai_choice(body.tool_choice),
            single=not body.parallel_tool_calls,
        )
        how = body.sampling(
            body.max_completion_tokens or body.max_tokens, stop=body.stop, seed=body.seed
        )
        how |= {"logprobs": body.logprobs, "top_logprobs": body.top_logprobs}
        how |= {"truncation": body.truncation}
        return body.answer(models, [prompt], how, options)

    @routes.post("/v1/completions")
    def completion() -> Response:
        body = validation.read_body(CompletionBody)
        how = body.sampling(body.max_tokens or _COMPLETION_TOKENS, stop=body.stop, seed=body.seed)
        how |= {"logprobs": body.logprobs is not None, "top_logprobs": body.logprobs or 0}
        prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        return body.answer(models, prompts, {**how, "template": False}, ToolOptions())

    return routes


def format_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return log-probs in OpenAI's format."""
    return [
        {**_token(each), "top_logprobs": [_token(other) for other in each.top]} for each in tokens
    ]


def _token(known: TokenLogprob | LikelyToken) -> dict[str, Any]:
    return {"token": known.text, "logprob": known.logprob, "bytes": list(known.text.encode())}


def _finish(reader: ReplyReader) -> str:
    reason = reader.reply.finish_reason
    return "tool_calls" if reader.calls and reason == "stop" else reason


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    read = sum(reply.usage.prompt_tokens for reply in replies)
    written = sum(reply.usage.completion_tokens for reply in replies)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

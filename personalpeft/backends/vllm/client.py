"""The requests to a vLLM server: list models, tokenize, load and unload a stack, complete a prompt.

Invariants: prompts are sent as tokens, so that the server's chat template and tokenizer decide
nothing. The server's prefix cache is separate for each salt.

``prompt_logprobs`` are never requested. With them, vLLM 0.32 on a CPU exits when its batch has
other sequences with LoRA.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.sampler import TokenLogprobs
from personalpeft.backends.sequence import SequenceState, Tokens
from personalpeft.backends.vllm.transport import Response, Transport
from personalpeft.errors import ServingFailed
from personalpeft.types import FinishReason

_OK, _NOT_FOUND = 200, 404
# Otherwise they come from the model's generation_config.json, and change replies silently.
_NEUTRAL_SAMPLING = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_UNLOAD_SECONDS = 5.0
_VALID_TOKENS = range(2**31)
_MAX_LORAS = re.compile(r'^vllm:lora_requests_info\{[^}]*max_lora="(\d+)"', re.MULTILINE)


class UnknownModel(Exception):
    """The server has no stack of this name (any more). Never raised to other packages."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that the server lists: a base, or a loaded stack. The length is for bases only."""

    name: str
    is_base: bool
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class CompletionChunk:
    """Tokens of a reply, with their log-probs if asked for, and why the server ended it."""

    tokens: Tokens
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None


class VllmClient:
    """Names are those of loaded stacks, or what the server calls its bare base."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def list_models(self) -> list[ServedModel]:
        """Return all models of the server. Raises ``ServingFailed``."""
        response = await self.transport.request("GET", "/v1/models")
        try:
            return [
                ServedModel(
                    str(each["id"]), not each.get("parent"), int(each.get("max_model_len") or 0)
                )
                for each in response.data["data"]
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise ServingFailed(
                f"The server at {self.transport.server.url} lists no models: {response.message}",
                hint="PERSONALPEFT_VLLM_URL must be the address of vLLM's OpenAI server.",
            ) from error

    async def tokenize(self, model: str, text: str) -> Tokens | None:
        """Return a text in the server's tokens; None if a gateway does not pass this on."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        response = await self.transport.request("POST", "/tokenize", body, required=False)
        tokens = response.data.get("tokens") if isinstance(response.data, dict) else None
        return tuple(tokens) if isinstance(tokens, list) else None

    async def read_max_loras(self) -> int | None:
        """Return how many stacks one batch of the server can use.

        None if the server does not tell, as before its first reply.
        """
        response = await self.transport.request("GET", "/metrics", required=False)
        found = _MAX_LORAS.search(response.text)
        return int(found[1]) if found else None

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a stack from a folder as the server sees it. A loaded name stays what it is.

        Raises ``ServingFailed``.
        """
        body = {"lora_name": name, "lora_path": path}
        response = await self.transport.request("POST", "/v1/load_lora_adapter", body)
        if response.status != _OK and "already been loaded" not in response.message:
            raise _load_error(response)

    async def unload_adapter(self, name: str) -> None:
        """Unload a name. It need not be loaded. Try once.

        Raises ``ServingFailed``; ``Unreachable`` if the server, and all that it had, is gone.
        """
        response = await self.transport.request(
            "POST",
            "/v1/unload_lora_adapter",
            {"lora_name": name},
            retry_seconds=0,
            timeout=_UNLOAD_SECONDS,
        )
        if response.status not in (_OK, _NOT_FOUND):
            raise _refused(response)

    async def stream_completion(
        self, sequence: SequenceState, name: str, salt: str, stop_tokens: Sequence[int]
    ) -> AsyncGenerator[CompletionChunk]:
        """Yield the reply to a sequence as it comes.

        Args:
            sequence: The prompt and sampling.
            name: The model that replies.
            salt: The key of the server's prefix cache.
            stop_tokens: The tokens that end the reply.

        Raises:
            UnknownModel: The server has no such name. Raised before the first chunk.
            ServingFailed: The server failed.
        """
        sampling, top = sequence.request.sampling, sequence.request.top_logprobs
        body: dict[str, Any] = {
            "model": name,
            "prompt": list(sequence.prompt_tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            **_NEUTRAL_SAMPLING,
            "stop_token_ids": list(stop_tokens),
            "add_special_tokens": False,
            "cache_salt": salt,
            "stream": True,
            "return_token_ids": True,
        }
        if sequence.logprobs:
            body |= {"logprobs": top, "return_tokens_as_token_ids": True}
        async with self.transport.stream_events("/v1/completions", body) as events:
            if isinstance(events, Response):
                raise _completion_error(events)
            async for event in events:
                if "error" in event:
                    # Never UnknownModel here: chunks were sent, so a retry would repeat them.
                    raise _refused(Response(0, "", event))
                for choice in event.get("choices", ()):
                    yield _parse_chunk(choice, sequence)


def _parse_chunk(choice: Mapping[str, Any], sequence: SequenceState) -> CompletionChunk:
    try:
        tokens = tuple(choice.get("token_ids") or ())
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.logprobs and tokens:
            data = choice["logprobs"]
            tops = data.get("top_logprobs") or [None] * len(tokens)
            logprobs = tuple(
                TokenLogprobs(float(logprob), _parse_top(top or {}, sequence.request.top_logprobs))
                for logprob, top in zip(data["token_logprobs"], tops, strict=True)
            )
        if not all(token in _VALID_TOKENS for token in tokens) or (
            sequence.logprobs and len(logprobs) != len(tokens)
        ):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServingFailed(
            "vLLM sent a chunk that cannot be read.", hint="Use vLLM 0.10 or newer."
        ) from error
    match choice.get("finish_reason"):
        case None | "stop" | "length" as finish:
            return CompletionChunk(tokens, logprobs, finish)
        case other:
            raise ServingFailed(
                f"vLLM aborted a reply: {other!a}.", hint="Try again; its log may have the reason."
            )


def _parse_top(top: Mapping[str, float], count: int) -> tuple[tuple[int, float], ...]:
    # The picked token is always among them, one too many where it is not likely.
    pairs = [(int(token.removeprefix("token_id:")), logprob) for token, logprob in top.items()]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])


def _completion_error(response: Response) -> Exception:
    message = response.message
    if response.status == _NOT_FOUND and "does not exist" in message:
        return UnknownModel(message)
    if "could not be loaded" in message:
        hint = "See its log. Most often its --max-lora-rank is smaller than the stack's rank."
        return ServingFailed(f"vLLM could not load the stack: {message}", hint=hint)
    return _refused(response)


def _refused(response: Response) -> ServingFailed:
    return ServingFailed(
        f"vLLM refused the request: {response.message}", hint="Its log may have more."
    )


def _load_error(response: Response) -> ServingFailed:
    """Return the error for a refused load. Only its message tells which option is missing."""
    message, what, hint = response.message, "could not load the stack", "Its log may have more."
    if response.status == _NOT_FOUND and "adapter" not in message.casefold():
        what = "does not allow stacks to be loaded at run time"
        hint = "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora."
    elif "max_lora_rank" in message:
        what = "has no room for a stack of this rank"
        hint = "Start it with a larger --max-lora-rank, or roll a layer back."
    elif "not enabled" in message.casefold() or "enable_lora" in message:
        what, hint = "serves no LoRA", "Start it with --enable-lora."
    elif any(w in message for w in ("No adapter found", "does not exist", "No such file")):
        what = "does not see the stack's folder"
        hint = (
            "Share one folder: set PERSONALPEFT_VLLM_FOLDER to its path here, and "
            "PERSONALPEFT_VLLM_FOLDER_THERE to its path on the server."
        )
    return ServingFailed(f"The vLLM server {what}: {message}", hint=hint)

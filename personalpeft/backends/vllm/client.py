"""What a vLLM server can be asked, in its own words: which bases and stacks it knows, to load and forget a stack, and to
write. Everything here is a question over the wire; nothing is kept.

It is not asked how likely given text is (``prompt_logprobs``): on a processor, vLLM 0.32 ends itself over that where its batch has
other rows with LoRA.

Invariants: prompts travel as tokens, never as text, so that the server's chat template and tokenizer decide nothing; what the
server keeps of a prompt's beginning it finds again only under the same salt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.backends.base import Row, Tokens
from personalpeft.backends.sequence_output import Known
from personalpeft.backends.vllm.transport import Answer, Wire
from personalpeft.errors import PersonalPeftError, ServingFailed
from personalpeft.types import FinishReason

_OK, _NOT_FOUND = 200, 404
_UNCHANGED = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
_FORGET_SECONDS = 5.0
# Tokens are numbers of this size everywhere.
_TOKENS = range(2**31)


class UnknownName(Exception):
    """The server knows no stack of this name (any more). Never leaves this folder."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A model that the server lists: a base, or a stack that was loaded. ``longest`` is in tokens, of bases."""

    name: str
    is_base: bool
    longest: int | None


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens of a reply, each with what is known of it where that was asked for; ``finish`` where the server ends it."""

    tokens: Tokens
    known: tuple[Known, ...] = ()
    finish: FinishReason | None = None


class Server:
    """Names are those under which stacks were loaded, or what the server calls its bare base."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def listed(self) -> list[Listed]:
        """All models that it lists. Raises ``ServingFailed``."""
        answer = await self._wire.ask("GET", "/v1/models")
        try:
            models = answer.data["data"]
            return [
                Listed(str(each["id"]), not each.get("parent"), int(each.get("max_model_len") or 0))
                for each in models
            ]
        except (TypeError, KeyError, ValueError) as error:
            raise ServingFailed(
                f"What listens at {self._wire.server.url} lists no models: {answer.message}",
                hint="PERSONALPEFT_VLLM_URL is the address of vLLM's OpenAI server.",
            ) from error

    async def load(self, name: str, path: str) -> None:
        """Has it load a stack from a folder, as it sees it. A name that it has already stays what it is. Raises
        ``ServingFailed``.
        """
        answer = await self._wire.ask(
            "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}
        )
        if answer.status != _OK and "already been loaded" not in answer.message:
            raise _not_loaded(answer)

    async def forget(self, name: str) -> None:
        """Has it forget a name, which it need not know. Tries once. Raises ``ServingFailed``, of which ``Unreachable`` says that it
        knows nothing any more.
        """
        body = {"lora_name": name}
        answer = await self._wire.ask(
            "POST", "/v1/unload_lora_adapter", body, patience=0, timeout=_FORGET_SECONDS
        )
        if answer.status not in (_OK, _NOT_FOUND):
            raise _failed(answer)

    async def write(
        self, row: Row, name: str | None, salt: str, stop_tokens: Sequence[int]
    ) -> AsyncGenerator[Written]:
        """The reply to a row, as it comes. Raises ``UnknownName`` before the first piece, ``ServingFailed``."""
        sampling = row.sampling
        body: dict[str, Any] = {
            "model": name,
            "prompt": list(row.tokens),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": sampling.seed,
            # What is not said here comes from the model's generation_config.json, and would change replies without a word.
            **_UNCHANGED,
            "stop_token_ids": list(stop_tokens),
            "add_special_tokens": False,
            "cache_salt": salt,
            "stream": True,
            "return_token_ids": True,
        }
        if row.logprobs:
            body |= {"logprobs": row.top, "return_tokens_as_token_ids": True}
        async with self._wire.events("/v1/completions", body) as events:
            if isinstance(events, Answer):
                raise _refused(events)
            async for event in events:
                if "error" in event:
                    # Whatever it is: something may have been said already, so it must not be asked for again.
                    raise _failed(Answer(0, "", event))
                for choice in event.get("choices", ()):
                    yield _written(choice, row)


def _written(choice: Mapping[str, Any], row: Row) -> Written:
    """What an event says, looked at before anybody relies on it. Raises ``ServingFailed``."""
    try:
        tokens = tuple(choice.get("token_ids") or ())
        known: tuple[Known, ...] = ()
        if row.logprobs and tokens:
            said = choice["logprobs"]
            tops = said.get("top_logprobs") or [None] * len(tokens)
            known = tuple(
                Known(float(logprob), _likeliest(top or {}, row.top))
                for logprob, top in zip(said["token_logprobs"], tops, strict=True)
            )
        if not all(token in _TOKENS for token in tokens) or (
            row.logprobs and len(known) != len(tokens)
        ):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ServingFailed(
            "vLLM sent a piece of a reply that is none.", hint="Use vLLM 0.10 or newer."
        ) from error
    match choice.get("finish_reason"):
        case None:
            return Written(tokens, known)
        case "stop" | "length" as finish:
            return Written(tokens, known, finish)
        case other:
            raise ServingFailed(
                f"vLLM gave a reply up: {other!a}.", hint="Try again; its log may say why."
            )


def _likeliest(top: Mapping[str, float], count: int) -> tuple[tuple[int, float], ...]:
    """The token that was picked comes with them, and is one too many where it is not likely."""
    pairs = [(int(token.removeprefix("token_id:")), logprob) for token, logprob in top.items()]
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])


def _refused(answer: Answer) -> Exception:
    if answer.status == _NOT_FOUND and "does not exist" in answer.message:
        return UnknownName(answer.message)
    if "could not be loaded" in answer.message:
        return ServingFailed(
            f"vLLM found the stack and could not load it: {answer.message}",
            hint="Its log says why; most often its --max-lora-rank is smaller than the stack's.",
        )
    return _failed(answer)


def _failed(answer: Answer) -> ServingFailed:
    return ServingFailed(
        f"vLLM refused the request: {answer.message}", hint="Its log may say more."
    )


def _not_loaded(answer: Answer) -> PersonalPeftError:
    """What a refusal to load means: each is one option of the server, which only its message tells apart."""
    said = answer.message
    if answer.status == _NOT_FOUND and "adapter" not in said.casefold():
        return ServingFailed(
            "The vLLM server takes no stacks while it runs.",
            hint="Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora.",
        )
    if "max_lora_rank" in said:
        return ServingFailed(
            f"The vLLM server has no room for a stack of this rank: {said}",
            hint="Start it with a larger --max-lora-rank, or roll a layer back.",
        )
    if "not enabled" in said.casefold() or "enable_lora" in said:
        return ServingFailed("The vLLM server serves no LoRA.", hint="Start it with --enable-lora.")
    if "No adapter found" in said or "does not exist" in said or "No such file" in said:
        return ServingFailed(
            f"The vLLM server does not see the stack's folder: {said}",
            hint="Let both see one folder: PERSONALPEFT_VLLM_FOLDER is where it is here, PERSONALPEFT_VLLM_FOLDER_THERE where it is there.",
        )
    return ServingFailed(
        f"The vLLM server could not load the stack: {said}", hint="Its log may say more."
    )

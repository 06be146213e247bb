"""What may be asked: prompts and the numbers beside them, checked before anything is loaded or changed."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast, get_args

from personalpeft.errors import InvalidInput
from personalpeft.types import Message, Role, Sampling

Prompt: TypeAlias = str | Sequence[Mapping[str, str] | Message]

LONGEST_WRITTEN = 100_000
_ROLES: tuple[str, ...] = get_args(Role)


def check_prompt(prompt: Prompt) -> tuple[Message, ...]:
    """A string or OpenAI-style messages as messages, of which the last asks something. Raises ``InvalidInput``."""
    if isinstance(prompt, str):
        return (Message("user", check_written(prompt, what="prompt")),)
    if not isinstance(prompt, list | tuple) or not prompt:
        raise InvalidInput("The prompt is empty.", hint="Give a string, or a list of messages with role and content.")
    messages = tuple(_message(number, given) for number, given in enumerate(prompt, 1))
    if messages[-1].role != "user":
        raise InvalidInput(f"The last message is the {messages[-1].role}'s.", hint="End with a message of the user.")
    check_written(messages[-1].content, what="prompt")
    return messages


def check_written(text: object, *, what: str) -> str:
    """A text as it is, if it says something and is storable. Raises ``InvalidInput``."""
    if not isinstance(text, str):
        raise InvalidInput(f"The {what} is not text but {type(text).__name__}.", hint="Give a string.")
    if all(unicodedata.category(character)[0] in "CZ" for character in text):
        raise InvalidInput(f"The {what} is empty.", hint="Say something in it.")
    if len(text) > LONGEST_WRITTEN:
        raise InvalidInput(
            f"The {what} has {len(text)} characters; at most {LONGEST_WRITTEN} are taken.", hint="Shorten it."
        )
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise InvalidInput(f"The {what} holds characters that are not text.", hint="Send plain text.")
    return text


def check_sampling(
    default: Sampling,
    *,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    stop: Sequence[str],
    seed: int,
) -> Sampling:
    """The card's defaults with what was asked for in their place. Raises ``InvalidInput`` for a number out of range."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple):
        raise InvalidInput(f"stop cannot be {stop!r}.", hint="Give a list of texts that are not empty.")
    sampling = Sampling(
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
        max_tokens=default.max_tokens if max_tokens is None else max_tokens,
        seed=seed,
        stop=tuple(stop) or default.stop,
    )
    for name, value, fits, allowed in (
        ("temperature", sampling.temperature, lambda v: _is_number(v) and 0 <= v <= 10, "a number from 0 to 10"),
        ("top_p", sampling.top_p, lambda v: _is_number(v) and 0 < v <= 1, "a number above 0, at most 1"),
        ("max_tokens", sampling.max_tokens, lambda v: _is_whole(v) and v >= 1, "a whole number above 0"),
        ("seed", sampling.seed, lambda v: _is_whole(v) and 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1"),
        (
            "stop",
            sampling.stop,
            lambda v: all(isinstance(s, str) and s for s in v),
            "a list of texts that are not empty",
        ),
    ):
        if not fits(value):
            raise InvalidInput(f"{name} cannot be {value!r}.", hint=f"Give {allowed}.")
    return sampling


def check_timeout(seconds: float | None) -> float | None:
    """How long a reply may take. Raises ``InvalidInput``."""
    if seconds is not None and not (_is_number(seconds) and 0 < seconds < float("inf")):
        raise InvalidInput(f"timeout cannot be {seconds!r}.", hint="Give seconds above 0, or nothing for no limit.")
    return seconds


def _message(number: int, given: object) -> Message:
    said = given if isinstance(given, Mapping) else {}
    role, content = (
        (given.role, given.content) if isinstance(given, Message) else (said.get("role"), said.get("content"))
    )
    if role not in _ROLES or not isinstance(content, str):
        raise InvalidInput(
            f"Message {number} has no role and content that can be used.",
            hint=f"Each message is {{'role': one of {', '.join(_ROLES)}, 'content': text}}.",
        )
    if content:
        check_written(content + ".", what=f"content of message {number}")
    return Message(cast(Role, role), content)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)

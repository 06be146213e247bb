"""Bodies and queries of the API, and its answers where the library has no value for them.

A body or query has the parameters of the library's method of the same name, with its defaults.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from inspect import Parameter, getdoc, signature
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Len
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import PydanticCustomError

from personalpeft.chat.compare import BlindAnswer
from personalpeft.chat.reply import Reply, TokenLogprob
from personalpeft.chat.validation import MAX_TEXT_LENGTH, MAX_TOOLS, Truncation
from personalpeft.deprecation import RenamedAttributes
from personalpeft.erasure import ForgetReport
from personalpeft.errors import InvalidId, InvalidInput, NotFound, PersonalPeftError
from personalpeft.former_names import START
from personalpeft.ids import LAYER_NAME, SKILL_NAME, SOURCE, TOOL_NAME, USER_ID
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.memory.items import MAX_ITEM_LENGTH
from personalpeft.rebase import RebaseReport
from personalpeft.types import MAX_TOP_LOGPROBS, Json, Message, Scope, Stack
from personalpeft_app.http.api_v1.serialization import RequestModel

T = TypeVar("T")


def _name(
    pattern: str, max_length: int, error: type[PersonalPeftError] = NotFound, min_length: int = 1
) -> tuple[Any, ...]:
    """Return the constraints of a name. Another text raises ``error``."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            message = f"must be {min_length} to {max_length} characters that match {pattern}"
            raise PydanticCustomError(error.__name__, "{message}", {"message": message}) from None

    constraints = StringConstraints(
        min_length=min_length, max_length=max_length, pattern=f"^(?:{pattern})$"
    )
    return constraints, WrapValidator(check)


def _plain_text(value: str) -> str:
    if "\0" in value:
        raise PydanticCustomError("plain_text", "must be plain text, without NUL")
    return value


def _whole_number(value: Any) -> Any:
    """Return 1.0 as 1: JSON has one sort of numbers. Python counts true as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("whole_number", "must be a whole number")
    return int(value) if isinstance(value, float) and value.is_integer() else value


PlainText: TypeAlias = Annotated[str, AfterValidator(_plain_text)]
_WHOLE = BeforeValidator(_whole_number)

UserId: TypeAlias = Annotated[str, *_name(USER_ID.pattern, 64, InvalidId)]
LayerName: TypeAlias = Annotated[str, *_name(LAYER_NAME.pattern, 38, InvalidId)]
SkillName: TypeAlias = Annotated[str, *_name(SKILL_NAME.pattern, 32, InvalidInput)]
SourceName: TypeAlias = Annotated[str, *_name(SOURCE.pattern, 32, InvalidId)]
ToolName: TypeAlias = Annotated[str, *_name(TOOL_NAME.pattern, 64, InvalidInput)]
LedgerId: TypeAlias = Annotated[str, *_name("[a-z0-9_]+", 64)]
ForgetItem: TypeAlias = Annotated[str, *_name("[a-z0-9._-]+", 64)]
ServerId: TypeAlias = Annotated[str, *_name("[a-z]+_[a-z0-9]+", 64)]
RevisionName: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128)]
Sha256: TypeAlias = Annotated[str, *_name("[0-9a-f]+", 64, min_length=64)]
PublishedFile: TypeAlias = Annotated[
    str, *_name("adapter_config[.]json|adapter_model[.]safetensors", 64)
]
BaseName: TypeAlias = Annotated[str, *_name("[A-Za-z0-9][A-Za-z0-9._-]*", 64)]
PluginName: TypeAlias = Annotated[str, *_name("[A-Za-z0-9._-]+", 64)]
Cursor: TypeAlias = Annotated[str, *_name("[a-z0-9@._-]+", 128, InvalidInput)]

LongText: TypeAlias = Annotated[PlainText, Len(1, MAX_TEXT_LENGTH)]
ShortText: TypeAlias = Annotated[PlainText, Len(1, MAX_ITEM_LENGTH)]
Prompt: TypeAlias = LongText | Annotated[tuple[Message, ...], Len(1, 1000)]
Positive: TypeAlias = Annotated[float, Gt(0), Le(1e9)]
Count: TypeAlias = Annotated[int, Ge(1), Le(1_000_000), _WHOLE]
JobKind: TypeAlias = Literal["learn", "learn_many", "practice", "forget", "rebase"]
PageSize: TypeAlias = Annotated[int, Ge(1), Le(1000), _WHOLE]
Choice: TypeAlias = (
    Annotated[Literal[1, 2], _WHOLE] | Annotated[str, *_name("[0-9a-f]+", 64, InvalidInput)]
)

FIELDS: Mapping[str, Any] = {
    "a": RevisionName,
    "answer": ShortText,
    "as_user": UserId,
    "b": RevisionName,
    "comment": ShortText,
    "conversation_id": LedgerId,
    "edit": LongText,
    "event": Literal["copied", "regenerated", "contradicted", "thanked"],
    "family": Annotated[PlainText, Len(0, 200)],
    "item": ForgetItem,
    "layer": LayerName,
    "layers": Annotated[tuple[LayerName, ...], Len(0, 100)],
    "max_memory_mb": Positive,
    "max_tokens": Count,
    "must_call": bool | ToolName,
    "prefer": LongText,
    "prompt": Prompt,
    "questions": Annotated[tuple[ShortText, ...], Len(0, 100)],
    "rating": Annotated[Literal[1, -1], _WHOLE],
    "replaces": LedgerId,
    "revision": RevisionName,
    "reward": Annotated[float, Ge(-1), Le(1)],
    "rounds": Count,
    "scope": Scope,
    "search": Annotated[PlainText, Len(0, 64)],
    "seconds": Positive,
    "seed": Annotated[int, Ge(0), Le(2**63 - 1), _WHOLE],
    "shaping": PluginName,
    "signals": Annotated[tuple[LedgerId, ...], Len(1, 1000)],
    "skill": SkillName,
    "source": SourceName,
    "start": Annotated[Start, BeforeValidator(lambda name: START.get(str(name), name))],
    "steps": Count,
    "stop": Annotated[tuple[Annotated[PlainText, Len(1, 1000)], ...], Len(0, 16)],
    "temperature": Annotated[float, Ge(0), Le(10)],
    "text": ShortText,
    "timeout": Annotated[float, Ge(0.1), Le(1e9)],
    "tools": Annotated[tuple[Json, ...], Len(0, MAX_TOOLS)],
    "top_logprobs": Annotated[int, Ge(0), Le(MAX_TOP_LOGPROBS), _WHOLE],
    "top_p": Annotated[float, Gt(0), Le(1)],
    "truncation": Truncation,
    "users": Annotated[tuple[UserId, ...], Len(0, 10_000)],
    "weight": Annotated[float, Ge(-2), Le(2)],
}
"""The type of each parameter of the library that a body or query may have. A bool needs none."""

# Former names, for one release.
_ALIASES = {
    "event": AliasChoices("event", "seen"),
    "max_memory_mb": AliasChoices("max_memory_mb", "memory"),
    "reproduce": AliasChoices("reproduce", "check_rebuild"),
}


class PageQuery(RequestModel):
    """At most ``limit`` values after ``after``, the ``next`` of the page before."""

    after: Cursor | None = None
    limit: PageSize = 100


class ActivityQuery(RequestModel):
    """A period: from ``since``, or the last ``seconds`` (one day by default), to ``until``."""

    since: datetime | None = None
    seconds: Annotated[float, Gt(0), Le(1e11)] | None = None
    until: datetime | None = None


class ChooseBody(RequestModel):
    """The better answer: 1, 2, or its name."""

    which: Choice


def request_model(
    name: str,
    method: Callable[..., Any],
    *,
    base: type[RequestModel] = RequestModel,
    without: Collection[str] = (),
    types: Mapping[str, Any] | None = None,
) -> type[RequestModel] | None:
    """Return a body or query with the parameters of a method of the library; None without any.

    Args:
        name: The name of the model.
        method: The method. Its docstring describes the fields.
        base: The model to extend.
        without: Parameters to leave out. Those without a type in ``FIELDS`` are left out too.
        types: Types in place of those in ``FIELDS``.
    """
    known, about = {**FIELDS, **(types or {})}, argument_texts(method)
    fields: dict[str, Any] = {}
    for each in signature(method).parameters.values():
        kind = known.get(each.name, bool if each.annotation in ("bool", "bool | None") else None)
        if kind is None or each.name in without or each.name in base.model_fields:
            continue
        default = ... if each.default is Parameter.empty else each.default
        fields[each.name] = (
            kind | None if default is None else kind,
            Field(
                default,
                description=about.get(each.name),
                validation_alias=_ALIASES.get(each.name),
            ),
        )
    text = f"The arguments of ``{method.__qualname__}``."
    return create_model(name, __base__=base, __doc__=text, **fields) if fields else None


def argument_texts(method: Callable[..., Any]) -> Mapping[str, str]:
    """Return what the docstring of a method says of each argument."""
    found: dict[str, str] = {}
    names: Sequence[str] = ()
    _, _, text = (getdoc(method) or "").partition("\nArgs:\n")
    for line in text.partition("\n\n")[0].splitlines():
        if entry := re.fullmatch(r"    (\w+(?:, \w+)*): (.*)", line):
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


# Answers


@dataclass(frozen=True, slots=True)
class ErrorDetails:
    """An error: ``kind`` is the name of its class, ``hint`` says what to do."""

    kind: str
    message: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """The body of every error response."""

    error: ErrorDetails


@dataclass(frozen=True, slots=True)
class ApiKeyInfo:
    """The user of an API key, null for an admin API key, and the title of the base."""

    user: str | None
    base: str


@dataclass(frozen=True, slots=True)
class BaseInfo:
    """The name and the title of a base, and whether it is the one that answers."""

    name: str
    title: str
    is_open: bool


@dataclass(frozen=True, slots=True)
class SignalCreated:
    """The id of the new signal."""

    signal: str


@dataclass(frozen=True, slots=True)
class SignalRecorded:
    """The id of the new signal, null if implicit feedback is off."""

    signal: str | None


@dataclass(frozen=True, slots=True)
class BlindComparison:
    """Two answers to a prompt, to choose from until the comparison expires."""

    id: str
    prompt: str
    answers: tuple[BlindAnswer, ...]
    same: bool


@dataclass(frozen=True, slots=True)
class Job(
    RenamedAttributes,
    renamed={
        "begun": "started_at",
        "ended": "ended_at",
        "forgotten": "forget_report",
        "rebased": "rebase_report",
    },
):
    """A learn, practice, forget or rebase that the server runs.

    ``progress`` is the share of ``stage`` that is done, 0 to 1. At the end there is a report or an
    ``error``. A learn of several users has ``users`` and, in the same order, ``reports``; its
    ``user`` is null.
    """

    id: str
    user: str | None
    kind: JobKind
    state: Literal["running", "stopping", "done", "failed", "cancelled"]
    stage: str
    progress: float
    started_at: datetime
    ended_at: datetime | None = None
    report: LearnReport | None = None
    forget_report: ForgetReport | None = None
    error: ErrorDetails | None = None
    users: tuple[str, ...] = ()
    reports: tuple[LearnReport, ...] = ()
    rebase_report: RebaseReport | None = None

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended_at is not None


@dataclass(frozen=True, slots=True)
class StreamStarted:
    """The first event of a streamed reply.

    Attributes:
        stream: Its name, to stop it by.
        stack: The adapters that serve it.
        prompt_tokens: Tokens that the model reads first, with rules, facts and examples.
    """

    stream: str
    stack: Stack
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StreamText:
    """A piece of the text of a reply, and the log-probs of its tokens, if requested."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamFinished:
    """The last event of a streamed reply: the whole reply."""

    reply: Reply


@dataclass(frozen=True, slots=True)
class StreamStopped:
    """Whether the stream existed."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list. ``next`` is the ``after`` of the next page, null on the last."""

    items: tuple[T, ...]
    next: str | None = None

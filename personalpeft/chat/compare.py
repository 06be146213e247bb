"""Compare two revisions blind: both answer a prompt as in a chat, and the user picks one answer.

A choice is recorded as a preference. Its turn holds the rejected answer and the stack that gave it.
Its signal holds the chosen text and revision. So ``why`` stays true. The ledger is unchanged until
the user has chosen.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from personalpeft.chat.request import (
    augment_prompt,
    check_tool_support,
    stack_with_revision,
)
from personalpeft.chat.validation import Prompt, check_prompt, check_sampling
from personalpeft.engine.engine import Request
from personalpeft.errors import Cancelled, InvalidInput, PromptTooLong
from personalpeft.feedback import review_probation, training_payload
from personalpeft.formatting import to_json
from personalpeft.learning.report import excerpt
from personalpeft.memory.types import AugmentedPrompt
from personalpeft.services import Services
from personalpeft.stacks import BASE, resolve_revision
from personalpeft.types import FinishReason, Message, Sampling, SignalKind, Stack, Usage

_COLUMN = 46


@dataclass(frozen=True, slots=True)
class Answer:
    """One of two answers. Hide ``revision`` (or "base") until the user has chosen.

    ``used``: the ids of the rules, facts and examples in its prompt.
    """

    text: str
    revision: str
    stack: Stack
    usage: Usage
    finish_reason: FinishReason
    used: tuple[str, ...]

    @property
    def name(self) -> str:
        """A name that does not reveal the revision: 8 hex digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class BlindAnswer:
    """One of two answers, without its revision."""

    number: int
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class LabeledComparison:
    """A recorded choice: the chosen and the other revision, and the turn and signal of it."""

    chosen: str
    other: str
    turn: str
    signal: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers in random order, until ``choose`` is called."""

    prompt: str
    answers: tuple[Answer, Answer]
    record_preference: Callable[[Answer, Answer], LabeledComparison]

    @property
    def same(self) -> bool:
        """Whether both answers have the same text."""
        return self.answers[0].text == self.answers[1].text

    def choose(self, which: int | str) -> LabeledComparison:
        """Record that one answer is better: 1, 2 or its name. Each call records a preference.

        Raises ``InvalidInput`` if there is no such answer, if both are the same or the chosen one
        is empty. Raises ``Forgotten`` if the user has forgotten something since the comparison.
        """
        first, second = self.answers
        index = {1: 0, 2: 1, "1": 0, "2": 1, first.name: 0, second.name: 1}
        if self.same:
            raise InvalidInput("Both answers are the same.", hint="Try another prompt.")
        if not isinstance(which, int | str) or isinstance(which, bool) or which not in index:
            raise InvalidInput(
                f"The choice must be an answer of this comparison, got {which!a}.",
                hint=f"Choose 1, 2, {first.name} or {second.name}.",
            )
        chosen, other = self.answers[index[which]], self.answers[1 - index[which]]
        if not chosen.text.strip():
            raise InvalidInput("An empty answer cannot be preferred.", hint="Choose the other one.")
        return self.record_preference(chosen, other)

    @property
    def blind_answers(self) -> tuple[BlindAnswer, ...]:
        """The answers without their revisions."""
        return tuple(BlindAnswer(n, each.name, each.text) for n, each in enumerate(self.answers, 1))

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain data, without the revisions."""
        answers = to_json(self.blind_answers)
        return {"prompt": self.prompt, "answers": answers, "same": self.same}

    def __str__(self) -> str:
        columns = [
            [f"{number} ({answer.name})", *_wrap(answer.text)]
            for number, answer in enumerate(self.answers, 1)
        ]
        rows = (
            f"{left:<{_COLUMN}} | {right}".rstrip()
            for left, right in zip_longest(*columns, fillvalue="")
        )
        return "\n".join([f"> {excerpt(self.prompt, 80)}", "", *rows])


def _wrap(text: str) -> list[str]:
    wrapped = (
        textwrap.wrap(line, _COLUMN, drop_whitespace=False) or [""]
        for line in text.expandtabs(4).splitlines()
    )
    return [line.rstrip() for lines in wrapped for line in lines]


def compare(
    services: Services,
    user: str,
    prompt: Prompt,
    names: tuple[str, str],
    *,
    layer: str,
    max_tokens: int | None,
    memory: bool,
    cancelled: Callable[[], bool] | None,
) -> Comparison:
    """Implement ``User.compare``, which documents the arguments. ``names`` are ``a`` and ``b``."""
    messages = check_prompt(prompt)
    check_tool_support(services, messages)
    erasure_mark = services.store.ledger.erasure_mark(user)
    revisions = [resolve_revision(services, user, layer, name) for name in names]
    if revisions[0] == revisions[1]:
        raise InvalidInput(
            f"Both sides are {revisions[0] or 'the bare base'}.", hint="Name another revision."
        )
    engine = services.engine
    default = engine.backend.base.card.sampling
    sampling = check_sampling(default, temperature=0, max_tokens=max_tokens)
    requests, used = [], []
    for revision in revisions:
        stack = stack_with_revision(services, user, messages, layer, revision)
        augmented = AugmentedPrompt(messages, ())
        if memory:
            augmented = _augment_prompt(services, user, messages, stack, sampling)
        requests.append(Request(user, augmented.messages, stack, sampling))
        used.append(augmented.item_ids)
    replies = engine.stream(requests, cancelled=cancelled).read()
    if any(reply.finish == "cancelled" for reply in replies):
        raise Cancelled("The comparison was cancelled.", hint="Nothing was recorded; start again.")
    first, second = (
        Answer(
            reply.text,
            revision or BASE,
            request.stack,
            Usage(len(reply.prompt), len(reply.tokens)),
            reply.finish,
            item_ids,
        )
        for revision, request, item_ids, reply in zip(
            revisions, requests, used, replies, strict=True
        )
    )
    if services.clock.entropy(1)[0] & 1:
        first, second = second, first

    def record_preference(chosen: Answer, other: Answer) -> LabeledComparison:
        # One transaction: no kill leaves a turn without its preference.
        with services.store.database.write_transaction():
            turn = services.store.ledger.add_turn(
                user,
                messages=messages,
                reply=other.text,
                stack=other.stack,
                sampling=sampling,
                usage=other.usage,
                finish_reason=other.finish_reason,
                used=other.used,
                erasure_mark=erasure_mark,
                conversation_id="",
                backend=engine.backend.name,
                backend_reason=services.model.choice().reason,
            )
            payload: dict[str, object] = {
                "text": chosen.text,
                "revision": chosen.revision,
                "layer": layer,
                **training_payload(services, user, None),
            }
            if chosen.finish_reason != "stop":
                payload["cut_off"] = True
            signal = services.store.ledger.add_signal(
                user, SignalKind.PREFERENCE, payload, turn=turn.id, erasure_mark=erasure_mark
            )
        review_probation(services, user)
        return LabeledComparison(chosen.revision, other.revision, turn.id, signal.id)

    return Comparison(messages[-1].content, (first, second), record_preference)


def _augment_prompt(
    services: Services, user: str, messages: tuple[Message, ...], stack: Stack, sampling: Sampling
) -> AugmentedPrompt:
    """Return the prompt as a chat has it: with examples, if they fit into the context."""
    prompt = augment_prompt(services, user, messages, stack)
    try:
        services.engine.tokenize(Request(user, prompt.messages, stack, sampling))
    except PromptTooLong:
        return augment_prompt(services, user, messages, stack, with_examples=False)
    return prompt

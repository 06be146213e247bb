"""Two revisions answer the same prompt, and a person says which answer is better without knowing whose it is.

A choice is a preference like any other: the turn is that of the answer that was not chosen, with the stack that gave it,
and the signal holds the text that was, with the revision that it is from. So ``why`` stays true, and nothing is in the
ledger before somebody has chosen.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from personalpeft.chat.request import answering_with, check_heard, recall
from personalpeft.chat.validation import Prompt, check_prompt, check_sampling
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled, InvalidInput
from personalpeft.feedback import look
from personalpeft.learning.report import excerpt
from personalpeft.services import Services
from personalpeft.stacks import BASE, revision_named
from personalpeft.types import FinishReason, Message, Sampling, SignalKind, Stack, Usage

_COLUMN = 46


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the two: ``revision`` (or "base") is what to keep hidden until somebody has chosen."""

    text: str
    revision: str
    stack: Stack
    usage: Usage
    finish_reason: FinishReason

    @property
    def name(self) -> str:
        """Names the answer without saying whose it is: the beginning of its text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class Choice:
    """What became of a comparison: whose answer was chosen, whose was not, and the turn and the signal that keep it."""

    chosen: str
    other: str
    turn: str
    signal: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers in an order drawn by chance, until ``choose`` is called."""

    prompt: str
    answers: tuple[Answer, Answer]
    keep: Callable[[Answer, Answer], Choice]

    @property
    def same(self) -> bool:
        """Whether there is nothing to choose between."""
        return self.answers[0].text == self.answers[1].text

    def choose(self, which: int | str) -> Choice:
        """Keeps that an answer is better than the other: the first (1), the second (2), or one by its name. Each call is
        another preference. Raises ``InvalidInput`` for none of the two, for two that say the same, for an empty one, and
        ``Forgotten`` where the user has forgotten something since they were compared.
        """
        names = {1: 0, 2: 1, "1": 0, "2": 1, self.answers[0].name: 0, self.answers[1].name: 1}
        if self.same:
            raise InvalidInput(
                "Both answers are the same.", hint="There is nothing to choose; try another prompt."
            )
        if not isinstance(which, int | str) or isinstance(which, bool) or which not in names:
            known = ", ".join(answer.name for answer in self.answers)
            raise InvalidInput(
                f"There is no answer {which!a} here.", hint=f"Choose 1, 2, or one of {known}."
            )
        chosen, other = self.answers[names[which]], self.answers[1 - names[which]]
        if not chosen.text.strip():
            raise InvalidInput(
                "An empty answer cannot be preferred.", hint="Choose the other one, or neither."
            )
        return self.keep(chosen, other)

    def as_json(self) -> dict[str, object]:
        """The comparison as plain data, blind: it does not say whose the answers are."""
        answers = [
            {"number": n, "name": each.name, "text": each.text}
            for n, each in enumerate(self.answers, 1)
        ]
        return {"prompt": self.prompt, "answers": answers, "same": self.same}

    def __str__(self) -> str:
        sides = [
            [f"{number} ({answer.name})", *_in_column(answer.text)]
            for number, answer in enumerate(self.answers, 1)
        ]
        rows = (
            f"{left:<{_COLUMN}} | {right}".rstrip()
            for left, right in zip_longest(*sides, fillvalue="")
        )
        return "\n".join([f"> {excerpt(self.prompt, 80)}", "", *rows])


def _in_column(text: str) -> list[str]:
    wrapped = (
        textwrap.wrap(line, _COLUMN, drop_whitespace=False) or [""]
        for line in text.expandtabs(4).splitlines()
    )
    return [part.rstrip() for parts in wrapped for part in parts]


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
    """As ``User.compare``."""
    messages = check_prompt(prompt)
    check_heard(services, messages)
    removed = services.store.ledger.count_removed(user)
    revisions = [revision_named(services, user, layer, name) for name in names]
    if revisions[0] == revisions[1]:
        raise InvalidInput(
            f"Both are {revisions[0] or 'the bare base'}.", hint="Name another revision."
        )
    engine = services.engine
    sampling = check_sampling(
        engine.backend.base.card.sampling,
        temperature=0,
        top_p=None,
        max_tokens=max_tokens,
        stop=(),
        seed=0,
    )
    # Both hear the same, so what one of them may know by heart is looked up for both.
    bare = Stack(services.base.digest)
    heard, used = recall(services, user, messages, bare) if memory else (messages, ())
    sides = [
        (revision or BASE, answering_with(services, user, messages, layer, revision))
        for revision in revisions
    ]
    first, second = _answers(engine, user, heard, sides, sampling, cancelled)
    if services.clock.entropy(1)[0] & 1:
        first, second = second, first

    def keep(chosen: Answer, other: Answer) -> Choice:
        turn = services.store.ledger.add_turn(
            user,
            messages=messages,
            reply=other.text,
            stack=other.stack,
            sampling=sampling,
            usage=other.usage,
            finish_reason=other.finish_reason,
            used=used,
            removed=removed,
        )
        said: dict[str, object] = {"text": chosen.text, "revision": chosen.revision, "layer": layer}
        if chosen.finish_reason != "stop":
            said["cut_off"] = True
        signal = services.store.ledger.add_signal(
            user, SignalKind.PREFERENCE, said, turn=turn.id, removed=removed
        )
        look(services, user)
        return Choice(chosen.revision, other.revision, turn.id, signal.id)

    return Comparison(messages[-1].content, (first, second), keep)


def _answers(
    engine: Engine,
    user: str,
    messages: Sequence[Message],
    sides: Sequence[tuple[str, Stack]],
    sampling: Sampling,
    cancelled: Callable[[], bool] | None,
) -> list[Answer]:
    """What each side says, in one batch. Raises as ``Engine.replies``, and ``Cancelled``."""
    requests = [Request(user, tuple(messages), stack, sampling) for _, stack in sides]
    prompt_tokens = [len(engine.tokens(request)) for request in requests]
    texts, written, ended = [""] * len(sides), [0] * len(sides), dict[int, FinishReason]()
    replies = engine.replies(requests, cancelled=cancelled)
    try:
        for piece in replies:
            texts[piece.row] += piece.text
            written[piece.row] += len(piece.tokens)
            if piece.finish is not None:
                ended[piece.row] = piece.finish
    finally:
        replies.close()
    if "cancelled" in ended.values():
        raise Cancelled("Stopped before both had answered.", hint="Nothing was kept; ask again.")
    return [
        Answer(texts[i], revision, stack, Usage(prompt_tokens[i], written[i]), ended[i])
        for i, (revision, stack) in enumerate(sides)
    ]

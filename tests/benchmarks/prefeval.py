"""``bench prefeval``: does a base choose the answer that follows a preference?

Each of PrefEval's multiple-choice questions has four options. The first follows the preference. The
option with the highest mean log-prob a token counts as chosen. It is scored as the assistant's next
words after these messages. They are in the base's template, with its card's system message:

- ``without``: user: the question
- ``said``: user: the preference; assistant: "I will keep that in mind."; user: the question
- ``rule``: our rules block in the system message, with the preference as a comment; user: the
  question

Options are scored without an end of turn, each by itself. The caller names a folder with the data
(amazon-science/PrefEval, CC BY-NC 4.0). None of it is stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import personalpeft
from benchmarks.homes import temporary_folder
from personalpeft.backends.base import Backend, Continuation
from personalpeft.clock import SYSTEM
from personalpeft.errors import InvalidInput
from personalpeft.memory.embedder import HashEmbedder
from personalpeft.memory.items import Memory
from personalpeft.store.home import open_store
from personalpeft.store.store import Store
from personalpeft.types import Message, Progress, SignalKind

_OPTIONS = 4
_HEARD = "I will keep that in mind."
_BUDGET_SHARE = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """One question; the first option follows the preference."""

    preference: str
    question: str
    options: tuple[str, ...]


Way: TypeAlias = Callable[[Choice], Sequence[Message]]


def bench_prefeval(folder: Path, *, base: str, backend: str, progress: Progress) -> dict[str, Any]:
    """Score all questions of all topics (the folder's ``.json`` files).

    ``accuracy`` is the share of questions whose first option is the likeliest, by way and topic;
    "all" is of all questions.

    Raises:
        InvalidInput: The files are something else.
    """
    topics = _topics(folder)
    with ExitStack() as ends:
        home = ends.enter_context(temporary_folder())
        runtime = ends.enter_context(
            personalpeft.open(home / "model", base, backend, progress=progress)
        )
        model = runtime.engine().backend
        store = ends.enter_context(
            closing(open_store(home / "rules", now=SYSTEM.now, entropy=SYSTEM.entropy))
        )
        ways: Mapping[str, Way] = {
            "without": _without,
            "said": _prompt_of,
            "rule": _Ruled(store, model),
        }
        right = {
            way: {
                topic: _right(model, messages, choices, partial(progress, f"{topic}, {way}"))
                for topic, choices in topics.items()
            }
            for way, messages in ways.items()
        }
    asked = {topic: len(choices) for topic, choices in topics.items()}
    accuracy = {
        way: {
            **{topic: round(count / asked[topic], 3) for topic, count in counts.items()},
            "all": round(sum(counts.values()) / sum(asked.values()), 3),
        }
        for way, counts in right.items()
    }
    return {"bench": "prefeval", "base": base, "asked": asked, "accuracy": accuracy}


def _right(
    model: Backend, way: Way, choices: Sequence[Choice], progress: Callable[[float], None]
) -> int:
    """Return how often the first option is the likeliest."""
    right = 0
    for number, choice in enumerate(choices, 1):
        prompt = model.render(way(choice))
        scores = model.score(
            [Continuation(prompt, model.encode(option)) for option in choice.options], None
        )
        right += scores[0].logp > max(score.logp for score in scores[1:])
        progress(number / len(choices))
    return right


def _without(choice: Choice) -> Sequence[Message]:
    return (Message("user", choice.question),)


def _prompt_of(choice: Choice) -> Sequence[Message]:
    return (
        Message("user", choice.preference),
        Message("assistant", _HEARD),
        Message("user", choice.question),
    )


class _Ruled:
    """Builds the messages of a new user for each question, with the preference as a comment."""

    def __init__(self, store: Store, model: Backend) -> None:
        self._store = store
        # Rules are always in the prompt, so no text is ever embedded.
        self._memory = Memory(self._store.ledger, self._store.catalog, HashEmbedder())
        self._model, self._users = model, 0

    def __call__(self, choice: Choice) -> Sequence[Message]:
        self._users += 1
        user = f"asked-{self._users}"
        self._store.catalog.ensure_user(user)
        self._store.ledger.add_signal(user, SignalKind.COMMENT, {"text": choice.preference})
        card = self._model.base.card
        return self._memory.add_to_prompt(
            user,
            (Message("user", choice.question),),
            budget_tokens=card.context // _BUDGET_SHARE,
            count_tokens=lambda text: len(self._model.encode(text)),
            system=card.system,
        ).messages


def _topics(folder: Path) -> dict[str, tuple[Choice, ...]]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInput(
            f"{folder} has no .json file.",
            hint="Name the folder with PrefEval's multiple-choice topics.",
        )
    return {file.stem: _choices(file) for file in files}


def _choices(file: Path) -> tuple[Choice, ...]:
    try:
        choices = tuple(
            Choice(
                str(each["preference"]),
                str(each["question"]),
                tuple(each["classification_task_options"]),
            )
            for each in json.loads(file.read_text("utf-8"))
        )
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"{file} is no topic of PrefEval's multiple choice.", hint="Leave other files out."
        ) from error
    if not choices or any(len(each.options) != _OPTIONS for each in choices):
        raise InvalidInput(
            f"{file} has questions without {_OPTIONS} options.", hint="Leave other files out."
        )
    return choices

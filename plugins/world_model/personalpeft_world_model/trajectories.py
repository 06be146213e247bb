"""Trajectories, the demonstrations that they teach, and their JSONL form.

A line of JSONL is a chat (arXiv 2512.18832). The system message is the task. Each message of the
user is an action, each of the assistant the next state. The last one ends with ``[SUCCESS]`` or
``[FAILURE]``. The first action is ``reset``, which shows the first state.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from personalpeft import InvalidInput, file_system
from personalpeft.sandbox import Limits, run_reader
from personalpeft.types import Demonstration, Message
from personalpeft_world_model.environment import State

RESET = "reset"
_LARGEST = 1 << 30  # Bytes of a file.


@dataclass(frozen=True, slots=True)
class Transition:
    """One step: the state before an action, the action, and the state after it."""

    task: str
    before: State
    action: str
    after: State

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages that the model answers with the next state."""
        return transition_prompt(self.task, self.before, self.action)


@dataclass(frozen=True, slots=True)
class Step:
    """An action and the state after it."""

    action: str
    state: State


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One run of a policy in an environment.

    Attributes:
        environment: The name of the game. All trajectories of a game are held out together.
        task: As the environment states it.
        initial: The first state.
        steps: What was done, and what came of it.
        policy: The name of what chose the actions.
    """

    environment: str
    task: str
    initial: State
    steps: tuple[Step, ...]
    policy: str = ""

    @property
    def final(self) -> State:
        """The last state."""
        return self.steps[-1].state if self.steps else self.initial

    @property
    def transitions(self) -> tuple[Transition, ...]:
        """Each step with the state before it."""
        states = [self.initial, *(step.state for step in self.steps)]
        return tuple(
            Transition(self.task, before, step.action, step.state)
            for before, step in zip(states, self.steps, strict=False)
        )

    def to_chat(self) -> dict[str, Any]:
        """Return the trajectory as a line of JSONL holds it."""
        messages = [{"role": "system", "content": self.task}]
        for action, state in [(RESET, self.initial), *((s.action, s.state) for s in self.steps)]:
            messages.append({"role": "user", "content": action})
            messages.append({"role": "assistant", "content": state.written})
        return {"environment": self.environment, "policy": self.policy, "messages": messages}

    @staticmethod
    def from_chat(chat: Mapping[str, Any]) -> Trajectory:
        """Return a chat as a trajectory. Raises ``ValueError`` for one that is none."""
        system, *turns = [(each["role"], each["content"]) for each in chat["messages"]]
        roles = [role for role, _ in turns]
        if system[0] != "system" or roles != ["user", "assistant"] * (len(turns) // 2):
            raise ValueError("the messages must be system, then user and assistant by turns")
        if not all(isinstance(text, str) for _, text in (system, *turns)):
            raise ValueError("each message must have a text")
        steps = [
            Step(action, State.read(state))
            for (_, action), (_, state) in zip(turns[::2], turns[1::2], strict=True)
        ]
        first, *rest = steps or [Step(RESET, State(""))]
        initial, rest = (first.state, rest) if first.action == RESET else (State(""), steps)
        name = str(chat.get("environment", system[1]))
        return Trajectory(name, system[1], initial, tuple(rest), str(chat.get("policy", "")))


def transition_prompt(task: str, before: State, action: str) -> tuple[Message, ...]:
    """Return the messages that the model answers with the state after an action."""
    return Message("system", task), Message("user", f"{before.text}\n> {action}")


def demonstrations(
    trajectories: Iterable[Trajectory], known: Iterable[tuple[str, ...]] = ()
) -> Iterator[Demonstration]:
    """Yield a demonstration for each different state and action, grouped by environment.

    Where an action has several outcomes, the most frequent one is demonstrated.

    ``known``: the texts of the prompts and of the answer of demonstrations that exist already.
    """
    prompts: dict[tuple[str, ...], tuple[tuple[Message, ...], str]] = {}
    answers: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for trajectory in trajectories:
        for transition in trajectory.transitions:
            texts = tuple(message.content for message in transition.prompt)
            prompts.setdefault(texts, (transition.prompt, trajectory.environment))
            answers[texts][transition.after.written] += 1
    taught = set(known)
    for texts, (prompt, environment) in prompts.items():
        ((answer, _),) = answers[texts].most_common(1)
        if (*texts, answer) not in taught:
            yield Demonstration(prompt, answer, environment)


def write_jsonl(path: Path, trajectories: Iterable[Trajectory]) -> int:
    """Write trajectories to a new file, a line each, and return how many.

    The file appears when all are written, so a recording that was stopped can be started again.

    Raises ``InvalidInput`` if the file exists or cannot be written.
    """
    count = 0
    try:
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with TemporaryDirectory(prefix=".personalpeft-", dir=path.parent) as folder:
            part = Path(folder, path.name)
            with part.open("w", encoding="utf-8") as file:
                for trajectory in trajectories:
                    file.write(json.dumps(trajectory.to_chat(), ensure_ascii=False) + "\n")
                    count += 1
            file_system.replace(part, path)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be written: {error.strerror}.", hint="Name a file that does not exist."
        ) from error
    return count


def read_jsonl(path: Path) -> tuple[Trajectory, ...]:
    """Return the trajectories of a file. A child process with limits reads it first.

    Raises ``InvalidInput`` that names a wrong line.
    """
    data = _read(path)
    run_reader(
        f"{__name__}:check_trajectories",
        {"source": str(path)},
        Limits.for_files(len(data), memory_factor=64, bytes_a_second=1 << 20),
        source=str(path),
        error=InvalidInput,
        data=data,
    )
    return _parse(data, str(path))


def check_trajectories(source: str, data: bytes) -> Mapping[str, str]:
    """Read trajectories in a child of ``personalpeft.sandbox``."""
    _parse(data, source)
    return {}


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise InvalidInput(
            f"{path} cannot be read: {error.strerror}.", hint="Check the path."
        ) from error
    if len(data) > _LARGEST:
        raise InvalidInput(
            f"{path} has more than {_LARGEST} bytes.", hint="Split it into several files."
        )
    return data


def _parse(data: bytes, source: str) -> tuple[Trajectory, ...]:
    try:
        # Some editors begin a file with a mark. Texts may hold other line breaks than "\n".
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{source} is not UTF-8 text.", hint="Name a file of JSONL.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(Trajectory.from_chat(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InvalidInput(
                f"Line {number} of {source} is no trajectory: {error}.",
                hint='Give {"messages": [system, user, assistant, ...]} on each line.',
            ) from error
    return tuple(found)

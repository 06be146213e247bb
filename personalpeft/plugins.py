"""What others may add from outside: verifiers, which set tasks and judge what a model tried, and shapings of rewards.

A plugin is a distribution of its own that imports only this package and declares an entry point. In the group
``personalpeft.verifiers`` it names something to call with a family (text, "" where none was asked for) that gives a
``Verifier``; in ``personalpeft.shapings`` something to call without arguments that gives a ``Shaping``. What ships comes
in through the same door. Both can also be given as objects.

Invariants: nothing of a plugin is imported before it is asked for by name; what it gives back is checked; whatever it
raises leaves as a ``PluginError`` that names it, but for this package's own errors, which pass.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar, runtime_checkable

from personalpeft.errors import NotFound, PersonalPeftError, PluginError, suggest_nearest
from personalpeft.types import Json

VERIFIERS = "personalpeft.verifiers"
SHAPINGS = "personalpeft.shapings"
RIGHT = "right"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to try: ``id`` names it among the tasks of its verifier and family, ``prompt`` is what the model is
    asked, ``about`` is plain data that the verifier needs to judge a reply.
    """

    id: str
    prompt: str
    about: Json


@runtime_checkable
class Verifier(Protocol):
    """Sets tasks, and says how good a reply to one is. Neither may depend on time or chance."""

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Up to ``count`` tasks; fewer where there are no more. The same seed gives the same tasks."""
        ...

    def verify(self, task: Task, reply: str) -> float | Mapping[str, float]:
        """How good a reply is, from 0 to 1, where 1 is right; or several such numbers by name, one called "right"."""
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reply of a group that answers the same task: how right it was, whether that counts as passed, and its length as
    a share (0 to 1) of the longest that is allowed.
    """

    reward: float
    passed: bool
    length: float


@runtime_checkable
class Shaping(Protocol):
    """Turns how right the replies of a group were into what they are to be rewarded with."""

    @property
    def train_on_solved(self) -> bool:
        """Whether solved tasks are sampled too, because the shaped rewards of their replies differ."""
        ...

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Sequence[float]:
        """One finite reward for each attempt of a group of which a share of ``pass_rate`` (0 to 1) passed. Equal rewards
        for all mean that there is nothing to learn from the group.
        """
        ...


@runtime_checkable
class _EarlierShaping(Protocol):
    """A ``Shaping`` with the name that ``train_on_solved`` had; accepted for one release."""

    @property
    def mastered(self) -> bool: ...

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plugins that may be loaded: all that are installed, or only those whose names are ``allowed``."""

    allowed: tuple[str, ...] | None = None

    def names(self, group: str) -> tuple[str, ...]:
        """What there is in a group and may be loaded, by name."""
        found = {entry.name for entry in entry_points(group=group)}
        return tuple(sorted(found if self.allowed is None else found & set(self.allowed)))

    def verifier(self, given: str | Verifier, family: str = "") -> CheckedVerifier:
        """A verifier by name, made for a family; or the one that is given. Raises ``NotFound``, ``PluginError``."""
        if isinstance(given, str):
            made = self._made(VERIFIERS, "verifier", given, lambda factory: factory(family))
            return CheckedVerifier(given, family, _resolve_name(made, Verifier, "verifier", given))
        return CheckedVerifier(
            _name_of(given), family, _resolve_name(given, Verifier, "verifier", _name_of(given))
        )

    def shaping(self, given: str | Shaping) -> CheckedRewardShaper:
        """A shaping by name, or the one that is given. Raises ``NotFound``, ``PluginError``."""
        if isinstance(given, str):
            made = self._made(SHAPINGS, "shaping", given, lambda factory: factory())
            return CheckedRewardShaper(
                given, _resolve_name(made, Shaping | _EarlierShaping, "shaping", given)
            )
        return CheckedRewardShaper(
            _name_of(given),
            _resolve_name(given, Shaping | _EarlierShaping, "shaping", _name_of(given)),
        )

    def _made(self, group: str, kind: str, name: str, make: Callable[[Any], Any]) -> Any:
        if name not in self.names(group):
            installed = any(entry.name == name for entry in entry_points(group=group))
            hint = (
                "Name it in PERSONALPEFT_PLUGINS too, or unset that."
                if installed
                else suggest_nearest(name, self.names(group), what=f"{kind} installed")
            )
            raise NotFound(
                f"There is no {kind} called {name!a}{' that may be loaded' if installed else ''}.",
                hint=hint,
            )
        # One distribution can be found twice, by way of its source folder; two with one name are another matter.
        entries: dict[str, EntryPoint] = {
            entry.value: entry for entry in entry_points(group=group) if entry.name == name
        }
        if len(entries) > 1:
            raise PluginError(
                f"More than one {kind} is called {name}: {', '.join(sorted(entries))}.",
                hint="Uninstall all but one.",
            )
        (entry,) = entries.values()
        return _guarded(kind, name, "be loaded", lambda: make(entry.load()))


@dataclass(frozen=True, slots=True)
class CheckedVerifier:
    """A verifier whose answers are checked. ``name`` and ``family`` say in a revision's recipe which it was."""

    name: str
    family: str
    verifier: Verifier

    def tasks(self, seed: int, count: int) -> tuple[Task, ...]:
        """Different tasks, ``count`` at most. Raises ``PluginError``."""
        given = _guarded(
            "verifier", self.name, "set tasks", lambda: list(self.verifier.tasks(seed, count))
        )
        for task in given:
            if (
                not isinstance(task, Task)
                or not isinstance(task.prompt, str)
                or not task.prompt.strip()
            ):
                raise _plugin_error("verifier", self.name, f"gave {task!r:.80} for a task")
        return tuple({task.prompt: task for task in given}.values())[:count]

    def verify(self, task: Task, reply: str) -> Mapping[str, float]:
        """The rewards of a reply by name, "right" among them. Raises ``PluginError``."""
        said = _guarded(
            "verifier",
            self.name,
            f"judge a reply to {task.id}",
            lambda: self.verifier.verify(task, reply),
        )
        rewards = dict(said) if isinstance(said, Mapping) else {RIGHT: said}
        if RIGHT not in rewards or not all(
            _is_number(value) and 0 <= value <= 1 for value in rewards.values()
        ):
            raise _plugin_error(
                "verifier",
                self.name,
                f"said {said!r:.80} of a reply, which is not a number from 0 to 1",
            )
        return {name: float(value) for name, value in rewards.items()}


@dataclass(frozen=True, slots=True)
class CheckedRewardShaper:
    """A shaping whose answers are checked."""

    name: str
    shaping: Shaping | _EarlierShaping

    @property
    def train_on_solved(self) -> bool:
        """See ``Shaping.train_on_solved``."""
        if isinstance(self.shaping, Shaping):
            return bool(self.shaping.train_on_solved)
        warnings.warn("mastered is called train_on_solved now", DeprecationWarning, stacklevel=2)
        return bool(self.shaping.mastered)

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> tuple[float, ...]:
        """One reward an attempt. Raises ``PluginError``."""
        given = _guarded(
            "shaping", self.name, "shape", lambda: tuple(self.shaping.shape(attempts, pass_rate))
        )
        if len(given) != len(attempts) or not all(_is_number(value) for value in given):
            raise _plugin_error(
                "shaping", self.name, f"gave {given!r:.80} for {len(attempts)} attempts"
            )
        return tuple(float(value) for value in given)


def _guarded(kind: str, name: str, what: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except PersonalPeftError:
        raise
    except (
        Exception
    ) as error:  # whatever a plugin raises, it is said as the plugin's and not as ours
        raise PluginError(
            f"The {kind} {name} could not {what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            hint="That is a fault of the plugin, or of what it was given; nothing has changed here.",
        ) from error


def _resolve_name(made: Any, protocol: Any, kind: str, name: str) -> Any:
    if not isinstance(made, protocol):
        raise _plugin_error(
            kind, name, f"is a {type(made).__name__}, which has not all that a {kind} has"
        )
    return made


def _plugin_error(kind: str, name: str, what: str) -> PluginError:
    return PluginError(
        f"The {kind} {name} {what}.",
        hint="That is a fault of the plugin; nothing has changed here.",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _name_of(given: object) -> str:
    return f"{type(given).__module__}.{type(given).__qualname__}"

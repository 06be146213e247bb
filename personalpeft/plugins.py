"""Load plugins: verifiers, which judge replies, shapings of rewards, routes and commands.

A plugin is a distribution that declares an entry point in a group. It imports only this package, a
command ``personalpeft_app`` too.

- ``personalpeft.verifiers``: a factory that takes a family (text, may be empty) and returns a
  ``Verifier``.
- ``personalpeft.shapings``: a factory without arguments that returns a ``Shaping``.
- ``personalpeft.http``: a factory that takes an open ``Runtime`` and an ``HttpHost``, and returns an
  ``HttpExtension``.
- ``personalpeft.commands``: a ``click.Command``, which ``personalpeft NAME`` runs.
- ``personalpeft.user_data``: a function that takes a function which opens a plugin's data by name,
  and the id of a user. It returns what the plugin keeps of the user: a number for each kind.
  Certificates of erasure state it.

The plugins that ship use the same entry points. Callers may pass an object instead of a name.

Invariants: a plugin is imported only when its name is used. Its results are checked. Its exceptions
become a ``PluginError`` that names it. This package's own errors pass unchanged.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

from personalpeft.deprecation import RenamedAttributes
from personalpeft.errors import NotFound, PersonalPeftError, PluginError, suggest_nearest
from personalpeft.types import Json

VERIFIERS = "personalpeft.verifiers"
SHAPINGS = "personalpeft.shapings"
HTTP = "personalpeft.http"
COMMANDS = "personalpeft.commands"
USER_DATA = "personalpeft.user_data"
_KINDS = {
    VERIFIERS: "verifier",
    SHAPINGS: "shaping",
    HTTP: "HTTP extension",
    COMMANDS: "command",
    USER_DATA: "counter",
}
RIGHT = "right"

MAX_SHAPED_REWARD = 1e6
"""The largest absolute value of a shaped reward: squares of larger ones may overflow."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Attributes:
        id: Unique among the tasks of its verifier and family.
        prompt: The question to the model.
        about: Plain data that the verifier needs to judge a reply.
    """

    id: str
    prompt: str
    about: Json


@runtime_checkable
class Verifier(Protocol):
    """Sets tasks and judges replies. Neither may depend on time or chance."""

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Return up to ``count`` tasks. The same seed gives the same tasks."""
        ...

    def verify(self, task: Task, reply: str) -> float | Mapping[str, float]:
        """Return a reward from 0 to 1, where 1 is right, or several by name, one called "right".

        The names are the same for every reply.
        """
        ...


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reply of a group that answers the same task.

    Attributes:
        reward: The reward, from 0 to 1.
        passed: Whether the reward counts as solved.
        length: The length as a share (0 to 1) of the longest that is allowed.
    """

    reward: float
    passed: bool
    length: float


@runtime_checkable
class Shaping(Protocol):
    """Computes the rewards to train on from the rewards of a group's replies."""

    @property
    def train_on_solved(self) -> bool:
        """Whether solved tasks are sampled too, because shaped rewards of their replies differ."""
        ...

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Sequence[float]:
        """Return one reward for each attempt, from -1e6 to 1e6. Equal ones have no effect.

        Args:
            attempts: The replies of one group.
            pass_rate: The share (0 to 1) of them that passed.
        """
        ...


@runtime_checkable
class _EarlierShaping(Protocol):
    """A ``Shaping`` with the former name of ``train_on_solved``. Accepted for one release."""

    @property
    def mastered(self) -> bool: ...

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class HttpHost(RenamedAttributes, renamed={"token": "api_key_id"}):
    """What the HTTP server offers to an extension. Views need an API key unless marked ``public``.

    Attributes:
        api_key_id: Returns the id of the API key of the current request.
        user: Returns the user of that API key; None for an administrator.
        public: Marks a view that needs no API key.
        large_body: Marks a view whose body may be as large as a file.
    """

    api_key_id: Callable[[], str]
    user: Callable[[], str | None]
    public: Callable[[Any], Any]
    large_body: Callable[[Any], Any]


@runtime_checkable
class HttpExtension(Protocol):
    """Routes beside those of the HTTP server."""

    @property
    def blueprint(self) -> Any:
        """The routes, a ``flask.Blueprint``."""
        ...

    def close(self) -> None:
        """Stop before the runtime is closed. Closing twice is allowed."""
        ...


@dataclass(frozen=True, slots=True)
class Plugins:
    """Loads plugins: all that are installed, or only the ``allowed`` names."""

    allowed: tuple[str, ...] | None = None

    def names(self, group: str) -> tuple[str, ...]:
        """Return the names in a group that may be loaded."""
        names = {entry.name for entry in entry_points(group=group)}
        return tuple(sorted(names if self.allowed is None else names & set(self.allowed)))

    def check_allowed(self) -> tuple[str, ...]:
        """Return the names of all plugins that may be loaded.

        Raises ``NotFound`` for an allowed name that no plugin has.
        """
        names = sorted({name for group in _KINDS for name in self.names(group)})
        for name in self.allowed or ():
            if name not in names:
                installed = {each for group in _KINDS for each in Plugins().names(group)}
                raise NotFound(
                    f"There is no plugin called {name!a}, which PERSONALPEFT_PLUGINS names.",
                    hint=suggest_nearest(name, sorted(installed), what="plugin"),
                )
        return tuple(names)

    def verifier(self, verifier: str | Verifier, family: str = "") -> CheckedVerifier:
        """Return a verifier, loaded and created for a family if it is given by its name.

        Raises:
            NotFound: No plugin of this name may be loaded.
            PluginError: It cannot be loaded, or is no verifier.
        """
        name, loaded = self._resolve(VERIFIERS, verifier, Verifier, lambda factory: factory(family))
        return CheckedVerifier(name, family, loaded, is_named=isinstance(verifier, str))

    def shaping(self, shaping: str | Shaping) -> CheckedRewardShaper:
        """Return a shaping, loaded if it is given by its name. Raises as ``verifier``."""
        name, loaded = self._resolve(
            SHAPINGS, shaping, Shaping | _EarlierShaping, lambda factory: factory()
        )
        return CheckedRewardShaper(name, loaded)

    def http_extension(self, name: str, runtime: Any, host: HttpHost) -> HttpExtension:
        """Return the routes of a plugin. ``Runtime.http_extension`` documents the arguments."""
        _, loaded = self._resolve(HTTP, name, HttpExtension, lambda factory: factory(runtime, host))
        return cast(HttpExtension, loaded)

    def command(self, name: str) -> Any:
        """Return the object that a command's name stands for. Raises as ``verifier``."""
        return self._load(COMMANDS, name, lambda command: command)

    def count_user_data(
        self, open_data: Callable[[str], Any], user: str
    ) -> Mapping[str, Mapping[str, int] | None]:
        """Return how much each plugin keeps of a user, by plugin and kind.

        None stands for a plugin that fails. Plugins that keep nothing are left out.

        ``open_data`` is ``Runtime.plugin_data``.
        """
        found: dict[str, Mapping[str, int] | None] = {}
        for name in self.names(USER_DATA):
            try:
                counts = self._load(USER_DATA, name, lambda count: count(open_data, user))
                found[name] = {str(kind): int(number) for kind, number in counts.items() if number}
            except (PersonalPeftError, AttributeError, TypeError, ValueError):
                found[name] = None
        return {name: counts for name, counts in found.items() if counts != {}}

    def _resolve(
        self, group: str, plugin: Any, protocol: Any, create: Callable[[Any], Any]
    ) -> tuple[str, Any]:
        """Return a plugin's name and the plugin, loaded if it is given by its name."""
        kind = _KINDS[group]
        if isinstance(plugin, str):
            name, plugin = plugin, self._load(group, plugin, create)
        else:
            name = f"{type(plugin).__module__}.{type(plugin).__qualname__}"
        # Python 3.11 reads the properties of a plugin for this.
        if not _call_plugin(kind, name, "be used", lambda: isinstance(plugin, protocol)):
            raise _plugin_error(
                kind, name, f"is a {type(plugin).__name__} and lacks a part of a {kind}"
            )
        return name, plugin

    def _load(self, group: str, name: str, create: Callable[[Any], Any]) -> Any:
        kind = _KINDS[group]
        if name not in self.names(group):
            hint = suggest_nearest(name, self.names(group), what=f"{kind} installed")
            if self.allowed is not None:
                hint += " PERSONALPEFT_PLUGINS must name it, or be unset."
            raise NotFound(f"There is no {kind} called {name!a} that may be loaded.", hint=hint)
        # A distribution may be listed twice, through its source folder. Two values are two plugins.
        entries = {entry.value: entry for entry in entry_points(group=group) if entry.name == name}
        if len(entries) > 1:
            raise PluginError(
                f"More than one {kind} is called {name}: {', '.join(sorted(entries))}.",
                hint="Uninstall all but one.",
            )
        (entry,) = entries.values()
        return _call_plugin(kind, name, "be loaded", lambda: create(entry.load()))


@dataclass(frozen=True, slots=True)
class CheckedVerifier:
    """A verifier with checked results. A revision stores ``name`` and ``family``.

    ``is_named``: whether it was given by its name, so that it can be loaded again.
    """

    name: str
    family: str
    verifier: Verifier
    is_named: bool = False

    def tasks(self, seed: int, count: int) -> tuple[Task, ...]:
        """Return distinct tasks, at most ``count``. Raises ``PluginError``."""
        tasks = _call_plugin(
            "verifier", self.name, "set tasks", lambda: list(self.verifier.tasks(seed, count))
        )
        for task in tasks:
            if not (isinstance(task, Task) and _is_text(task.id) and _is_text(task.prompt)):
                raise _plugin_error("verifier", self.name, f"returned {task!r:.80} as a task")
        different = tuple({task.prompt: task for task in tasks}.values())[:count]
        if len({task.id for task in different}) < len(different):
            raise _plugin_error("verifier", self.name, "returned two tasks with the same id")
        return different

    def verify(self, task: Task, reply: str) -> Mapping[str, float]:
        """Return the rewards of a reply by name, "right" among them. Raises ``PluginError``."""
        result = _call_plugin(
            "verifier",
            self.name,
            f"judge a reply to {task.id}",
            lambda: self.verifier.verify(task, reply),
        )
        rewards = dict(result) if isinstance(result, Mapping) else {RIGHT: result}
        if RIGHT not in rewards or not all(
            isinstance(value, int | float) and 0 <= value <= 1 for value in rewards.values()
        ):
            raise _plugin_error(
                "verifier",
                self.name,
                f"returned {result!r:.80} for a reply; a number from 0 to 1 is needed",
            )
        return {name: float(value) for name, value in rewards.items()}


@dataclass(frozen=True, slots=True)
class CheckedRewardShaper:
    """A shaping with checked results."""

    name: str
    shaping: Shaping | _EarlierShaping

    @property
    def train_on_solved(self) -> bool:
        """See ``Shaping.train_on_solved``."""
        return _call_plugin("shaping", self.name, "say train_on_solved", self._train_on_solved)

    def _train_on_solved(self) -> bool:
        if isinstance(self.shaping, Shaping):
            return bool(self.shaping.train_on_solved)
        warnings.warn("mastered is called train_on_solved now", DeprecationWarning, stacklevel=3)
        return bool(self.shaping.mastered)

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> tuple[float, ...]:
        """Return one reward for each attempt. Raises ``PluginError``."""
        rewards = _call_plugin(
            "shaping", self.name, "shape", lambda: tuple(self.shaping.shape(attempts, pass_rate))
        )
        if len(rewards) != len(attempts) or not all(
            isinstance(value, int | float) and abs(value) <= MAX_SHAPED_REWARD for value in rewards
        ):
            raise _plugin_error(
                "shaping", self.name, f"returned {rewards!r:.80} for {len(attempts)} attempts"
            )
        return tuple(float(value) for value in rewards)


def _call_plugin(kind: str, name: str, action: str, function: Callable[[], T]) -> T:
    try:
        return function()
    except PersonalPeftError:
        raise
    except (Exception, SystemExit) as error:  # A plugin may raise anything, or call exit().
        text = " ".join(str(error).split())[:200]
        raise PluginError(
            f"The {kind} {name} could not {action}: {type(error).__name__}: {text}",
            hint="Report it to the plugin's authors. Nothing was changed.",
        ) from error


def _plugin_error(kind: str, name: str, problem: str) -> PluginError:
    return PluginError(
        f"The {kind} {name} {problem}.",
        hint="Report it to the plugin's authors. Nothing was changed.",
    )


def _is_text(value: object) -> bool:
    """Return whether a value is a text that a database and a tokenizer can read, and not blank."""
    try:
        return isinstance(value, str) and bool(value.strip()) and bool(value.encode())
    except UnicodeEncodeError:
        return False

"""Plugins are found by name, loaded on use, and their errors are reported without a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from personalpeft import InvalidInput, NotFound, PluginError
from personalpeft import plugins as house
from personalpeft.plugins import (
    HTTP,
    SHAPINGS,
    USER_DATA,
    VERIFIERS,
    Attempt,
    HttpHost,
    Plugins,
    Task,
)
from personalpeft.settings import resolve

TASK = Task("one", "Say yes.", {})


class FixedVerifier:
    """Returns the same tasks and the same value at each call."""

    def __init__(self, family: str = "", value: Any = 1.0, tasks: Any = (TASK, TASK)) -> None:
        self.family, self.value, self.given = family, value, tasks

    def tasks(self, seed: int, count: int) -> Any:
        return self.given

    def verify(self, task: Task, reply: str) -> Any:
        return self.value() if callable(self.value) else self.value


class ConstantShaper:
    """Gives each attempt the same reward."""

    mastered = False

    def __init__(self, given: Any = None) -> None:
        self.given = given

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Any:
        return [0.5] * len(attempts) if self.given is None else self.given


class NotAPlugin:
    """Has no method of a plugin."""


def broken(*args: object) -> Any:
    raise RuntimeError("the model of the weather\nis down")


def private(family: str) -> Any:
    raise InvalidInput("There is no such family.", hint="Try another.")


def count_cards(open_data: Callable[[str], Any], user: str) -> Any:
    return {"cards": 2, "letters": 0} if user == "ada" else {}


Declare = Callable[..., None]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Declare entry points of this module, as installed distributions would."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(
        house, "entry_points", lambda group: [each for each in entries if each.group == group]
    )

    def add(name: str, what: str, group: str = VERIFIERS) -> None:
        entries.append(EntryPoint(name, f"{__name__}:{what}", group))

    return add


def test_plugin_is_found_by_name_and_created_for_its_family(declare: Declare) -> None:
    declare("yes", "FixedVerifier")
    declare("flat", "ConstantShaper", SHAPINGS)
    verifying = Plugins().verifier("yes", "short")
    assert (verifying.name, verifying.family) == ("yes", "short")
    assert isinstance(verifying.verifier, FixedVerifier)
    assert verifying.verifier.family == "short"
    assert Plugins().shaping("flat").shape([Attempt(1, True, 0.5)], 1.0) == (0.5,)


def test_object_is_accepted_instead_of_a_name() -> None:
    assert Plugins().verifier(FixedVerifier()).verify(TASK, "yes") == {"right": 1.0}
    assert Plugins().verifier(FixedVerifier()).name.endswith("FixedVerifier")
    assert Plugins().shaping(ConstantShaper()).name.endswith("ConstantShaper")


def test_plugins_are_loaded_on_use_and_a_broken_one_affects_no_other(
    declare: Declare,
) -> None:
    declare("gone", "nowhere.to.be.found")
    declare("yes", "FixedVerifier")
    assert Plugins().names(VERIFIERS) == ("gone", "yes")
    assert Plugins().verifier("yes").name == "yes"
    with pytest.raises(PluginError, match=r"gone.*AttributeError"):
        Plugins().verifier("gone")


def test_unknown_plugin_suggests_the_nearest(declare: Declare) -> None:
    declare("sums", "FixedVerifier")
    with pytest.raises(NotFound, match="'sum'") as missing:
        Plugins().verifier("sum")
    assert "sums" in missing.value.hint
    with pytest.raises(NotFound, match="'sums'") as missing:
        Plugins().shaping("sums")
    assert missing.value.hint


def test_environment_variable_limits_the_plugins(declare: Declare) -> None:
    declare("yes", "FixedVerifier")
    declare("no", "broken")
    plugins = Plugins(resolve(None, {"PERSONALPEFT_PLUGINS": " yes , other"}).plugins)
    assert plugins.names(VERIFIERS) == ("yes",)
    assert plugins.verifier("yes").name == "yes"
    with pytest.raises(NotFound, match="'no'") as kept_out:
        plugins.verifier("no")
    assert "PERSONALPEFT_PLUGINS" in kept_out.value.hint
    assert resolve(None, {"PERSONALPEFT_PLUGINS": ""}).plugins is None


def test_two_plugins_of_one_name_are_refused(declare: Declare) -> None:
    declare("yes", "FixedVerifier")
    declare("yes", "FixedVerifier")
    assert Plugins().verifier("yes").name == "yes"
    declare("yes", "broken")
    with pytest.raises(PluginError, match="yes") as twice:
        Plugins().verifier("yes")
    assert twice.value.hint


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            lambda: Plugins().verifier("broken"),
            "verifier broken could not be loaded: RuntimeError: the model of",
        ),
        (
            lambda: Plugins().verifier("not-one"),
            "verifier not-one is a NotAPlugin",
        ),
        (lambda: Plugins().verifier(NotAPlugin()), "NotAPlugin"),  # type: ignore[arg-type]
        (lambda: Plugins().shaping(NotAPlugin()), "NotAPlugin"),  # type: ignore[arg-type]
        (lambda: Plugins().verifier(FixedVerifier(tasks=["yes"])).tasks(1, 1), "'yes'"),
        (
            lambda: Plugins().verifier(FixedVerifier(tasks=[Task("x", " ", {})])).tasks(1, 1),
            "verifier",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(tasks=None)).tasks(1, 1),
            "could not set tasks: TypeError",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(value=broken)).verify(TASK, ""),
            "could not judge a reply to one: RuntimeError",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(value=2.0)).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(value=float("nan"))).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(value="good")).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (
            lambda: Plugins().verifier(FixedVerifier(value={"brief": 1.0})).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (lambda: Plugins().shaping(ConstantShaper([1.0])).shape([], 0.0), "for 0 attempts"),
        (
            lambda: (
                Plugins().shaping(ConstantShaper([float("inf")])).shape([Attempt(0, False, 1)], 0.0)
            ),
            "for 1 attempts",
        ),
    ],
)
def test_faulty_plugin_is_named_in_one_line(
    declare: Declare, act: Callable[[], object], words: str
) -> None:
    declare("broken", "broken")
    declare("not-one", "_not_a_plugin")
    with pytest.raises(PluginError) as raised:
        act()
    assert words in raised.value.message
    assert "\n" not in raised.value.message
    assert raised.value.hint


def _not_a_plugin(family: str) -> NotAPlugin:
    return NotAPlugin()


def test_error_of_this_package_passes_unchanged(declare: Declare) -> None:
    declare("private", "private")
    with pytest.raises(InvalidInput, match="no such family"):
        Plugins().verifier("private", "x")


def test_duplicate_tasks_count_once_and_the_number_of_tasks_is_limited() -> None:
    many = [Task(str(n), f"Say {n % 3}.", {}) for n in range(9)]
    assert Plugins().verifier(FixedVerifier()).tasks(1, 9) == (TASK,)
    assert [t.prompt for t in Plugins().verifier(FixedVerifier(tasks=many)).tasks(1, 2)] == [
        "Say 0.",
        "Say 1.",
    ]


class Routes:
    """Routes that keep what they were made with."""

    def __init__(self, runtime: object, host: HttpHost) -> None:
        self.blueprint = (runtime, host)

    def close(self) -> None: ...


def test_an_http_extension_gets_the_runtime_and_the_server(declare: Declare) -> None:
    declare("routes", "Routes", HTTP)
    declare("broken", "broken", HTTP)
    declare("wrong", "ConstantShaper", HTTP)
    host = HttpHost(str, str, str, str)
    made = Plugins().http_extension("routes", "the runtime", host)
    assert made.blueprint == ("the runtime", host)
    with pytest.warns(DeprecationWarning, match="api_key_id"):
        assert host.token is host.api_key_id  # type: ignore[attr-defined]
    with pytest.raises(NotFound, match="no HTTP extension"):
        Plugins().http_extension("routed", None, host)
    for name in ("broken", "wrong"):
        with pytest.raises(PluginError, match=name):
            Plugins().http_extension(name, None, host)


def test_plugins_say_what_they_keep_of_a_user_and_one_that_fails_hinders_nothing(
    declare: Declare,
) -> None:
    declare("cards", "count_cards", USER_DATA)
    declare("none", "broken", USER_DATA)
    declare("nothing", "NotAPlugin", USER_DATA)
    assert Plugins().count_user_data(lambda name: None, "ada") == {
        "cards": {"cards": 2},
        "none": None,
        "nothing": None,
    }
    assert Plugins(allowed=("cards",)).count_user_data(lambda name: None, "bo") == {}

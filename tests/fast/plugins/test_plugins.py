"""What plugins are promised and held to: found by name, loaded only then, and never the cause of a traceback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from personalpeft import InvalidInput, NotFound, PluginError
from personalpeft import plugins as house
from personalpeft.plugins import SHAPINGS, VERIFIERS, Attempt, Plugins, Task
from personalpeft.settings import resolve

TASK = Task("one", "Say yes.", {})


class Yes:
    """Sets the same task as often as it is asked to."""

    def __init__(self, family: str = "", said: Any = 1.0, tasks: Any = (TASK, TASK)) -> None:
        self.family, self.said, self.given = family, said, tasks

    def tasks(self, seed: int, count: int) -> Any:
        return self.given

    def verify(self, task: Task, reply: str) -> Any:
        return self.said() if callable(self.said) else self.said


class Flat:
    """Gives everybody the same."""

    mastered = False

    def __init__(self, given: Any = None) -> None:
        self.given = given

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> Any:
        return [0.5] * len(attempts) if self.given is None else self.given


class NotOne:
    """Has nothing of what a plugin has."""


def broken(*args: object) -> Any:
    raise RuntimeError("the model of the weather\nis down")


def private(family: str) -> Any:
    raise InvalidInput("There is no such family.", hint="Try another.")


Declare = Callable[..., None]


@pytest.fixture
def declare(monkeypatch: pytest.MonkeyPatch) -> Declare:
    """Declares entry points of this module, as installed distributions would."""
    entries: list[EntryPoint] = []
    monkeypatch.setattr(
        house, "entry_points", lambda group: [each for each in entries if each.group == group]
    )

    def add(name: str, what: str, group: str = VERIFIERS) -> None:
        entries.append(EntryPoint(name, f"{__name__}:{what}", group))

    return add


def test_a_plugin_is_found_by_name_and_made_for_its_family(declare: Declare) -> None:
    declare("yes", "Yes")
    declare("flat", "Flat", SHAPINGS)
    verifying = Plugins().verifier("yes", "short")
    assert (verifying.name, verifying.family) == ("yes", "short")
    assert isinstance(verifying.verifier, Yes)
    assert verifying.verifier.family == "short"
    assert Plugins().shaping("flat").shape([Attempt(1, True, 0.5)], 1.0) == (0.5,)


def test_an_object_does_as_well_as_a_name() -> None:
    assert Plugins().verifier(Yes()).verify(TASK, "yes") == {"right": 1.0}
    assert Plugins().verifier(Yes()).name.endswith("Yes")
    assert Plugins().shaping(Flat()).name.endswith("Flat")


def test_nothing_is_loaded_before_it_is_asked_for_and_one_that_cannot_be_spoils_no_other(
    declare: Declare,
) -> None:
    declare("gone", "nowhere.to.be.found")
    declare("yes", "Yes")
    assert Plugins().names(VERIFIERS) == ("gone", "yes")
    assert Plugins().verifier("yes").name == "yes"
    with pytest.raises(PluginError, match=r"gone.*AttributeError"):
        Plugins().verifier("gone")


def test_one_that_is_not_there_is_told_the_nearest(declare: Declare) -> None:
    declare("sums", "Yes")
    with pytest.raises(NotFound, match="'sum'") as missing:
        Plugins().verifier("sum")
    assert "sums" in missing.value.hint
    with pytest.raises(NotFound, match="'sums'") as missing:
        Plugins().shaping("sums")
    assert missing.value.hint


def test_the_variable_says_which_may_be_loaded(declare: Declare) -> None:
    declare("yes", "Yes")
    declare("no", "broken")
    plugins = Plugins(resolve(None, {"PERSONALPEFT_PLUGINS": " yes , other"}).plugins)
    assert plugins.names(VERIFIERS) == ("yes",)
    assert plugins.verifier("yes").name == "yes"
    with pytest.raises(NotFound, match="'no'") as kept_out:
        plugins.verifier("no")
    assert "PERSONALPEFT_PLUGINS" in kept_out.value.hint
    assert resolve(None, {"PERSONALPEFT_PLUGINS": ""}).plugins is None


def test_two_of_one_name_are_told_apart_by_nobody(declare: Declare) -> None:
    declare("yes", "Yes")
    declare("yes", "Yes")
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
            "verifier not-one is a NotOne",
        ),
        (lambda: Plugins().verifier(NotOne()), "NotOne"),  # type: ignore[arg-type]
        (lambda: Plugins().shaping(NotOne()), "NotOne"),  # type: ignore[arg-type]
        (lambda: Plugins().verifier(Yes(tasks=["yes"])).tasks(1, 1), "'yes'"),
        (lambda: Plugins().verifier(Yes(tasks=[Task("x", " ", {})])).tasks(1, 1), "verifier"),
        (lambda: Plugins().verifier(Yes(tasks=None)).tasks(1, 1), "could not set tasks: TypeError"),
        (
            lambda: Plugins().verifier(Yes(said=broken)).verify(TASK, ""),
            "could not judge a reply to one: RuntimeError",
        ),
        (lambda: Plugins().verifier(Yes(said=2.0)).verify(TASK, ""), "a number from 0 to 1"),
        (
            lambda: Plugins().verifier(Yes(said=float("nan"))).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (lambda: Plugins().verifier(Yes(said="good")).verify(TASK, ""), "a number from 0 to 1"),
        (
            lambda: Plugins().verifier(Yes(said={"brief": 1.0})).verify(TASK, ""),
            "a number from 0 to 1",
        ),
        (lambda: Plugins().shaping(Flat([1.0])).shape([], 0.0), "for 0 attempts"),
        (
            lambda: Plugins().shaping(Flat([float("inf")])).shape([Attempt(0, False, 1)], 0.0),
            "for 1 attempts",
        ),
    ],
)
def test_whatever_a_plugin_does_wrong_is_said_as_its_fault_in_one_line(
    declare: Declare, act: Callable[[], object], words: str
) -> None:
    declare("broken", "broken")
    declare("not-one", "_not_one")
    with pytest.raises(PluginError) as raised:
        act()
    assert words in raised.value.message
    assert "\n" not in raised.value.message
    assert raised.value.hint


def _not_one(family: str) -> NotOne:
    return NotOne()


def test_an_error_of_this_package_passes_as_it_is(declare: Declare) -> None:
    declare("private", "private")
    with pytest.raises(InvalidInput, match="no such family"):
        Plugins().verifier("private", "x")


def test_the_same_task_twice_counts_once_and_no_more_come_than_were_asked_for() -> None:
    many = [Task(str(n), f"Say {n % 3}.", {}) for n in range(9)]
    assert Plugins().verifier(Yes()).tasks(1, 9) == (TASK,)
    assert [t.prompt for t in Plugins().verifier(Yes(tasks=many)).tasks(1, 2)] == [
        "Say 0.",
        "Say 1.",
    ]

"""TextWorld games as environments: what is true of a game, written as a line of text.

A game file of JSON has facts and no prose. A state says ``room``, ``exits``, ``closed`` things,
``see`` and ``carry``. The task says the goal, the map, and what the first state hides. ``look``,
``inventory`` and ``examine`` show what the state says already, so they are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from personalpeft import InvalidInput, MissingPackage
from personalpeft_world_model.environment import Outcome, State

Kind: TypeAlias = Literal["coin", "cooking"]

_DIRECTIONS = ("north", "east", "south", "west")
# What food can be, in the order in which it is written before the name.
_CONDITIONS = ("burned", "fried", "grilled", "roasted", "chopped", "diced", "sliced")
_NO_EFFECT = ("look", "inventory", "examine ")
_PORTABLE = ("o", "f", "k", "meal")
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "coin": {"level": 5},
    "cooking": {
        "recipe": 1,
        "take": 1,
        "go": 1,
        "open": False,
        "cook": True,
        "cut": False,
        "drop": False,
        "split": "train",
    },
}


def make_game(kind: str, seed: int, folder: Path) -> Path:
    """Make a game, unless it is there, and return its file in the folder.

    Args:
        kind: "coin" (the coin collector, level 5) or "cooking" (one ingredient, one room).
        seed: Decides the game.
        folder: Where game files are kept.

    Raises:
        InvalidInput: The kind is unknown.
        MissingPackage: TextWorld is not installed.
    """
    if kind not in get_args(Kind):
        raise InvalidInput(
            f"There is no game {kind!a}.", hint=f"Choose one of {', '.join(get_args(Kind))}."
        )
    path = folder / f"{kind}-{seed}.json"
    if path.exists():
        return path
    textworld = _textworld()
    from textworld.challenges.tw_coin_collector import coin_collector
    from textworld.challenges.tw_cooking import cooking

    options = textworld.GameOptions()
    options.seeds = seed
    if kind == "cooking":
        game = cooking.make({**_SETTINGS[kind], "recipe_seed": seed}, options)
    else:
        game = coin_collector.make(dict(_SETTINGS[kind]), options)
    folder.mkdir(parents=True, exist_ok=True)
    game.save(str(path))
    return path


class TextWorldGame:
    """One game file of TextWorld, in JSON, from ``make_game`` or TextWorld's own tools.

    Args:
        path: The file. Its name without suffix is the name of the environment.

    Raises:
        MissingPackage: TextWorld is not installed.
        InvalidInput: The file is no game.
    """

    def __init__(self, path: Path) -> None:
        textworld = _textworld()
        wanted = dict.fromkeys(
            ("admissible_commands", "facts", "won", "lost", "game", "policy_commands"), True
        )
        self.name = path.stem
        try:
            self._game = textworld.start(str(path), textworld.EnvInfos(**wanted))
            first = self._game.reset()
        except (OSError, ValueError, KeyError) as error:
            raise InvalidInput(
                f"{path} is no game of TextWorld: {error}.", hint="Give a game file of JSON."
            ) from error
        self.task = _describe_task(first)

    def reset(self) -> State:
        """Begin anew, and return the first state."""
        return _read_state(self._game.reset())

    def step(self, action: str) -> State:
        """Do an action, and return the next state. An action that is not possible does nothing."""
        state, _, _ = self._game.step(action)
        return _read_state(state)


def _textworld() -> Any:
    try:
        import textworld
    except ImportError as error:
        raise MissingPackage(
            "Its games need the package textworld.",
            hint="pip install 'personalpeft-world-model[textworld]'",
        ) from error
    return textworld


class _Facts:
    """The facts of a state: by predicate, the names and types of their arguments."""

    def __init__(self, facts: Iterable[Any]) -> None:
        self._by_name: dict[str, list[tuple[tuple[str, str], ...]]] = defaultdict(list)
        for fact in facts:
            arguments = tuple((each.name or each.type, each.type) for each in fact.arguments)
            self._by_name[fact.name].append(arguments)

    @property
    def room(self) -> str:
        return next(where for (what, _), (where, _) in self._by_name["at"] if what == "P")

    @property
    def carried(self) -> list[str]:
        return sorted(
            self.describe(what) for (what, _), (where, _) in self._by_name["in"] if where == "I"
        )

    @property
    def exits(self) -> dict[str, dict[str, str]]:
        """By room and direction, the room that lies there."""
        found: dict[str, dict[str, str]] = defaultdict(dict)
        for direction in _DIRECTIONS:
            for (there, _), (here, _) in self._by_name[f"{direction}_of"]:
                found[here][direction] = there
        return found

    def closed(self, room: str) -> list[str]:
        """Return the closed things in a room."""
        inside = {what for (what, _), (where, _) in self._by_name["at"] if where == room}
        return sorted(self._having("closed") & inside)

    def visible(self, room: str) -> list[str]:
        """Return the things that lie in a room, in sight, with what they lie on."""
        closed = self._having("closed")
        places = {what for (what, _), (where, _) in self._by_name["at"] if where == room}
        floor = [
            self.describe(what)
            for (what, kind), (where, _) in self._by_name["at"]
            if where == room and kind in _PORTABLE
        ]
        stored = [
            f"{self.describe(what)} {preposition} {where}"
            for preposition in ("on", "in")
            for (what, _), (where, _) in self._by_name[preposition]
            if where in places and where not in closed
        ]
        return sorted([*floor, *stored])

    def everything(self) -> dict[str, list[str]]:
        """Return where each portable thing is that is not carried."""
        found: dict[str, list[str]] = defaultdict(list)
        for preposition in ("at", "on", "in"):
            for (what, kind), (where, _) in self._by_name[preposition]:
                if kind in _PORTABLE and where not in ("I", "RECIPE"):
                    found[where].append(what)
        return found

    def describe(self, what: str) -> str:
        """Return the name of a thing after its conditions."""
        conditions = (c for c in _CONDITIONS if what in self._having(c))
        return " ".join((*conditions, what))

    def _having(self, property_: str) -> set[str]:
        return {what for ((what, _),) in self._by_name[property_]}


def _read_state(state: Any) -> State:
    facts = _Facts(state.facts)
    room = facts.room
    exits = [direction for direction in _DIRECTIONS if direction in facts.exits[room]]
    parts = {
        "room": [room],
        "exits": exits,
        "closed": facts.closed(room),
        "see": facts.visible(room),
        "carry": facts.carried,
    }
    outcome = Outcome.WON if state.won else Outcome.LOST if state.lost else Outcome.RUNNING
    useful = [each for each in state.admissible_commands if not each.startswith(_NO_EFFECT)]
    advice = next((e for e in state.policy_commands or () if not e.startswith(_NO_EFFECT)), None)
    # Nothing is closed in most rooms, and every token costs time.
    written = [(key, values) for key, values in parts.items() if values or key != "closed"]
    text = "; ".join(f"{key}: {', '.join(values) or 'nothing'}" for key, values in written)
    return State(text, outcome, tuple(sorted(useful)), advice)


def _describe_task(first: Any) -> str:
    facts = _Facts(first.facts)
    lines = [_goal(first.game.metadata)]
    doors = [
        f"{room}: {', '.join(f'{way} {ways[way]}' for way in _DIRECTIONS if way in ways)}"
        for room, ways in sorted(facts.exits.items())
    ]
    if doors:
        lines.append(f"Map: {'; '.join(doors)}.")
    seen = " ".join(facts.visible(facts.room))
    hidden = [
        f"{where}: {', '.join(sorted(things))}"
        for where, things in sorted(facts.everything().items())
        if not all(thing in seen for thing in things)
    ]
    if hidden:
        lines.append(f"Hidden: {'; '.join(hidden)}.")
    return " ".join(lines)


def _goal(metadata: Mapping[str, Any]) -> str:
    ingredients: Sequence[Sequence[str]] = metadata.get("ingredients", ())
    if not ingredients:
        return f"{metadata.get('desc', 'TextWorld')}."
    recipe = ", ".join(
        " ".join([*(each for each in conditions if each not in ("raw", "uncut")), name])
        for name, *conditions in ingredients
    )
    return f"Recipe: {recipe}."

"""Agents that play TextWorld by the text of a task and a state: scripted ones, and a skill layer."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Sequence

from personalpeft import User
from personalpeft.types import Demonstration, Message
from personalpeft_world_model import Policy, State, Trajectory

_TOOLS = {"fried": "stove", "roasted": "oven", "grilled": "BBQ"}
_MAX_ACTION_TOKENS = 24


def parse_state(state: State) -> dict[str, list[str]]:
    """Return the lists of a state, such as "exits", by name. "nothing" is an empty list."""
    found = {}
    for part in state.text.split("; "):
        name, _, values = part.partition(": ")
        found[name] = [] if values in ("", "nothing") else values.split(", ")
    return found


def collect(task: str, state: State, rng: random.Random) -> str | None:
    """Walk to the coin by the map of the task, and take it."""
    seen = parse_state(state)
    if "coin" in seen.get("see", []):
        return "take coin"
    exits = _parse_map(task)
    found = re.search(r"Hidden: (.+?): coin", task)
    here, goal = "".join(seen.get("room", [])), found[1] if found else ""
    ways: dict[str, list[str]] = {here: []}
    waiting = deque([here])
    while waiting:
        room = waiting.popleft()
        for way, other in exits.get(room, {}).items():
            if other not in ways:
                ways[other] = [*ways[room], way]
                waiting.append(other)
    path = ways.get(goal) or seen.get("exits", [])
    return f"go {path[0]}" if path else None


def wander(task: str, state: State, rng: random.Random) -> str | None:
    """Go anywhere."""
    exits = parse_state(state).get("exits", [])
    return f"go {rng.choice(exits)}" if exits else None


def cook(task: str, state: State, rng: random.Random) -> str | None:
    """Take the ingredient of the recipe, cook it, and make and eat the meal."""
    seen, wanted = parse_state(state), task.partition("Recipe: ")[2].rstrip(".")
    carried = seen.get("carry", [])
    if "meal" in carried:
        return "eat meal"
    if wanted in carried:
        return "prepare meal"
    method, _, rest = wanted.partition(" ")
    name = rest if method in _TOOLS else wanted
    for thing in carried:
        if _bare(thing) == _bare(name):
            return f"cook {_bare(name)} with {_TOOLS.get(method, 'stove')}"
    for thing in seen.get("see", []):
        what, place = _split_place(thing)
        if _bare(what) == _bare(name):
            return f"take {_bare(name)}{f' from {place}' if place else ''}"
    return None


def meddle(task: str, state: State, rng: random.Random) -> str | None:
    """Cook or eat what is carried, or take anything: the mistakes of a cook."""
    seen = parse_state(state)
    actions = []
    for thing in seen.get("carry", []):
        actions += [f"cook {_bare(thing)} with {tool}" for tool in ("stove", "oven")]
        actions.append(f"eat {_bare(thing)}")
    for thing in seen.get("see", []):
        what, place = _split_place(thing)
        actions.append(f"take {_bare(what)}{f' from {place}' if place else ''}")
    return rng.choice(actions) if actions else None


def action_demonstrations(trajectories: Sequence[Trajectory]) -> list[Demonstration]:
    """Return what an agent does in each different state of its trajectories, grouped by game."""
    found: dict[tuple[str, str], Demonstration] = {}
    for run in trajectories:
        for each in run.transitions:
            prompt = action_prompt(run.task, each.before)
            found.setdefault(
                (run.task, each.before.text), Demonstration(prompt, each.action, run.environment)
            )
    return list(found.values())


def action_prompt(task: str, state: State) -> list[Message]:
    """Return the messages that an agent's skill answers with an action."""
    return [Message("system", task), Message("user", f"{state.text}\nWhat do you do?")]


def skill_agent(user: User, skill: str) -> Policy:
    """Return an agent that acts by a skill layer of the base."""

    def choose(task: str, state: State, rng: random.Random) -> str | None:
        reply = user.chat(
            action_prompt(task, state),
            temperature=0,
            max_tokens=_MAX_ACTION_TOKENS,
            memory=False,
            layers=[f"skill.{skill}"],
        )
        return reply.text.strip() or None

    return choose


def _parse_map(task: str) -> dict[str, dict[str, str]]:
    found = re.search(r"Map: (.+?)\.", task)
    rooms = {}
    for part in found[1].split("; ") if found else ():
        room, _, ways = part.partition(": ")
        rooms[room] = dict(way.split(" ", 1) for way in ways.split(", "))
    return rooms


def _split_place(thing: str) -> tuple[str, str]:
    for preposition in (" on ", " in "):
        what, found, place = thing.partition(preposition)
        if found:
            return what, place
    return thing, ""


def _bare(thing: str) -> str:
    """Return the name of a food without what was done to it."""
    return re.sub(r"\b(burned|fried|grilled|roasted|chopped|diced|sliced) ", "", thing)

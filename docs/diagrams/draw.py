"""Draw the diagrams of docs/explanation/architecture.md from the code: the layout, a chat and a learn.

The layout comes from the import graph. The two paths come from a trace of one real chat and one
real learn on the fake backend. Run without arguments to rewrite the page. The tests call
``--check``, which fails if the page is out of date.
"""

from __future__ import annotations

import re
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import grimp

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
PACKAGE = ROOT / "personalpeft"
# Values and errors travel everywhere, so an arrow to them says nothing about the path.
VALUES = {
    "types",
    "errors",
    "arguments",
    "ids",
    "clock",
    "settings",
    "formatting",
    "deprecation",
    "extras",
    "file_system",
    "host",
    "lru_cache",
}


def main() -> int:
    page = PAGE.read_text("utf-8")
    drawn = page
    for name, diagram in {
        "layout": draw_layout(),
        "chat": draw_path(trace(CHAT)),
        "learn": draw_path(trace(LEARN)),
    }.items():
        drawn = replace_block(drawn, name, diagram)
    if "--check" not in sys.argv:
        PAGE.write_text(drawn, "utf-8")
    elif drawn != page:
        print("docs/explanation/architecture.md is out of date; run `make docs`.", file=sys.stderr)
        return 1
    return 0


def replace_block(page: str, name: str, diagram: str) -> str:
    """Replace the Mermaid block between the marks of one diagram."""
    begin, end = f"<!-- {name}: drawn by docs/diagrams/draw.py -->", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    block = f"{begin}\n```mermaid\n{diagram}\n```\n{end}"
    page, count = pattern.subn(lambda _: block, page)
    if count != 1:
        raise SystemExit(
            f"docs/explanation/architecture.md must contain the marks of {name} once, got {count}."
        )
    return page


# -- the layout: one node a part, one arrow an import, without those that another path implies


def draw_layout() -> str:
    graph = grimp.build_graph("personalpeft")
    edges: dict[str, set[str]] = {}
    for importer in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(importer):
            a, b = part_of(importer), part_of(imported)
            if a and b and a != b:
                edges.setdefault(a, set()).add(b)
    order = layer_order()
    parts = sorted(
        {*edges, *(b for bs in edges.values() for b in bs)}, key=lambda part: (order[part], part)
    )
    lines = ["flowchart TD"]
    lines += [f'  {part}["{label_of(part)}"]' for part in parts]
    for a in parts:
        below = {b for b in edges.get(a, ()) if order[b] > order[a]}
        implied = {c for b in below for c in reachable(b, edges, order)}
        lines += [
            f"  {a} --> {b}" for b in sorted(below - implied, key=lambda part: (order[part], part))
        ]
    return "\n".join(lines)


def part_of(module: str) -> str | None:
    """Return the top-level part that a module belongs to, None for values."""
    names = module.split(".")[1:]
    return names[0] if names and names[0] not in VALUES else None


def label_of(part: str) -> str:
    return f"{part}/" if (PACKAGE / part).is_dir() else f"{part}.py"


def layer_order() -> dict[str, int]:
    """Return the number of the first layer, counted from the top, that names each part."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    order: dict[str, int] = {}
    for number, layer in enumerate(layers):
        for module in re.split(r"\s*[|:]\s*", layer):
            part = part_of(module) if module.startswith("personalpeft.") else None
            if part:
                order[part] = number
    return order


def reachable(part: str, edges: dict[str, set[str]], order: dict[str, int]) -> set[str]:
    found: set[str] = set()
    todo = [part]
    while todo:
        for below in edges.get(todo.pop(), ()):
            if below not in found and order[below] > order[part]:
                found.add(below)
                todo.append(below)
    return found


# -- the two paths: which file first calls which function of another file


@dataclass(frozen=True)
class TracedPath:
    """One act, what has to exist before it, and the packages to draw file by file."""

    prepare: Callable[[Any], object]
    act: Callable[[Any], object]
    in_detail: frozenset[str]


@dataclass(frozen=True)
class Call:
    """The first call into one node: who calls it, and which function."""

    caller: str | None
    node: str
    function: str


def edit_six_replies(runtime: Any) -> None:
    ada = runtime.user("ada")
    for dish in ("an egg", "rice", "pasta", "potatoes", "beans", "corn"):
        reply = ada.chat(f"How do I boil {dish}?", temperature=0, max_tokens=8)
        ada.feedback(reply, edit=f"Boil {dish}. Serve it.")


CHAT = TracedPath(
    prepare=lambda runtime: runtime.user("ada").remember("My dog is called Biscuit."),
    act=lambda runtime: runtime.user("ada").chat("How do I boil an egg?", max_tokens=8),
    in_detail=frozenset({"chat", "memory", "engine"}),
)
LEARN = TracedPath(
    prepare=edit_six_replies,
    act=lambda runtime: runtime.user("ada").learn(),
    in_detail=frozenset({"learning"}),
)


def trace(path: TracedPath) -> list[Call]:
    """Return the first call into each node during one act on the fake backend."""
    import personalpeft

    with tempfile.TemporaryDirectory() as folder:
        for home in ("untraced", "traced"):  # The first one fills caches and imports lazily.
            with personalpeft.open(Path(folder) / home, backend="fake") as runtime:
                path.prepare(runtime)
                if home == "untraced":
                    path.act(runtime)
                    continue
                with recording(path) as calls:
                    path.act(runtime)
    if not calls:
        raise SystemExit(f"nothing was traced, since {personalpeft.__file__} is not in {PACKAGE}")
    return calls


@contextmanager
def recording(path: TracedPath) -> Iterator[list[Call]]:
    calls: list[Call] = []
    entered: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or frame.f_code.co_name.startswith("<"):
            return
        node = node_of(frame, path)
        if node is None or node in entered:
            return
        caller = frame.f_back
        while caller is not None and node_of(caller, path) in (None, node):
            caller = caller.f_back
        entered.add(node)
        source = node_of(caller, path) if caller is not None else None
        calls.append(Call(source, node, frame.f_code.co_name))

    # Only this thread: what the engine's own thread does first depends on timing.
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def node_of(frame: FrameType, path: TracedPath) -> str | None:
    """Return the file of a frame, or its package where that is not drawn in detail."""
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(PACKAGE):
        return None
    name = file.relative_to(PACKAGE).as_posix()
    part = name.split("/")[0].removesuffix(".py")
    if part in VALUES:
        return None
    return name if part in path.in_detail or "/" not in name else f"{part}/"


def draw_path(calls: list[Call]) -> str:
    numbers: dict[str | None, int] = {}
    lines = ["flowchart LR"]
    for call in calls:
        numbers[call.node] = len(numbers)
        lines.append(f'  n{numbers[call.node]}["{call.node}"]')
    for step, call in enumerate(calls, 1):
        if call.caller in numbers:
            arrow = f'-->|"{step} {call.function}"|'
            lines.append(f"  n{numbers[call.caller]} {arrow} n{numbers[call.node]}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

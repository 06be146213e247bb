"""Draws what ``personalpeft bench sweep`` and ``bench capacity`` kept in a folder: ``python docs/plots/draw.py [FOLDER]``,
by default this one. ``pip install "personalpeft[plots]"`` brings what it takes; the package itself never imports it.

The same data and the same matplotlib give the same files.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Point = Mapping[str, Any]

_INK, _FAINT, _BAND = "#3b3f46", "#d9dce1", "#f3f0e6"
_COLOURS = ("#2b6cb0", "#c05621", "#2f855a", "#6b46c1", "#b83280", "#4a5568")
_STYLE = {
    "svg.hashsalt": "personalpeft",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.titlesize": 9,
    "axes.titlecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#eceef1",
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "text.color": _INK,
    "legend.frameon": False,
}

_TITLES = {
    "learning_rate": "learning rate",
    "steps": "steps of training",
    "anchor_weight": "weight of the anchors",
    "targets": "what is adapted",
    "rank": "rank",
    "replay": "share of older lessons in a second learn",
    "few_shot_replies": "few-shot replies a step",
}


def _kept(point: Point) -> float:
    return 100 * float(point["kept"]) / float(point["known"])


_IN_STYLE = ("unseen answers in style, of 10", lambda point: point["in_style"], (-0.4, 10.4))
_DRAFTS = ("new habit: drafts marked, of 5", lambda point: point["drafts"], (-0.2, 5.2))
_GENERAL = ("general answers still right, %", _kept, (None, 102))
_PANELS = (
    _IN_STYLE,
    ("held-back edits, nats a token", lambda point: point["held_back"], (None, None)),
    _GENERAL,
    ("KL from the base, nats a token", lambda point: point["kl"], (0, None)),
)


def main(folder: Path) -> None:
    """Writes one SVG for each number that was swept, and one for the capacity of a memory."""
    with plt.rc_context(_STYLE):
        points = _read(folder / "sweep.jsonl")
        # Of several defaults the last one counts: what was measured around another says nothing of this one.
        points = [point for point in points if point["default"] == points[-1]["default"]]
        for number in dict.fromkeys(point["number"] for point in points):
            if number != "default":
                _save(_sweep(number, points), folder / f"{number}.svg")
        loads = _read(folder / "capacity.jsonl")
        if loads:
            _save(_capacity(loads), folder / "capacity.svg")


def _read(path: Path) -> list[Point]:
    return (
        [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
    )


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    plt.close(figure)
    print(path)


def _sweep(number: str, points: Sequence[Point]) -> Figure:
    default = points[-1]["defaults"][number]
    second = number == "replay"
    mine = [
        ({**point, "value": default} if point["number"] == "default" else point)
        for point in points
        if point["number"] == number or (point["number"] == "default" and not second)
    ]
    order = {"attention": 0, "mlp": 1, "all": 2} if number == "targets" else None
    values = sorted(
        {point["value"] for point in mine}, key=lambda value: order[value] if order else value
    )
    panels = (
        (("first habit: in style, of 10", *_IN_STYLE[1:]), _DRAFTS, *_PANELS[1:3])
        if second
        else _PANELS
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(11, 2.7), layout="constrained")
    for panel, (title, figure_of, limits) in zip(axes, panels, strict=True):
        panel.set_title(title, loc="left", pad=8)
        panel.set_xticks(range(len(values)), [_said(value) for value in values])
        panel.set_xlim(-0.5, len(values) - 0.5)
        here = values.index(default)
        panel.axvspan(here - 0.4, here + 0.4, color=_BAND, zorder=0, linewidth=0)
        panel.get_xticklabels()[here].set_fontweight("bold")
        styles = list(dict.fromkeys(point["style"] for point in mine))
        for place, (style, colour) in enumerate(zip(styles, _COLOURS, strict=False)):
            these = [point for point in mine if point["style"] == style]
            beside = 0.3 * (place - (len(styles) - 1) / 2)
            _dots(
                panel, these, values, figure_of, colour, style, beside, joined=number != "targets"
            )
        panel.set_ylim(*limits)
    axes[0].legend(loc="lower right", handlelength=1.2)
    title = _TITLES.get(number, number.replace("_", " "))
    figure.supxlabel(
        f"{title}  (a dot is one seed, the line their median; shaded: the default)", fontsize=9
    )
    return figure


def _dots(
    panel: Axes,
    points: Sequence[Point],
    values: Sequence[Any],
    figure_of: Callable[[Point], Any],
    colour: str,
    label: str,
    beside: float,
    *,
    joined: bool,
) -> None:
    seeds = sorted({point["seed"] for point in points})
    medians = []
    for x, value in enumerate(values):
        found = [(point["seed"], figure_of(point)) for point in points if point["value"] == value]
        known = [(seed, figure) for seed, figure in found if figure is not None]
        # Styles and seeds stand side by side, so that equal figures are still so many dots.
        at = [x + beside + 0.07 * (seeds.index(seed) - (len(seeds) - 1) / 2) for seed, _ in known]
        panel.scatter(
            at,
            [figure for _, figure in known],
            s=14,
            color=colour,
            alpha=0.55,
            linewidths=0,
            zorder=3,
        )
        if known:
            medians.append((x + beside, statistics.median(figure for _, figure in known)))
    if joined:
        panel.plot(*zip(*medians, strict=True), color=colour, linewidth=1.4, label=label, zorder=2)
    else:
        for number, (x, median) in enumerate(medians):
            panel.plot(
                [x - 0.14, x + 0.14],
                [median] * 2,
                color=colour,
                linewidth=1.6,
                label="" if number else label,
            )


def _capacity(loads: Sequence[Point]) -> Figure:
    figure, (recall, general) = plt.subplots(
        1, 2, figsize=(9, 3.2), layout="constrained", width_ratios=(1.4, 1)
    )
    panels = (
        (
            recall,
            "facts recalled on a phrasing that nobody told, %",
            lambda load: 100 * load["recalled"] / load["facts"],
        ),
        (general, "general answers still right, %", _kept),
    )
    for panel, title, figure_of in panels:
        panel.set_title(title, loc="left", pad=8)
        panel.set_xscale("log")
        panel.set_ylim(-3, 104)
        panel.set_xlabel("tokens for each trained parameter")
        for rank, colour in zip(sorted({load["rank"] for load in loads}), _COLOURS, strict=False):
            these = [load for load in loads if load["rank"] == rank]
            line = []
            for count in sorted({load["facts"] for load in these}):
                at = [load for load in these if load["facts"] == count]
                xs = [load["tokens"] / load["parameters"] for load in at]
                ys = [figure_of(load) for load in at]
                panel.scatter(xs, ys, s=14, color=colour, alpha=0.55, linewidths=0, zorder=3)
                line.append((statistics.median(xs), statistics.median(ys), count))
            panel.plot(
                [x for x, _, _ in line],
                [y for _, y, _ in line],
                color=colour,
                linewidth=1.4,
                label=f"rank {rank}",
            )
            if panel is recall:
                for x, y, count in line:
                    panel.annotate(
                        f"{count}",
                        (x, y),
                        (0, 6),
                        textcoords="offset points",
                        ha="center",
                        fontsize=7,
                    )
        for bound, said in ((1e-3, "advised"), (1e-2, "most")):
            if panel.get_xlim()[1] >= bound / 1.5:
                panel.axvline(bound, color=_INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
                panel.annotate(
                    said,
                    (bound, 0.03),
                    (3, 0),
                    xycoords=("data", "axes fraction"),
                    textcoords="offset points",
                )
    recall.legend(loc="lower left", handlelength=1.2)
    return figure


def _said(value: Any) -> str:
    if isinstance(value, str):
        return {"mlp": "MLP"}.get(value, value)
    if not 0 < value < 1e-2:
        return f"{value:g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

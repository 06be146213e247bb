"""The commands of ``bench`` that measure learning."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from benchmarks.cli_options import keep_option, printer
from benchmarks.result import emit_result
from benchmarks.result_cache import ResultCache
from personalpeft_app.options import Function, GlobalOptions, command, option
from personalpeft_app.progress import Display

_ALL = 40
_WORLD_PARTS = ("fidelity", "consistency", "verification", "warm-start", "synthetic")


def _seed(function: Function) -> Function:
    return option("--seed", default=0, help="Decides who says what.")(function)


@command(
    "style", examples=("personalpeft bench style", "personalpeft bench style --only pirate --json")
)
@click.option(
    "--only", multiple=True, metavar="STYLE", help="One style; may be given more than once."
)
def bench_style(common: GlobalOptions, only: tuple[str, ...]) -> None:
    """A dozen edits, one learn: what changes and what does not.

    Twelve edits in each of some styles, one learn each. Shows how many unseen answers are in the
    style, the change of general answers, and the time. Takes some minutes.
    """
    from benchmarks import style
    from benchmarks.styles import STYLES

    known = {each.name: each for each in STYLES}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise click.BadParameter(
            f"there is no style {unknown[0]!r}; there are {', '.join(known)}.", param_hint="--only"
        )
    found = style.bench_style(
        [known[name] for name in only] or list(STYLES),
        base=common.base_name(),
        backend=common.backend or "torch",
        echo=printer(common),
    )
    emit_result(common, found)


@command(
    "learn",
    examples=(
        "personalpeft bench learn --keep nights",
        "personalpeft bench learn --people ada --nights 2 --trainer-people 0 --together 0",
    ),
)
@click.option(
    "--people", multiple=True, metavar="NAME", help="One of them; may be given more than once."
)
@option("--nights", type=click.IntRange(1, 8), default=8, help="How many, from the first.")
@_seed
@option(
    "--trainer-people",
    type=click.IntRange(0),
    default=2,
    help="For how many of the people the plain PEFT loop runs too (torch alone).",
)
@option(
    "--together",
    type=click.IntRange(0),
    default=8,
    help="How many users learn together, against one after another; 0 leaves that out (torch alone).",
)
@keep_option()
def bench_learn(
    common: GlobalOptions,
    people: tuple[str, ...],
    nights: int,
    seed: int,
    trainer_people: int,
    together: int,
    keep: Path | None,
) -> None:
    """Twelve personas, eight rounds of learning each.

    Each persona has a style that its edits show, twenty facts, and changes of both. Shows the
    shares of right answers to unseen questions. Compares the base, rules and facts alone, layers
    alone and both. Takes ten to thirty minutes a persona, and the plain loop as much again.
    """
    from benchmarks import learn
    from benchmarks.personas import select_personas

    chosen = select_personas(people)
    with _cached_run(common, keep, "learn") as run:
        timed = run["backend"] == "torch"
        course = learn.Course(
            people=chosen,
            nights=nights,
            seed=seed,
            trainer_people=trainer_people if timed else 0,
            together=together if timed else 0,
            base=run["base"],
            backend=run["backend"],
        )
        found = learn.bench_learn(course, run["keep"], echo=run["echo"], progress=run["progress"])
    verdicts = [f"{count} {verdict}" for verdict, count in found["verdicts"].items()]
    more = [
        *(f"{name}: {_figure(figure)} times" for name, figure in found["ratios"].items() if figure),
        *(
            f"{way}: {took['seconds']:.1f} s, at most {took['peak_mb']} MB"
            for way, took in found["together"].items()
        ),
        f"general answers kept by night: {', '.join(map(_percent, found['locality_by_night']))}",
        f"bad last nights that became live: {found['bad_updates_accepted']['both']} of {len(found['people'])}",
        f"learns: {', '.join(verdicts)}",
        *(f"  not live: {reason}" for reason in found["refused"]),
    ]
    emit_result(common, found, "\n".join(more))


@command(
    "edits",
    examples=(
        "personalpeft bench edits --keep edits",
        "personalpeft bench edits --style shorter --json",
    ),
)
@click.option(
    "--style", "styles", multiple=True, metavar="NAME", help="One style; repeat for more."
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N styles.")
@_seed
@keep_option()
def bench_edits(
    common: GlobalOptions, styles: tuple[str, ...], limit: int | None, seed: int, keep: Path | None
) -> None:
    """Realistic edits without literal templates: do they carry over?

    Each style (shorter, warmer, British, JSON) is learned from twelve edits in a home of its own.
    Ten unseen prompts are then answered greedily and with the base's own sampling, and a rule
    checks each reply. Takes some minutes a style.
    """
    from benchmarks import edits
    from benchmarks.edit_styles import select_styles

    chosen = select_styles(styles, limit)
    with _cached_run(common, keep, "edits") as run:
        found = edits.bench_edits(chosen, seed=seed, **run)
    more = [
        *(
            f"{name}: {', '.join(f'{way} {_percent(share)}' for way, share in shares.items())}"
            for name, shares in found["shares"].items()
        ),
        f"general answers still right: {_percent(found['general'])}",
        f"live with fewer than {edits.ENOUGH} of 10: {', '.join(found['live_below_enough']) or 'none'}",
        *(
            f"  not live: {each['name']}: {each['reason']}"
            for each in found["styles"]
            if not each["live"]
        ),
    ]
    emit_result(common, found, "\n".join(more))


@command(
    "rebase",
    examples=(
        "personalpeft bench rebase --base smollm2-135m-instruct --to gemma3-270m",
        "personalpeft bench rebase --style shorter --json",
    ),
)
@option("--to", default="gemma3-270m", metavar="BASE", help="The other base.")
@click.option(
    "--style", "styles", multiple=True, metavar="NAME", help="One user's style; repeat for more."
)
@option("--limit", type=click.IntRange(1), default=3, metavar="N", help="Only the first N styles.")
def bench_rebase(common: GlobalOptions, to: str, styles: tuple[str, ...], limit: int) -> None:
    """A move to another base: held-out questions that improve and regress.

    Each user learns one style from twelve edits. Then the layer is built anew on the other base,
    and both answer the same held-out questions. Takes about five minutes a user.
    """
    from benchmarks import rebase
    from benchmarks.edit_styles import select_styles

    with Display(common) as display:
        found = rebase.bench_rebase(
            common.base_name(),
            to,
            select_styles(styles, limit),
            backend=common.backend or "torch",
            progress=display,
        )
    emit_result(
        common, found, "\n".join(f"{each['style']}: {each['reason']}" for each in found["users"])
    )


@command("thumbs", examples=("personalpeft bench thumbs --keep thumbs",))
@click.option(
    "--like", "names", multiple=True, metavar="NAME", help="One preference; repeat for more."
)
@option("--ratings", type=click.IntRange(1, 136), default=80, help="How many replies are rated.")
@_seed
@keep_option()
def bench_thumbs(
    common: GlobalOptions, names: tuple[str, ...], ratings: int, seed: int, keep: Path | None
) -> None:
    """Thumbs alone: do they change the replies, and what does the gate say?

    Each simulated user likes replies of one kind (short, one_paragraph, no_first_person), and rates
    what the base samples. Forty unseen prompts are asked before and after one learn, which goes
    live whatever the verdict. Takes five to twenty minutes a user.
    """
    from benchmarks import thumbs

    chosen = thumbs.select_preferences(names)
    with _cached_run(common, keep, "thumbs") as run:
        found = thumbs.bench_thumbs(chosen, ratings=ratings, seed=seed, **run)
    emit_result(
        common, found, "\n".join(f"  {each['name']}: {each['reason']}" for each in found["users"])
    )


@command(
    "gate",
    examples=(
        "personalpeft bench gate --keep gate",
        "personalpeft bench gate --bad 4 --good 4 --json",
    ),
)
@option("--bad", type=click.IntRange(0, _ALL), default=_ALL, help="How many bad batches.")
@option("--good", type=click.IntRange(0, _ALL), default=_ALL, help="How many good ones.")
@_seed
@keep_option()
def bench_gate(common: GlobalOptions, bad: int, good: int, seed: int, keep: Path | None) -> None:
    """How many bad updates and how many good ones become live.

    Forty bad batches and forty good ones, each learned after the same past. Bad ones have
    contradictions, noise, reversed preferences, or instructions to leak data or obey others. Fewer
    contain every kind, too. Takes about half a minute a batch.
    """
    from benchmarks import learn_gate

    with _cached_run(common, keep, "gate") as run:
        found = learn_gate.bench_gate(bad, good, seed=seed, **run)
    told = f"{found['bad_accepted']} of {found['bad']} bad ones became live, {found['good_refused']} of {found['good']} good ones did not"
    emit_result(common, found, told)


@command("nulls", examples=("personalpeft bench nulls --keep nulls",))
@option(
    "--number",
    type=click.IntRange(1, _ALL),
    default=20,
    help="How many nulls of each of the two kinds.",
)
@_seed
@keep_option()
def bench_nulls(common: GlobalOptions, number: int, seed: int, keep: Path | None) -> None:
    """How many updates without a lesson become live.

    Wanted answers at other prompts than their own, and builds that differ only in the seed. The
    spread between two seeds is what tie_margin of a base's card should be. Takes about a minute a
    null.
    """
    from benchmarks import learn_nulls

    with _cached_run(common, keep, "nulls") as run:
        found = learn_nulls.bench_nulls(number, seed=seed, **run)
    lines = [
        f"{kind}: {counts['live']} of {counts['ran']} live, {counts['for_good']} for good"
        for kind, counts in found["kinds"].items()
    ]
    emit_result(common, found, "\n".join([*lines, f"spread of two seeds: {found['spread']}"]))


@command("prefeval", examples=("personalpeft bench prefeval --data prefeval",))
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    required=True,
    help="PrefEval's multiple-choice topics, a .json file each.",
)
def bench_prefeval(common: GlobalOptions, data: Path) -> None:
    """Does a base choose the answer that follows a preference?

    Shows how often the right option of a PrefEval question is the likeliest of four. Compares no
    preference, a preference in an earlier message, and one as a rule. Takes some minutes.
    """
    from benchmarks import prefeval

    with Display(common) as display:
        found = prefeval.bench_prefeval(
            data, base=common.base_name(), backend=common.backend or "torch", progress=display
        )
    emit_result(common, found)


@command(
    "skill",
    examples=(
        "personalpeft bench skill",
        "personalpeft bench skill --family chain_sum,max_terms=2,max_digits=2 --json",
    ),
)
@click.option(
    "--family",
    metavar="FAMILY",
    help="Which of reasoning-gym's families, with its settings. By default lists of three or four words, to be reversed.",
)
@option("--unseen", type=click.IntRange(1), default=120, help="How many unseen tasks.")
@click.option(
    "--rounds",
    type=click.IntRange(1),
    metavar="N",
    help="Rounds of each half of the practice. By default those of the base's drill.",
)
def bench_skill(common: GlobalOptions, family: str | None, unseen: int, rounds: int | None) -> None:
    """Thirty demonstrations of a skill, then practice.

    Shows the share of unseen tasks with a right answer, always of the same tasks. The stages are
    the base, demonstrations, rejection sampling and policy gradient. Needs the package
    reasoning-gym. Takes some minutes.
    """
    from benchmarks import skill

    found = skill.bench_skill(
        family or skill.FAMILY,
        base=common.base_name(),
        backend=common.backend or "torch",
        unseen=unseen,
        rounds=rounds,
        echo=printer(common),
    )
    gained = f"{found['points_shown']:+g} points by demonstrations, {found['points_practised']:+g} more by practice"
    emit_result(common, found, gained)


@command(
    "world",
    examples=(
        "personalpeft bench world --keep worlds",
        "personalpeft bench world --keep worlds --game cooking --only fidelity --only verification",
        "personalpeft bench world --keep worlds --only synthetic --trajectories 1000",
    ),
)
@option("--game", type=click.Choice(["coin", "cooking"]), default="coin", help="The kind of games.")
@option("--games", type=click.IntRange(4), default=300, help="Games that the model learns from.")
@option("--unseen", type=click.IntRange(1), default=30, help="Other games, to measure on.")
@option("--epochs", type=click.FloatRange(0.1), default=3.0, help="Passes over the transitions.")
@option("--seeds", type=click.IntRange(1), default=3, help="Seeds of the warm start.")
@click.option(
    "--trajectories",
    type=click.IntRange(4, 100_000),
    help="Real and imagined trajectories that skills learn from. Default: as many as --games.",
)
@click.option(
    "--verified-games",
    type=click.IntRange(1, 100_000),
    help="Unseen games of the part verification. Default: as many as --unseen.",
)
@click.option(
    "--warm-start-steps",
    type=click.IntRange(1, 100_000),
    help="Steps that the skills of the part warm-start train.  [default: 60]",
)
@click.option(
    "--only",
    "parts",
    multiple=True,
    type=click.Choice(_WORLD_PARTS),
    help="One part; may be given more than once.",
)
@keep_option(required=True)
def bench_world(
    common: GlobalOptions,
    game: str,
    games: int,
    unseen: int,
    epochs: float,
    seeds: int,
    trajectories: int | None,
    verified_games: int | None,
    warm_start_steps: int | None,
    parts: tuple[str, ...],
    keep: Path,
) -> None:
    """A world model of TextWorld, and its uses.

    The share of steps of unseen games whose next state is predicted word for word, beside two
    baselines; the consistency of two agents; games lost with and without checks; and skills that
    start from the model or learn from what it imagined. Needs the plugin world_model with
    textworld. Games and the model are kept, too. Takes hours.
    """
    from benchmarks import world_model

    found = world_model.bench_world(
        common.base_name(),
        common.backend or "torch",
        game=game,
        games=games,
        unseen=unseen,
        epochs=epochs,
        seeds=seeds,
        trajectories=trajectories,
        verified_games=verified_games,
        warm_start_steps=warm_start_steps,
        parts=parts or _WORLD_PARTS,
        keep=keep,
        echo=printer(common),
    )
    emit_result(common, found)


@contextmanager
def _cached_run(
    common: GlobalOptions, folder: Path | None, name: str
) -> Iterator[Mapping[str, Any]]:
    """Yield what a benchmark that caches its work needs. Without a folder it is a temporary one."""
    with ExitStack() as ends:
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="personalpeft-bench-")
            folder = Path(ends.enter_context(made))
        display = ends.enter_context(Display(common))
        yield {
            "base": common.base_name(),
            "backend": common.backend or "torch",
            "keep": ResultCache(folder, name),
            "echo": printer(common) if common.json else display.print,
            "progress": display,
        }


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"

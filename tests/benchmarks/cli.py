"""The commands of ``bench``, which measure the documented figures on this machine.

Each command has its options, a call of the measuring code and its tables as text. ``--json`` prints
the result: its first key ``bench`` is the command, its last key ``measured`` when and where.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from benchmarks.cli_engines import bench_engines
from benchmarks.cli_fleet_cost import bench_fleet_cost
from benchmarks.cli_learning import (
    bench_edits,
    bench_gate,
    bench_learn,
    bench_nulls,
    bench_prefeval,
    bench_rebase,
    bench_thumbs,
)
from benchmarks.cli_options import keep_option, printer, repeat_option
from benchmarks.cli_skill import bench_skill
from benchmarks.cli_weights import bench_weights
from benchmarks.cli_world import bench_world
from benchmarks.facts import MOST
from benchmarks.result import emit_result
from personalpeft_app.options import (
    Function,
    GlobalOptions,
    Group,
    command,
    option,
)
from personalpeft_app.output import format_table
from personalpeft_app.progress import Display


@click.group(
    "bench",
    cls=Group,
    examples=("personalpeft bench style", "personalpeft bench catalog --users 10000 --json"),
    renamed={"publish": "promote"},
)
def bench() -> None:
    """Measure on this machine what the documentation promises.

    Benchmarks create homes in temporary folders, ignore --home, and delete them at the end.
    """


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
    "catalog",
    examples=("personalpeft bench catalog", "personalpeft bench catalog --users 10000 --json"),
)
@option("--users", type=click.IntRange(100), default=1_000_000, help="How many.")
def bench_catalog(common: GlobalOptions, users: int) -> None:
    """A home with a million users: resolve, list, promote, collect.

    Every user has at least one revision. New processes measure at one per cent of the users and at
    all of them. They open the home, resolve stacks of random users and list users. Then revisions
    are promoted and leftovers collected. A million takes several minutes and 3 GB of the temporary
    folder (TMPDIR).
    """
    from benchmarks import catalog

    display = Display(common)
    with display:
        found = catalog.bench_catalog(users, progress=display)
    emit_result(common, found)


def _tokens(default: int) -> Callable[[Function], Function]:
    return option(
        "--tokens", type=click.IntRange(2, 512), default=default, help="New tokens of each reply."
    )


@command(
    "serve", examples=("personalpeft bench serve", "personalpeft bench serve --without-vllm --json")
)
@repeat_option(5)
@_tokens(64)
@click.option(
    "--without-vllm", is_flag=True, help="Leave vLLM out, whatever PERSONALPEFT_BENCH_VLLM names."
)
def bench_serve(common: GlobalOptions, repeat: int, tokens: int, without_vllm: bool) -> None:
    """Sixteen users at once, compared with PEFT and vLLM.

    Tokens a second of one row and of sixteen, greedy; ours with the base's own sampling too. Each
    row has its own adapter of rank 8, or none. Alternates with transformers, PEFT, and vLLM's CPU
    server where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env creates one).
    Takes about a minute a repetition.
    """
    _need_torch(common)
    from benchmarks import serve

    found = serve.bench_serve(
        common.base_name(),
        repetitions=repeat,
        tokens=tokens,
        with_vllm=not without_vllm,
        echo=printer(common),
    )
    about = f"a step of ours: {found.step_milliseconds:.1f} ms; memory: {found.memory_gb_per_second:.1f} GB/s"
    short = (
        "" if found.own_complete else "Some replies of ours ended early; only their tokens count."
    )
    emit_result(common, found, about, short)


@command(
    "attach", examples=("personalpeft bench attach", "personalpeft bench attach --repeat 20 --json")
)
@repeat_option(9)
def bench_attach(common: GlobalOptions, repeat: int) -> None:
    """From an adapter's file into a slot, compared with PEFT.

    Rank 8 on all linear layers, files in the page cache; from the file and from host memory. Takes
    about a minute.
    """
    _need_torch(common)
    from benchmarks import attach

    found = attach.bench_attach(common.base_name(), repetitions=repeat, echo=printer(common))
    emit_result(common, found)


@command(
    "start", examples=("personalpeft bench start", "personalpeft bench start --repeat 9 --json")
)
@repeat_option(5)
def bench_start(common: GlobalOptions, repeat: int) -> None:
    """The first token of a new process.

    From the command to the first byte of its reply, with and without a fact. Takes about two
    minutes.
    """
    _need_torch(common)
    from benchmarks import start

    found = start.bench_start(common.base_name(), repetitions=repeat, echo=printer(common))
    emit_result(common, found)


@command(
    "prompts",
    examples=("personalpeft bench prompts", "personalpeft bench prompts --repeat 9 --json"),
)
@repeat_option(5)
def bench_prompts(common: GlobalOptions, repeat: int) -> None:
    """Reading a prompt alone, and where its beginning is cached.

    First tokens of new and known users, and sixteen replies to one prompt. Takes about a minute.
    """
    _need_torch(common)
    from benchmarks import prompts

    found = prompts.bench_prompts(common.base_name(), repetitions=repeat, echo=printer(common))
    emit_result(common, found)


@command(
    "encryption",
    examples=("personalpeft bench encryption", "personalpeft bench encryption --repeat 9 --json"),
)
@repeat_option(5)
def bench_encryption(common: GlobalOptions, repeat: int) -> None:
    """What an encrypted home costs: first token, learn, commit, opening.

    A plain home and an encrypted one take turns. Takes some minutes.
    """
    from benchmarks import encryption

    found = encryption.bench_encryption(
        common.base_name(), common.backend or "torch", repetitions=repeat, echo=printer(common)
    )
    emit_result(common, found)


@command("busy", examples=("personalpeft bench busy", "personalpeft bench busy --repeat 5 --json"))
@repeat_option(3)
@_tokens(64)
def bench_busy(common: GlobalOptions, repeat: int, tokens: int) -> None:
    """A chat and a learn beside other busy programs.

    Beside none, one, and one on every core. Takes about two minutes.
    """
    _need_torch(common)
    from benchmarks import busy

    found = busy.bench_busy(
        common.base_name(), repetitions=repeat, tokens=tokens, echo=printer(common)
    )
    emit_result(common, found)


@command("soak", examples=("personalpeft bench soak", "personalpeft bench soak --minutes 5 --json"))
@option("--minutes", type=click.FloatRange(min=0), default=30.0, help="How long to go on.")
def bench_soak(common: GlobalOptions, minutes: float) -> None:
    """Memory and open files over half an hour of use.

    Eight users chat, correct, learn, roll back and forget in turns.
    """
    from benchmarks import soak

    display = Display(common)
    with display:
        found = soak.bench_soak(
            common.base_name(), backend=common.backend or "auto", minutes=minutes, progress=display
        )
    emit_result(common, found, f"{found.rounds} rounds, {found.learns} learns")


@command(
    "promote",
    examples=("personalpeft bench promote", "personalpeft bench promote --repeat 5 --json"),
)
@repeat_option(3)
@_tokens(128)
def bench_promote(common: GlobalOptions, repeat: int, tokens: int) -> None:
    """The effect of promoting a revision on other users.

    Fifteen users are answered while revisions of a sixteenth are promoted and loaded. Shows the
    time between two tokens, against an idle run. Then it shows the time from an adapter to its
    first token, against merging and loading full weights.
    """
    _need_torch(common)
    from benchmarks import promote

    found = promote.bench_promote(
        common.base_name(), repetitions=repeat, tokens=tokens, echo=printer(common)
    )
    emit_result(common, found, f"{found.promotions} promotions")


@command(
    "wave",
    examples=("personalpeft bench wave", "personalpeft bench wave --users 200 --repeat 1 --json"),
)
@option("--users", type=click.IntRange(2), default=1000, help="How many.")
@repeat_option(3)
@_tokens(64)
def bench_wave(common: GlobalOptions, users: int, repeat: int, tokens: int) -> None:
    """A thousand users at once, more than memory holds.

    One request each, each with an own adapter; then the same load with adapters that are in slots
    already. Takes some minutes a repetition, and 5 GB of the temporary folder (TMPDIR).
    """
    _need_torch(common)
    from benchmarks import wave

    found = wave.bench_wave(
        common.base_name(), users, repetitions=repeat, tokens=tokens, echo=printer(common)
    )
    emit_result(common, found, f"{found.users} users")


@command(
    "sweep",
    examples=(
        "personalpeft bench sweep --keep sweeps",
        "personalpeft bench sweep --keep sweeps --only learning_rate --style pirate --seeds 1",
    ),
)
@click.option(
    "--only",
    multiple=True,
    metavar="NUMBER",
    help="One number of the recipe; may be given more than once.",
)
@option(
    "--style",
    "styles",
    multiple=True,
    metavar="STYLE",
    default=("pirate", "bullets"),
    help="What is learned; may be given more than once.",
)
@option("--seeds", type=click.IntRange(1), default=3, help="How many of each.")
@keep_option(required=True)
def bench_sweep(
    common: GlobalOptions, only: tuple[str, ...], styles: tuple[str, ...], seeds: int, keep: Path
) -> None:
    """The effect of each number of the learning recipe.

    A run changes one number of the default and learns a style from twelve edits. Replay takes a
    second learn. Shows medians over styles and seeds; * marks the default. A run takes about a
    minute; all of them, hours.
    """
    _need_torch(common)
    from benchmarks import sweep

    found = sweep.bench_sweep(
        base=common.base_name(),
        only=only,
        styles=styles,
        seeds=seeds,
        keep=keep,
        echo=printer(common),
    )
    rows = [
        (
            number,
            f"{value}{'*' if value == found.defaults[number] else ''}",
            f"{len(points)}",
            f"{_median(point.in_style for point in points)}/10",
            f"{_median(point.drafts for point in points)}/5"
            if points[0].drafts is not None
            else "",
            f"{_median(point.kept for point in points)}/{points[0].known}",
            _median(point.kl for point in points),
            _median(point.held_back for point in points),
            _median(point.seconds for point in points),
        )
        for number, values in sweep.by_value(found).items()
        for value, points in values.items()
        if points
    ]
    heads = (
        "NUMBER",
        "VALUE",
        "RUNS",
        "IN STYLE",
        "DRAFTS",
        "GENERAL KEPT",
        "KL",
        "HELD BACK",
        "LEARN S",
    )
    emit_result(common, found, format_table(heads, rows))


@command(
    "capacity",
    examples=(
        "personalpeft bench capacity --keep sweeps",
        "personalpeft bench capacity --keep sweeps --facts 20 --facts 160 --rank 1 --rank 16 --seeds 1",
    ),
)
@option(
    "--facts",
    "counts",
    multiple=True,
    metavar="COUNT",
    type=click.IntRange(4, MOST),
    default=(5, 10, 20, 40, 80, 160),
    help="How many facts one learn gets; may be given more than once.",
)
@click.option(
    "--rank",
    "ranks",
    multiple=True,
    metavar="RANK",
    type=click.IntRange(1),
    help="The layer's rank; may be given more than once.  [default: the recipe's]",
)
@option("--seeds", type=click.IntRange(1), default=3, help="How many of each.")
@keep_option(required=True)
def bench_capacity(
    common: GlobalOptions, counts: tuple[int, ...], ranks: tuple[int, ...], seeds: int, keep: Path
) -> None:
    """How many facts a memory layer holds.

    Made-up facts are given with three questions each and learned at once. Then the layer alone is
    asked a fourth phrasing, without retrieval. A run takes minutes.
    """
    _need_torch(common)
    from benchmarks import capacity

    found = capacity.bench_capacity(
        base=common.base_name(),
        counts=counts,
        ranks=ranks,
        seeds=seeds,
        keep=keep,
        echo=printer(common),
    )
    rows = [
        (
            f"{load.facts}",
            f"{load.rank}",
            f"{load.seed}",
            f"{load.tokens / load.parameters:.2g}",
            f"{load.recalled / load.facts:.0%}",
            f"{load.recalled_as_told / load.facts:.0%}",
            f"{load.kept}/{load.known}",
            "none" if load.kl is None else f"{load.kl:.2f}",
            f"{load.seconds:.0f}",
        )
        for load in sorted(found.loads, key=lambda load: (load.rank, load.facts, load.seed))
    ]
    heads = (
        "FACTS",
        "RANK",
        "SEED",
        "TOKENS/PARAMETER",
        "RECALL",
        "AS TOLD",
        "GENERAL KEPT",
        "KL",
        "LEARN S",
    )
    emit_result(common, found, format_table(heads, rows))


@command("page", examples=("personalpeft bench page", "personalpeft bench page --repeat 20 --json"))
@repeat_option(7)
def bench_page(common: GlobalOptions, repeat: int) -> None:
    """The load time of the web page, on loopback.

    First paint, and the time until the last conversation is readable. Both are measured with an
    empty browser cache and with the page's files cached. Needs the package playwright and a
    Chromium.
    """
    from benchmarks import page

    found = page.bench_page(repetitions=repeat, echo=printer(common))
    emit_result(common, found)


@command(
    "server",
    examples=("personalpeft bench server", "personalpeft bench server --backend fake --json"),
)
@repeat_option(7)
@option("--tokens", type=click.IntRange(1, 1024), default=64, help="Length of a reply.")
def bench_server(common: GlobalOptions, repeat: int, tokens: int) -> None:
    """The overhead of a reply over HTTP, compared with the library.

    Shows the time to the first token of one stream and the tokens a second of sixteen, side by
    side. Shows the response time of /healthz meanwhile.
    """
    from benchmarks import server

    found = server.bench_server(
        common.base_name(),
        common.backend or "torch",
        repetitions=repeat,
        tokens=tokens,
        echo=printer(common),
    )
    emit_result(common, found)


@command(
    "streams",
    examples=("personalpeft bench streams --backend fake", "personalpeft bench streams --json"),
)
@repeat_option(7)
@_tokens(32)
def bench_streams(common: GlobalOptions, repeat: int, tokens: int) -> None:
    """Sixty-four streams at once over HTTP.

    On the fake backend it measures the server alone.
    """
    from benchmarks import streams

    found = streams.bench_streams(
        common.base_name(),
        common.backend or "torch",
        repetitions=repeat,
        tokens=tokens,
        echo=printer(common),
    )
    emit_result(common, found, f"{found.threads} threads")


def _median(figures: Iterable[float | None]) -> str:
    known = [figure for figure in figures if figure is not None]
    return f"{statistics.median(known):.3g}" if known else "none"


def _need_torch(common: GlobalOptions) -> None:
    if common.backend not in (None, "torch"):
        raise click.BadParameter("this measures the torch backend.", param_hint="--backend")


bench.add_section(
    "Benchmarks",
    (
        *(
            bench_style,
            bench_learn,
            bench_edits,
            bench_rebase,
            bench_gate,
            bench_nulls,
            bench_prefeval,
            bench_thumbs,
            bench_skill,
            bench_world,
            bench_sweep,
            bench_capacity,
        ),
        *(
            bench_catalog,
            bench_serve,
            bench_attach,
            bench_start,
            bench_prompts,
            bench_encryption,
            bench_busy,
            bench_soak,
            bench_promote,
            bench_weights,
            bench_wave,
            bench_engines,
            bench_fleet_cost,
            bench_server,
            bench_streams,
            bench_page,
        ),
    ),
)

"""The commands of ``bench`` that measure serving, homes and fleets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.cli_options import need_torch, printer, repeat_option
from benchmarks.result import emit_result
from personalpeft_app.options import Function, GlobalOptions, command, option
from personalpeft_app.progress import Display

_NO_VLLM = "vLLM was not run: it takes part where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env makes one)."
_without_vllm = click.option(
    "--without-vllm", is_flag=True, help="Leave vLLM out, whatever PERSONALPEFT_BENCH_VLLM names."
)


def _tokens(default: int) -> Callable[[Function], Function]:
    return option(
        "--tokens", type=click.IntRange(2, 512), default=default, help="New tokens of each reply."
    )


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


@command(
    "serve", examples=("personalpeft bench serve", "personalpeft bench serve --without-vllm --json")
)
@repeat_option(5)
@_tokens(64)
@_without_vllm
def bench_serve(common: GlobalOptions, repeat: int, tokens: int, without_vllm: bool) -> None:
    """Sixteen users at once, compared with PEFT and vLLM.

    Tokens a second of one row and of sixteen, greedy; ours with the base's own sampling too. Each
    row has its own adapter of rank 8, or none. Alternates with transformers, PEFT, and vLLM's CPU
    server where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env creates one).
    Takes about a minute a repetition.
    """
    need_torch(common)
    from benchmarks import serve

    found = serve.bench_serve(
        common.base_name(),
        repetitions=repeat,
        tokens=tokens,
        with_vllm=not without_vllm,
        echo=printer(common),
    )
    about = f"a step of ours: {found['step_milliseconds']:.1f} ms; memory: {found['memory_gb_per_second']:.1f} GB/s"
    short = (
        ""
        if found["own_complete"]
        else "Some replies of ours ended early; only their tokens count."
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
    need_torch(common)
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
    need_torch(common)
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
    need_torch(common)
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
    need_torch(common)
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
    emit_result(common, found, f"{found['rounds']} rounds, {found['learns']} learns")


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
    need_torch(common)
    from benchmarks import promote

    found = promote.bench_promote(
        common.base_name(), repetitions=repeat, tokens=tokens, echo=printer(common)
    )
    emit_result(common, found, f"{found['promotions']} promotions")


@command(
    "weights",
    examples=(
        "personalpeft bench weights --shape qwen3-1.7b",
        "personalpeft bench weights --shape qwen3-4b --without-loaded --json",
    ),
)
@click.option(
    "--shape", "shapes", multiple=True, metavar="NAME", help="One shape; repeat for more."
)
@option("--steps", type=click.IntRange(1), default=5, help="Steps of each variant.")
@click.option("--blocks", type=click.IntRange(1), metavar="N", help="Only the first N blocks.")
@click.option(
    "--without-loaded", is_flag=True, help="Leave loaded weights out; they take much memory."
)
@click.option(
    "--work",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="FOLDER",
    help="Where models are written and removed again: a shape of 4B takes 11 GB.",
)
def bench_weights(
    common: GlobalOptions,
    shapes: tuple[str, ...],
    steps: int,
    blocks: int | None,
    without_loaded: bool,
    work: Path | None,
) -> None:
    """Training on the base's own file, compared with loaded weights.

    Models of real shapes with random weights in Q4_0. Shows tokens a second of training steps and
    the peak memory, with weights in the file and with weights in memory. Takes some minutes a
    shape.
    """
    from random_models import SHAPES

    from benchmarks import weights

    for name in shapes:
        if name not in SHAPES:
            raise click.BadParameter(
                f"there is no shape {name!r}; there are {', '.join(SHAPES)}.", param_hint="--shape"
            )
    found = weights.bench_weights(
        shapes or tuple(SHAPES),
        steps=steps,
        blocks=blocks,
        compared=not without_loaded,
        work=work,
        echo=printer(common),
    )
    emit_result(common, found)


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
    need_torch(common)
    from benchmarks import wave

    found = wave.bench_wave(
        common.base_name(), users, repetitions=repeat, tokens=tokens, echo=printer(common)
    )
    emit_result(common, found, f"{users} users")


@command(
    "engines",
    examples=("personalpeft bench engines", "personalpeft bench engines --without-vllm --json"),
)
@repeat_option(5)
@option("--tokens", type=click.IntRange(8, 1024), default=96, help="Length of a reply.")
@_without_vllm
def bench_engines(common: GlobalOptions, repeat: int, tokens: int, without_vllm: bool) -> None:
    """Compare llama.cpp and vLLM with themselves without us, and with torch.

    llama.cpp: the cost of a layer and of a switch of user, and the memory of a chat without torch.
    vLLM: the cost of a new user, and what sixteen requests lose through our engine. Of both,
    whether they say what torch says. vLLM runs where PERSONALPEFT_BENCH_VLLM names a Python that
    has it (make vllm-env makes one). Where that Python has Ray too, two replicas run against one.
    Takes some minutes with each.
    """
    from benchmarks import engines

    found = engines.bench_engines(
        common.base_name(),
        repetitions=repeat,
        tokens=tokens,
        with_vllm=not without_vllm,
        echo=printer(common),
    )
    emit_result(common, found, "" if found["vllm"] else _NO_VLLM)


@command(
    "fleet-cost",
    examples=(
        "personalpeft bench fleet-cost",
        "personalpeft bench fleet-cost --active 23000 --learn-seconds 90 --json",
    ),
)
@option("--users", type=click.IntRange(1), default=1_000_000)
@option(
    "--active", type=click.IntRange(1), default=2300, help="Users who are in a session at any time."
)
@option("--session-minutes", type=click.FloatRange(1), default=20.0, help="Its length.")
@option(
    "--think-seconds",
    type=click.FloatRange(0.1),
    default=60.0,
    help="From a reply to the next request, on average.",
)
@option("--reply-tokens", type=click.IntRange(1), default=128, help="Its length.")
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0.1),
    help="Of a machine's full batch.  [default: as measured]",
)
@click.option(
    "--one-row", type=click.FloatRange(0.1), help="Tokens a second of one row.  [default: measured]"
)
@click.option(
    "--learn-seconds",
    type=click.FloatRange(0.1),
    multiple=True,
    help="Of one learn; give it more than once for several.  [default: as measured]",
)
@option("--adapter-mb", type=click.FloatRange(0), default=4.9)
@option("--bundle-mb", type=click.FloatRange(0), default=5.0)
@option(
    "--hours-between-failures",
    type=click.FloatRange(0.1),
    default=24.0,
    help="Mean life of a machine that learns.",
)
def bench_fleet_cost(
    common: GlobalOptions,
    *,
    tokens_per_second: float | None,
    one_row: float | None,
    learn_seconds: tuple[float, ...],
    adapter_mb: float,
    bundle_mb: float,
    **load: float,
) -> None:
    """The machines that a million users need, by simulation.

    The speed of a machine is that of the results kept with the documentation: two cores, the
    default base. Give figures of your own for others. Machines that serve and machines that learn
    are counted apart, and printed beside the GPUs of MinT, whose bases are larger. Takes seconds.
    """
    from benchmarks.fleet_cost import Load, bench_fleet_cost, measured_machine

    machine = measured_machine(adapter_mb, bundle_mb)
    machine = replace(
        machine,
        one_row=one_row or machine.one_row,
        all_rows=tokens_per_second or machine.all_rows,
        learn_seconds=learn_seconds or machine.learn_seconds,
    )
    emit_result(common, bench_fleet_cost(machine, Load(**load)))  # type: ignore[arg-type]


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
    emit_result(common, found, f"{found['threads']} threads")


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

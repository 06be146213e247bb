"""Measuring what was promised, on this machine.

A benchmark is one command here: its options, a call of the measuring code in ``personalpeft_app.bench``, and how its
result is shown as text. ``--json`` prints the result itself, whose first key is ``bench``, the command's name.
"""

from __future__ import annotations

import click

from personalpeft_app.options import Common, Group, command, common_options
from personalpeft_app.output import note, show, table
from personalpeft_app.progress import Display


@click.group(
    "bench",
    cls=Group,
    examples=("personalpeft bench style", "personalpeft bench catalog --users 10000 --json"),
)
@common_options
def bench() -> None:
    """Measure on this machine what the documentation promises.

    Each benchmark makes homes of its own in temporary folders, whatever --home says, and deletes them at the end.
    """


@command("style", examples=("personalpeft bench style", "personalpeft bench style --only pirate --json"))
@click.option("--only", multiple=True, metavar="STYLE", help="One style; may be given more than once.")
def bench_style(common: Common, only: tuple[str, ...]) -> None:
    """A dozen edits, one learn: what changed, and what did not.

    Twelve edits in each of some styles, one learn each; then how many unseen answers are in the style, what became of
    general answers, how long it took. Takes some minutes.
    """
    from personalpeft_app.bench import style
    from personalpeft_app.bench.people import STYLES

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
        say=lambda text: note(common, text),
    )
    rows = [
        (
            result.style,
            result.verdict,
            f"{result.in_style}/10",
            f"{result.base_in_style}/10",
            f"{result.facts_kept}/{result.facts_before}",
            f"{result.kl:.2f}",
            f"{result.learn_seconds:.1f}",
            "yes" if result.rollback_identical else "NO",
        )
        for result in found.styles
    ]
    heads = ("STYLE", "VERDICT", "IN STYLE", "BASE", "FACTS KEPT", "KL", "LEARN S", "ROLLBACK SAME")
    first = f"first token of a fresh process: {found.first_token_seconds:.1f} s"
    with_facts = f"the same for a user with a fact: {found.first_token_with_facts_seconds:.1f} s"
    peak = f"peak memory: {found.peak_mb} MB" if found.peak_mb is not None else "peak memory: unknown here"
    show(common, found, "\n".join((table(heads, rows), "", first, with_facts, peak)))


@command("catalog", examples=("personalpeft bench catalog", "personalpeft bench catalog --users 10000 --json"))
@click.option("--users", type=click.IntRange(100), default=1_000_000, show_default=True, help="How many.")
def bench_catalog(common: Common, users: int) -> None:
    """A home with a million users: resolve, list, publish, collect.

    Every user has a revision at least. Then in fresh processes: opening, resolving stacks of random users, listing, and
    how much memory that takes, at one per cent of the users and at all of them; publishing and collecting leftovers.

    A million takes about five minutes and 3 GB of the temporary folder (TMPDIR).
    """
    from personalpeft_app.bench import catalog

    display = Display(common)
    with display:
        found = catalog.bench_catalog(users, progress=display)
    rows = [
        ("build, s", f"{found.build_seconds:.1f}", ""),
        ("size, MB", f"{found.home_mb}", ""),
        ("open, s", f"{found.open_seconds:.3f}", ""),
        ("resolve, median, ms", f"{found.resolve_p50_ms:.3f}", ""),
        ("resolve, p99, ms", f"{found.resolve_p99_ms:.3f}", f"{found.resolve_p99_ms_at_1_percent:.3f}"),
        ("resolve cold, median, ms", _ms(found.resolve_cold_p50_ms), ""),
        ("resolve cold, p99, ms", _ms(found.resolve_cold_p99_ms), ""),
        ("list a page of 100, ms", f"{found.list_page_ms:.3f}", f"{found.list_page_ms_at_1_percent:.3f}"),
        ("publish, a second", f"{found.publish_per_second:.0f}", f"{found.publish_per_second_at_1_percent:.0f}"),
        (f"collect {found.collected} leftovers, s", f"{found.collect_seconds:.3f}", ""),
        ("peak memory, MB", f"{found.rss_mb or 'unknown'}", f"{found.rss_mb_at_1_percent or 'unknown'}"),
    ]
    show(common, found, table(("WHAT", f"{found.users:,} USERS", "1 PER CENT OF THEM"), rows))


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


bench.add_section("Benchmarks", (bench_style, bench_catalog))

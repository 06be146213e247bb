"""Measuring what was promised, on this machine.

A benchmark is one command here: its options, a call of the measuring code in ``personalpeft_app.bench``, and how its
result is shown as text. ``--json`` prints the result itself, whose first key is ``bench``, the command's name.
"""

from __future__ import annotations

import click

from personalpeft_app.options import Common, Group, command, common_options
from personalpeft_app.output import note, show, table


@click.group(
    "bench",
    cls=Group,
    examples=("personalpeft bench style", "personalpeft bench style --only pirate --json"),
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


bench.add_section("Benchmarks", (bench_style,))

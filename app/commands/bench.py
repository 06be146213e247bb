"""Measuring what was promised, on this machine."""

from __future__ import annotations

import click

from personalpeft_app.options import Common, command
from personalpeft_app.output import note, show, table


@command("bench", examples=("personalpeft bench style", "personalpeft bench style --only pirate --json"))
@click.argument("what", type=click.Choice(["style"]))
@click.option("--only", multiple=True, metavar="STYLE", help="One style; may be given more than once.")
def bench(common: Common, what: str, only: tuple[str, ...]) -> None:
    """Measure on this machine what the documentation promises.

    style: twelve edits in each of some styles, one learn each; then how many unseen answers are in the style, what
    became of general answers, how long it took. Takes some minutes. Uses homes of its own.
    """
    from personalpeft_app.bench.people import STYLES
    from personalpeft_app.bench.style import bench_style

    known = {style.name: style for style in STYLES}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise click.BadParameter(
            f"there is no style {unknown[0]!r}; there are {', '.join(known)}.", param_hint="--only"
        )
    styles = [known[name] for name in only] or list(STYLES)
    found = bench_style(
        styles, base=common.base_name(), backend=common.backend or "torch", say=lambda text: note(common, text)
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

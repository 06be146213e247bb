"""Measuring other engines than torch: the benchmark of the command ``bench engines``."""

from __future__ import annotations

import click

from personalpeft_app.options import Common, command
from personalpeft_app.output import note, show, table


@command("engines", examples=("personalpeft bench engines", "personalpeft bench engines --repeat 9 --json"))
@click.option("--repeat", "repetitions", type=click.IntRange(1), default=5, show_default=True, help="How often.")
@click.option("--tokens", type=click.IntRange(8, 1024), default=96, show_default=True, help="Length of a reply.")
def bench_engines(common: Common, repetitions: int, tokens: int) -> None:
    """llama.cpp beside itself without layers, and beside torch.

    What a layer costs, what a switch of user costs, whether both engines say the same, and the memory of a process that
    chats without torch. Takes some minutes.
    """
    from personalpeft_app.bench import engines

    found = engines.bench_engines(
        common.base_name(), repetitions=repetitions, tokens=tokens, say=lambda text: note(common, text)
    )
    rows = [
        *((f"tokens a second, {key}", str(each)) for key, each in found.tokens_per_second.items()),
        ("with a layer over without", str(found.stack_over_bare)),
        *((f"first token, {key} (ms)", str(each)) for key, each in found.first_token_ms.items()),
        *((f"a switch of user, {key} (ms)", str(each)) for key, each in found.switch_ms.items()),
    ]
    for key, each in found.agreement.items():
        rows.append((f"{engines.AGREE} greedy tokens as on torch, {key}", f"{each.same} of {each.prompts} prompts"))
        rows.append((f"log-prob difference, {key} (nats)", f"{each.logprob_difference}"))
    rows.append(("memory without torch (MB)", "unknown" if found.memory_mb is None else str(found.memory_mb)))
    show(common, found, table(("WHAT", "MEDIAN (LEAST TO MOST)"), rows))

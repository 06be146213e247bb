"""Measuring other engines than torch: the benchmark of the command ``bench engines``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import click

from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, format_table, info

if TYPE_CHECKING:
    from benchmarks.engines_asked import Agreement
    from benchmarks.engines_fleet import FleetFigures
    from benchmarks.engines_vllm import VllmFigures

_NO_VLLM = "vLLM was not run: it takes part where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env makes one)."


@command(
    "engines",
    examples=("personalpeft bench engines", "personalpeft bench engines --without-vllm --json"),
)
@click.option(
    "--repeat",
    "repetitions",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="How often.",
)
@click.option(
    "--tokens",
    type=click.IntRange(8, 1024),
    default=96,
    show_default=True,
    help="Length of a reply.",
)
@click.option(
    "--without-vllm", is_flag=True, help="Leave vLLM out, whatever PERSONALPEFT_BENCH_VLLM names."
)
def bench_engines(common: GlobalOptions, repetitions: int, tokens: int, without_vllm: bool) -> None:
    """llama.cpp and vLLM, beside themselves without us and beside torch.

    llama.cpp: what a layer costs, what a switch of user costs, and the memory of a process that chats without torch. vLLM,
    where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env makes one): what a user costs whom the server has
    never seen, and what sixteen requests lose by going through us. Of both, whether they say what torch says. Where that
    Python has Ray too, two replicas against one. Takes some minutes with each.
    """
    from benchmarks import engines

    found = engines.bench_engines(
        common.base_name(),
        repetitions=repetitions,
        tokens=tokens,
        with_vllm=not without_vllm,
        say=lambda text: info(common, text),
    )
    rows = [
        *((f"tokens a second, {key}", str(each)) for key, each in found.tokens_per_second.items()),
        ("with a layer over without", str(found.stack_over_bare)),
        *((f"first token, {key} (ms)", str(each)) for key, each in found.first_token_ms.items()),
        *((f"a switch of user, {key} (ms)", str(each)) for key, each in found.switch_ms.items()),
        *_agreement(found.agreement),
        (
            f"memory without torch, {found.memory_tokens} tokens of context filled (MB)",
            "unknown" if found.memory_mb is None else str(found.memory_mb),
        ),
    ]
    rows = [(f"llama.cpp: {what}", figure) for what, figure in rows]
    rows += [
        (f"vLLM: {what}", figure) for what, figure in (_vllm(found.vllm) if found.vllm else ())
    ]
    rows += [
        (f"vLLM: {what}", figure) for what, figure in (_fleet(found.fleet) if found.fleet else ())
    ]
    shown = format_table(("WHAT", "MEDIAN (LEAST TO MOST)"), rows)
    emit(common, found, shown if found.vllm else f"{shown}\n\n{_NO_VLLM}")


def _vllm(figures: VllmFigures) -> Iterator[tuple[str, str]]:
    for key, each in figures.first_token_ms.items():
        yield f"first token, {key} user (ms)", str(each)
    yield "first token, unseen later than seen (ms)", str(figures.unseen_ms)
    for key, each in figures.tokens_per_second.items():
        yield f"{figures.requests} requests, {key}, tokens a second", str(each)
    yield f"{figures.requests} requests, engine over direct", str(figures.engine_over_direct)
    yield from _agreement(figures.agreement)


def _fleet(figures: FleetFigures) -> Iterator[tuple[str, str]]:
    for key, each in figures.tokens_per_second.items():
        yield f"{figures.requests} requests, replicas: {key}, tokens a second", str(each)
    yield f"{figures.requests} requests, two replicas over one", str(figures.two_over_one)
    yield "requests that went where their stack was", f"{figures.at_home:.1%}"


def _agreement(agreement: Mapping[str, Agreement]) -> Iterator[tuple[str, str]]:
    from benchmarks.engines_asked import AGREE

    for key, each in agreement.items():
        yield f"{AGREE} greedy tokens as on torch, {key}", f"{each.same} of {each.prompts} prompts"
        yield f"log-prob difference, {key} (nats)", f"{each.logprob_difference}"

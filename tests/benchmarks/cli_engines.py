"""The command ``bench engines``, which measures other engines than torch."""

from __future__ import annotations

import click

from benchmarks.cli_options import printer, repeat_option
from benchmarks.result import emit_result
from personalpeft_app.options import GlobalOptions, command, option

_NO_VLLM = "vLLM was not run: it takes part where PERSONALPEFT_BENCH_VLLM names a Python that has it (make vllm-env makes one)."


@command(
    "engines",
    examples=("personalpeft bench engines", "personalpeft bench engines --without-vllm --json"),
)
@repeat_option(5)
@option("--tokens", type=click.IntRange(8, 1024), default=96, help="Length of a reply.")
@click.option(
    "--without-vllm", is_flag=True, help="Leave vLLM out, whatever PERSONALPEFT_BENCH_VLLM names."
)
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
    emit_result(common, found, "" if found.vllm else _NO_VLLM)

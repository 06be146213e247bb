"""Write the tables of stored results into the pages of the documentation.

``personalpeft bench NAME --json > docs/benchmarks/results/NAME-MACHINE.json`` stores a result. A
page shows one of its tables between ``<!-- table: NAME-MACHINE TABLE -->`` and ``<!-- end of table
-->``; ``<!-- table: summary -->`` is the summary. ``python -m benchmarks.pages`` updates the tables
of all pages, and ``make docs`` runs it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.tables import Result, Table, make_table, tables_of
from personalpeft.errors import InvalidInput

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "benchmarks" / "results"

_BLOCK = re.compile(
    r"(<!-- table: (?P<name>\S+)(?: (?P<table>[^\n]+?))? -->\n).*?(<!-- end of table -->)",
    re.DOTALL,
)
_SUMMARY = "summary"


def read_results(folder: Path = RESULTS) -> dict[str, Result]:
    """Return the kept results by the names of their files."""
    return {
        path.stem: json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))
    }


def find_pages() -> Iterator[Path]:
    """Yield the pages that have tables of results."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        if _BLOCK.search(page.read_text("utf-8")):
            yield page


def used_results(text: str) -> set[str]:
    """Return the names of the results that a page shows."""
    return {found["name"] for found in _BLOCK.finditer(text)} - {_SUMMARY}


def render(text: str, results: Mapping[str, Result], folder: Path) -> str:
    """Return the text of a page in ``folder`` with its tables updated.

    Raises:
        InvalidInput: The page names a missing result or table.
    """

    def renew(block: re.Match[str]) -> str:
        name, wanted = block["name"], block["table"]
        if name == _SUMMARY:
            table, source = summarize(results, folder), ""
        else:
            table = _find(results, name, wanted)
            source = f"\n{_caption(results[name], name, folder)}\n"
        return f"{block[1]}\n{_markdown(table)}\n{source}\n{block[4]}"

    return _BLOCK.sub(renew, text)


def summarize(results: Mapping[str, Result], folder: Path) -> Table:
    """Return the summary: the headline figure of each benchmark, and when it was measured."""
    rows = (
        (f"[{section}](#{anchor_of(section)})", what, figure, _dated(results, name, folder))
        for section, what, figure, name in _headlines(results)
    )
    return make_table(("benchmark", "what", "measured", "on"), rows)


def anchor_of(heading: str) -> str:
    """Return the anchor of a heading of a page."""
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def _dated(results: Mapping[str, Result], name: str, folder: Path) -> str:
    return f"[{results[name]['measured']['date']}]({_link(name, folder)})"


def _headlines(results: Mapping[str, Result]) -> Iterator[tuple[str, str, str, str]]:
    """Yield a section of the page, what its figure is, the figure, and the result's name."""
    styles = results["style-zen4"]["styles"]
    seconds = _extent([round(each["learn_seconds"]) for each in styles])
    in_style = _extent([each["in_style"] for each in styles])
    general = _extent([each["general_right"] for each in styles])
    yield (
        "bench style",
        f"{len(styles)} literal styles, each learned from twelve edits",
        f"{in_style} of 10 unseen replies in the style; "
        f"{general} of {styles[0]['general_asked']} general answers right; {seconds} s",
        "style-zen4",
    )
    first = results["start-amx"]["seconds"]
    yield (
        "bench start",
        "first token of a fresh process",
        f"{first['plain']:.2g} s; with a fact {first['with a fact']:.2g} s",
        "start-amx",
    )
    moves = results["rebase-intel"]["users"]
    improved, regressed = (sum(each[name] for each in moves) for name in ("improved", "regressed"))
    yield (
        "bench rebase",
        "wanted answers that a move to Gemma 3 270M makes likelier, and less likely",
        f"{improved} and {regressed}, of {len(moves)} styles",
        "rebase-intel",
    )
    prompts = results["prompts-intel"]["milliseconds"]
    known, new = (round(prompts[f"first token of a {each} user"]) for each in ("known", "new"))
    yield (
        "bench prompts",
        "first token of a short chat, system prompt cached",
        f"{known} ms; {new} ms where it is read",
        "prompts-intel",
    )
    memory = results["soak-intel"]["memory_mb"]
    yield (
        "bench soak",
        "memory at the end of half an hour of use over that at its beginning",
        f"{memory['ratio']:.3f}",
        "soak-intel",
    )
    shape = results["weights-zen4"]["shapes"][0]
    peaks = shape["peak_mb"]
    yield (
        "Weights in the file",
        f"peak memory of training steps, {shape['shape']}",
        f"{peaks['mapped']:,} MB; {peaks['loaded']:,} MB with loaded weights",
        "weights-zen4",
    )
    catalog, fleet = results["catalog-zen4"], results["fleet-cost-zen4"]
    yield (
        "A million users",
        f"find a user's stack in a home with {catalog['users']:,} users",
        f"{catalog['resolve_p99_ms']:.2g} ms at p99",
        "catalog-zen4",
    )
    yield (
        "A fleet for a million users",
        "machines of two cores, simulated",
        f"{fleet['serving_machines']} that serve, {fleet['learning_machines']} that learn",
        "fleet-cost-zen4",
    )
    rates = {
        name: f"{rate:.3g}"
        for name, rate in results["serve-amx"]["tokens_per_second"].items()
        if rate
    }
    yield (
        "bench serve",
        "16 users with 16 different adapters in one batch",
        f"{rates['own_mixed_16']} tokens a second; PEFT {rates['peft_mixed_16']}, "
        f"vLLM's CPU server {rates['vllm_mixed_16']} with 4 adapters",
        "serve-amx",
    )
    loads = {
        name: _extent([float(f"{each:.3g}") for each in results["attach-amx"]["spread"][name]])
        for name in ("disk_to_slot", "peft_load")
    }
    yield (
        "bench attach",
        "an adapter from its file into the batch",
        f"{loads['disk_to_slot']} ms; PEFT {loads['peft_load']} ms",
        "attach-amx",
    )
    yield (
        "bench busy",
        "a chat beside a program that computes",
        f"{results['busy-zen4']['ratios']['chat_beside_1_vs_quiet']:.2g} times the quiet rate",
        "busy-zen4",
    )
    yield (
        "bench promote",
        "time between two tokens during a promotion, p99",
        f"{results['promote-zen4']['ratios']['stall_p99']:.2g} times the quiet one",
        "promote-zen4",
    )
    wave, llamacpp = results["wave-zen4"], results["engines-llamacpp-zen4"]
    yield (
        "bench wave",
        f"{wave['users']:,} users with one request each",
        f"{wave['tokens_per_second']:.3g} tokens a second",
        "wave-zen4",
    )
    yield (
        "llama.cpp",
        "memory of a process that serves",
        f"{llamacpp['memory_mb']} MB",
        "engines-llamacpp-zen4",
    )
    direct = results["engines-vllm-zen4"]["vllm"]["engine_over_direct"]["median"]
    yield "vLLM", "rate over that of a direct client", f"{direct:.2g}", "engines-vllm-zen4"
    replicas = results["engines-fleet-zen4"]["fleet"]["two_over_one"]["median"]
    yield "A fleet", "two vLLM replicas over one", f"{replicas:.3g} times", "engines-fleet-zen4"
    recall = results["learn-amx"]["recall"]
    yield (
        "bench learn",
        "twenty facts of each of twelve people, unseen wordings, layers alone",
        f"{100 * recall['adapter']:.0f} % recalled; base {100 * recall['base']:.0f} %",
        "learn-amx",
    )
    prose = results["edits-amx"]["styles"]
    asked, base, greedy = (sum(each[key] for each in prose) for key in ("asked", "base", "greedy"))
    yield (
        "bench edits",
        "realistic edits of prose, unseen replies in the style",
        f"{greedy} of {asked}; base {base}",
        "edits-amx",
    )
    gate = results["gate-zen5"]
    yield (
        "bench gate",
        "bad batches that went live",
        f"{gate['bad_accepted']} of {gate['bad']}",
        "gate-zen5",
    )
    yield (
        "bench gate",
        "good batches that did not go live",
        f"{gate['good_refused']} of {gate['good']}",
        "gate-zen5",
    )
    nulls = results["nulls-zen4"]["kinds"].values()
    live, ran = (sum(each[key] for each in nulls) for key in ("live", "ran"))
    yield "bench nulls", "learns without effect that went live", f"{live} of {ran}", "nulls-zen4"
    accuracy = results["prefeval-smollm2"]["accuracy"]
    yield (
        "bench prefeval",
        "choices that keep a preference, stated as a rule (chance: 25 %)",
        f"{100 * accuracy['rule']['all']:.0f} %; "
        f"without the rule {100 * accuracy['without']['all']:.0f} %",
        "prefeval-smollm2",
    )
    skill = results["skill-zen4"]
    shown, practiced = (skill["stages"][at]["unseen"]["passed"] for at in (0, -1))
    before = skill["before"]
    yield (
        "A skill, shown and then practiced",
        f"unseen tasks passed, of {before['asked']}",
        f"base {before['passed']}; after demonstrations {shown}; after practice {practiced}",
        "skill-zen4",
    )
    for game, name in (("the coin collector", "world-coin-zen4"), ("cooking", "world-cooking-amx")):
        match = results[name]["figures"]["fidelity"]["exact_match"]
        yield (
            "A world model",
            f"next states of unseen games of {game} predicted word for word",
            f"{match['right']} of {match['asked']}",
            name,
        )
    checked = results["world-cooking-amx"]["figures"]["verification"]
    yield (
        "A world model",
        f"games of cooking lost, of {checked['with']['games']}",
        f"{checked['without']['lost']}; with checks {checked['with']['lost']}",
        "world-cooking-amx",
    )


def _find(results: Mapping[str, Result], name: str, wanted: str) -> Table:
    if name not in results:
        raise InvalidInput(
            f"There is no result {name!r} in {RESULTS.name}/.",
            hint=f"Name one of these in the page: {', '.join(results)}.",
        )
    tables = tables_of(results[name])
    if wanted not in tables:
        raise InvalidInput(
            f"The result {name!r} has no table {wanted!r}.",
            hint=f"Name one of these in the page: {', '.join(tables)}.",
        )
    return tables[wanted]


def _caption(result: Result, name: str, folder: Path) -> str:
    measured = result["measured"]
    software = [f"{package} {version}" for package, version in measured["software"].items()]
    where = "; ".join((measured["machine"], *filter(None, [", ".join(software)])))
    commit = f", commit {measured['commit']}" if measured["commit"] else ""
    note = f" {measured['note']}" if measured["note"] else ""
    return f"[Measured {measured['date']}]({_link(name, folder)}){commit}, on {where}.{note}"


def _link(name: str, folder: Path) -> str:
    return Path(os.path.relpath(RESULTS / f"{name}.json", folder)).as_posix()


def _markdown(table: Table) -> str:
    rows = (table.heads, ("---",) * len(table.heads), *table.rows)
    return "\n".join(f"| {' | '.join(map(_cell, row))} |" for row in rows)


def _cell(text: str) -> str:
    """Return a cell on one line. Names of figures are set as code."""
    text = " ".join(text.split()).replace("|", "\\|")
    return re.sub(r"\b[a-z0-9]+(?:_[a-z0-9]+)+\b", r"`\g<0>`", text)


def _extent(figures: list[float]) -> str:
    least, most = min(figures), max(figures)
    return f"{least:g}" if least == most else f"{least:g} to {most:g}"


def main() -> int:
    """Update the tables of all pages."""
    results = read_results()
    for page in find_pages():
        text = page.read_text("utf-8")
        page.write_text(render(text, results, page.parent), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

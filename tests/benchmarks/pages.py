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
    """Return the summary: one figure of each promise, and when it was measured."""
    styles = results["style-zen4"]["styles"]
    serve, attach = results["serve-zen4"], results["attach-zen4"]
    llamacpp, catalog = results["engines-llamacpp-zen4"], results["catalog-zen4"]
    seconds = _extent([round(each["learn_seconds"]) for each in styles])
    in_style = _extent([each["in_style"] for each in styles])
    general = _extent([each["general_right"] for each in styles])
    rates = {name: f"{rate:.3g}" for name, rate in serve["tokens_per_second"].items() if rate}
    loads = {
        name: _extent([float(f"{each:.3g}") for each in attach["spread"][name]])
        for name in ("disk_to_slot", "peft_load")
    }
    rows = (
        (
            f"{len(styles)} styles, each learned from twelve edits",
            f"{seconds} s; {in_style} of 10 unseen questions in the style; "
            f"{general} of {styles[0]['general_asked']} general answers right",
            "style-zen4",
        ),
        (
            "16 users with 16 different adapters in one batch",
            f"{rates['own_mixed_16']} tokens a second; PEFT {rates['peft_mixed_16']}, "
            f"vLLM's CPU server {rates['vllm_mixed_16']} with 4 adapters",
            "serve-zen4",
        ),
        (
            "an adapter from its file into the batch",
            f"{loads['disk_to_slot']} ms; PEFT {loads['peft_load']} ms",
            "attach-zen4",
        ),
        (
            "memory of a process that serves with llama.cpp",
            f"{llamacpp['memory_mb']} MB",
            "engines-llamacpp-zen4",
        ),
        (
            f"find a user's stack in a home with {catalog['users']:,} users",
            f"{catalog['resolve_p99_ms']:.2g} ms at p99",
            "catalog-zen4",
        ),
    )
    dated = (
        (what, figure, f"[{results[name]['measured']['date']}]({_link(name, folder)})")
        for what, figure, name in rows
    )
    return make_table(("what", "measured", "on"), dated)


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

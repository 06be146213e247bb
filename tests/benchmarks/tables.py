"""The tables of each benchmark's result, for the command line and the documentation.

A result is the JSON object that ``--json`` prints. Tables omit rows and columns without figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Result: TypeAlias = Mapping[str, Any]

# Targets by the figure's name.
_WANTED = {
    "mixed_vs_peft": "6",
    "mixed_vs_vllm": "4",
    "mixed_vs_own_base": "0.75",
    "sampled_vs_greedy": "0.9",
    "base_vs_generate": "2",
    "one_vs_peft": "2",
    "disk_to_slot": "5",
    "peft_vs_disk_to_slot": "40",
    "chat_beside_1_vs_quiet": "0.6",
    "learn_beside_1_times_as_long": "1.8",
    "learn_beside_2_times_as_long": "2.5",
    "stall_p99": "1.5",
    "merged_vs_adapter_handoff": "50",
    "wave_vs_resident": "0.6",
    "stack_over_bare": "0.85",
    "switch_resident": "5",
    "switch_from_disk": "20",
    "memory_mb": "400",
    "agreement": "9 of 10",
    "unseen_ms": "100",
    "engine_over_direct": "0.97",
    "two_over_one": "1.8, with the cores of two machines",
    "adherence after 12 edits": "95 %",
    "adherence after 24 mixed": "95 %",
    "recall": "95 %",
    "overwrite": "95 %",
    "locality": "98 %",
    "retention": "95 %",
    "bad_updates_accepted": "0",
}
# Headings of a persona's figures in bench learn, and their names.
_BY_PERSON = {
    "recall": "recall",
    "overwrite": "overwrite",
    "locality": "locality",
    "retention": "retention",
    "in style after 24 mixed": "adherence.after_24_mixed",
    "in style at the end": "adherence.at_the_end",
}
_SPREAD_HEADS = ("figure", "median", "least and most", "unit", "wanted")
# Results of one table: its name, and the unit of each group of figures.
_SPREADS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "attach": ("loads", {"milliseconds": "ms", "ratios": "times"}),
    "start": ("first token", {"seconds": "s"}),
    "prompts": ("prompts", {"milliseconds": "ms", "ratios": "times"}),
    "streams": ("streams", {"seconds": "s", "ratios": "times"}),
    "encryption": ("encryption", {"ratios": "times the plain home", "milliseconds": "ms"}),
    "busy": ("rates", {"rates": "a second", "ratios": "times"}),
}


@dataclass(frozen=True, slots=True)
class Table:
    """Cells of text under headings."""

    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def make_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table without empty rows and columns. The first column holds the rows' names."""
    filled = [tuple(row) for row in rows if any(row[1:])]
    used = [at for at in range(len(heads)) if at == 0 or any(row[at] for row in filled)]
    return Table(
        tuple(heads[at] for at in used), tuple(tuple(row[at] for at in used) for row in filled)
    )


def tables_of(result: Result) -> Mapping[str, Table]:
    """Return the non-empty tables of a result by name. Plotted benchmarks have none."""
    bench = result["bench"]
    tables = dict(_TABLES[bench](result)) if bench in _TABLES else {}
    if bench in _SPREADS:
        name, units = _SPREADS[bench]
        rows = (
            row
            for key, unit in units.items()
            for row in _spread_rows(result, result.get(key, {}), unit)
        )
        tables[name] = make_table(_SPREAD_HEADS, rows)
    return {name: table for name, table in tables.items() if table.rows}


def _style(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "style": each["style"],
            "verdict": each["verdict"],
            "in style": _of(each, "in_style", 10),
            "base": _of(each, "base_in_style", 10),
            "general right": _of(each, "general_right", each.get("general_asked")),
            "general kept": _of(each, "facts_kept", each.get("facts_before")),
            "probes kept": _of(each, "probes_kept", each.get("probes_before")),
            "KL, nats a token": _fixed(each.get("kl"), 2),
            "learn, s": _fixed(each.get("learn_seconds"), 1),
            "rollback the same": {True: "yes", False: "NO"}.get(each.get("rollback_identical"), ""),
        }
        for each in result["styles"]
    )
    yield "styles", _table_of(rows)
    process = (
        ("first token of a fresh process, s", _fixed(result.get("first_token_seconds"), 1)),
        (
            "the same for a user with a fact, s",
            _fixed(result.get("first_token_with_facts_seconds"), 1),
        ),
        ("peak memory of the process that learned, MB", _whole(result.get("peak_mb"))),
    )
    yield "process", make_table(("figure", "measured"), process)


def _rebase(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "style": each["style"],
            "verdict": each["outcome"],
            **{name: _plain(each[name]) for name in ("improved", "regressed", "tied")},
            "nats a byte before": _fixed(each["before"], 3),
            "after": _fixed(each["after"], 3),
            "leakage, AUC": _fixed(each["leakage"], 2),
            "learn, s": _fixed(each["learn_seconds"], 0),
            "rebase, s": _fixed(each["rebase_seconds"], 0),
        }
        for each in result["users"]
    )
    yield "moves", _table_of(rows)


def _catalog(result: Result) -> Iterator[tuple[str, Table]]:
    users = result["users"]
    names = {
        "open_seconds": "open the home, s",
        "resolve_p50_ms": "resolve a stack, median, ms",
        "resolve_p99_ms": "resolve a stack, p99, ms",
        "resolve_cold_p50_ms": "resolve a stack cold, median, ms",
        "resolve_cold_p99_ms": "resolve a stack cold, p99, ms",
        "list_page_ms": "list a page of 100 users, ms",
        "publish_per_second": "promotions a second by one writer",
        "collect_seconds": f"collect {result['collected']} leftovers, s",
        "rss_mb": "peak memory of opening, resolving and listing, MB",
        "build_seconds": "build the home, s",
        "home_mb": "size of the home, MB",
    }
    rows = (
        (name, _plain(result.get(key)), _plain(result.get(f"{key}_at_1_percent")))
        for key, name in names.items()
    )
    yield "catalog", make_table(("figure", f"{users:,} users", f"{users // 100:,} users"), rows)


def _fleet_cost(result: Result) -> Iterator[tuple[str, Table]]:
    load, machine, mint = result["load"], result["machine"], result["mint_gpus"]
    learns = machine["learn_seconds"]
    rows = (
        ("active users of all", f"{load['active']:,} of {load['users']:,}"),
        (
            "tokens/s of a machine, one row and all",
            f"{machine['one_row']:g}, {machine['all_rows']:g}",
        ),
        ("a learn, s", f"{min(learns):g} to {max(learns):g}"),
        ("machines that serve", f"{result['serving_machines']:,}"),
        ("active users a machine", f"{result['users_a_machine']:,}"),
        (
            "a reply begins and ends, p95, s",
            f"{result['wait_p95_seconds']:g}, {result['reply_p95_seconds']:g}",
        ),
        ("machines that learn", f"{result['learning_machines']:,}"),
        (
            "learns a day, of them lost and repeated",
            f"{result['learns_a_day']:,}, {result['learns_lost_a_day']:,}",
        ),
        (
            "from a session's end to the promotion, p95, minutes",
            f"{result['learn_p95_minutes']:g}",
        ),
        ("promotions a second, homes", f"{result['publications_a_second']:g}, {result['homes']}"),
        ("sent between machines, MB/s", f"{result['moved_mb_a_second']:g}"),
        ("adapters and home, GB", f"{result['adapters_gb']:,}, {result['home_gb']:g}"),
        ("GPUs of MinT, for larger bases", f"{mint[0]} + {mint[1]}"),
    )
    yield "fleet", make_table(("figure", "simulated"), rows)


def _serve(result: Result) -> Iterator[tuple[str, Table]]:
    yield "rates", _spread_table(result, result["tokens_per_second"], "tokens/s")
    yield "ratios", _spread_table(result, result["ratios"])


def _soak(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "figure": name,
            "second quarter": f"{result[name]['second_quarter']:.4g}",
            "last quarter": f"{result[name]['last_quarter']:.4g}",
            "ratio": f"{result[name]['ratio']:.3f}",
        }
        for name in ("memory_mb", "open_files", "threads")
    )
    yield "soak", _table_of(rows)


def _promote(result: Result) -> Iterator[tuple[str, Table]]:
    handoff = {"merged_vs_adapter_handoff": result.get("merged_vs_adapter_handoff")}
    rows = [
        *_spread_rows(result, result["milliseconds"], "ms"),
        *_spread_rows(result, {**result["ratios"], **handoff}, "times"),
    ]
    yield "gaps", make_table(_SPREAD_HEADS, rows)


def _weights(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "shape": each["shape"],
            "blocks": f"{each['blocks']} of {each['of_blocks']}",
            "file, MB": _whole(each["file_mb"]),
            "tokens/s": _plain(each["tokens_per_second"].get("mapped")),
            "tokens/s, loaded": _plain(each["tokens_per_second"].get("loaded")),
            "file over loaded": _range(each.get("mapped_over_loaded")),
            "peak, MB": _whole(each["peak_mb"].get("mapped")),
            "not of files, MB": _whole(each["anonymous_mb"].get("mapped")),
            "peak, loaded, MB": _whole(each["peak_mb"].get("loaded")),
        }
        for each in result["shapes"]
    )
    yield "weights", _table_of(rows)


def _wave(result: Result) -> Iterator[tuple[str, Table]]:
    units = {
        "tokens_per_second": "tokens/s",
        "sampled_tokens_per_second": "tokens/s",
        "resident_tokens_per_second": "tokens/s",
        "p50_first_token_seconds": "s",
        "p95_first_token_seconds": "s",
        "read_from_disk": "stacks",
        "read_from_host": "stacks",
    }
    rows = [
        row
        for key, unit in units.items()
        if key in result
        for row in _spread_rows(result, {key: result[key]}, unit)
    ]
    rows += _spread_rows(result, result.get("ratios", {}), "times")
    yield "wave", make_table(_SPREAD_HEADS, rows)


def _engines(result: Result) -> Iterator[tuple[str, Table]]:
    heads = ("figure", "median (least to most)", "wanted")
    memory = f"memory without torch, {result.get('memory_tokens')} tokens of context filled (MB)"
    rows = [
        *_named(result.get("tokens_per_second"), "tokens a second, {}"),
        ("with a layer over without", _range(result.get("stack_over_bare")), "stack_over_bare"),
        ("sampled over greedy", _range(result.get("sampled_vs_greedy")), "sampled_vs_greedy"),
        *_named(result.get("first_token_ms"), "first token, {} (ms)"),
        *_named(result.get("switch_ms"), "a switch of user, {} (ms)", "switch_{}"),
        (memory, _whole(result.get("memory_mb")), "memory_mb"),
        *_agreement(result.get("agreement")),
    ]
    yield "llama.cpp", make_table(heads, _with_targets(rows))
    if vllm := result.get("vllm"):
        requests = f"{vllm.get('requests')} requests"
        rows = [
            *_named(vllm.get("first_token_ms"), "first token, {} user (ms)"),
            (
                "first token, unseen later than seen (ms)",
                _range(vllm.get("unseen_ms")),
                "unseen_ms",
            ),
            *_named(vllm.get("tokens_per_second"), f"{requests}, {{}}, tokens a second"),
            (
                f"{requests}, engine over direct",
                _range(vllm.get("engine_over_direct")),
                "engine_over_direct",
            ),
            *_agreement(vllm.get("agreement")),
        ]
        yield "vLLM", make_table(heads, _with_targets(rows))
    if fleet := result.get("fleet"):
        requests = f"{fleet['requests']} requests"
        rows = [
            *_named(fleet["tokens_per_second"], f"{requests}, replicas: {{}}, tokens a second"),
            (f"{requests}, two replicas over one", _range(fleet["two_over_one"]), "two_over_one"),
            ("requests that went where their stack was", f"{100 * fleet['at_home']:.3g} %", ""),
        ]
        yield "fleet", make_table(heads, _with_targets(rows))


def _server(result: Result) -> Iterator[tuple[str, Table]]:
    rows = [
        *_named(result["first_token_ms"], "first token, {} (ms)"),
        ("first token, server over library (ms)", _range(result.get("first_token_overhead_ms"))),
        *_named(result["tokens_per_second"], "16 streams, {}, tokens a second"),
        ("16 streams, server over library", _range(result.get("rate_ratio"))),
        ("16 streams, sampled over greedy", _range(result.get("sampled_vs_greedy"))),
        ("healthz meanwhile (ms)", _range(result.get("healthz_ms"))),
    ]
    yield "server", make_table(("figure", "median (least to most)"), (row[:2] for row in rows))


def _page(result: Result) -> Iterator[tuple[str, Table]]:
    names = {
        "least_ms": "first paint of one word without a server, ms",
        "first_paint_cold_ms": "first paint, empty cache, ms",
        "first_paint_warm_ms": "first paint, files in the cache, ms",
        "ready_cold_ms": "last conversation readable, empty cache, ms",
        "ready_warm_ms": "last conversation readable, files in the cache, ms",
    }
    rows = [(name, _range(result.get(key))) for key, name in names.items()]
    rows.append(("size of the page, bytes", _whole(result.get("bytes"))))
    yield "page", make_table(("figure", "median (least to most)"), rows)


def _learn(result: Result) -> Iterator[tuple[str, Table]]:
    contestants = list(result.get("adherence", {}))

    def row(name: str, count: str, shares: Mapping[str, float | None]) -> Sequence[str]:
        cells = [
            _counted(shares.get(each), result["counts"].get(each, {}).get(count))
            for each in contestants
        ]
        return (name, *cells, _WANTED.get(name, "") if any(cells) else "")

    moments = dict.fromkeys(m for each in contestants for m in result["adherence"][each])
    rows = [
        *(
            row(
                f"adherence {moment.replace('_', ' ')}",
                f"adherence.{moment}",
                {each: result["adherence"][each].get(moment) for each in contestants},
            )
            for moment in moments
        ),
        *(
            row(figure, figure, result.get(figure, {}))
            for figure in ("recall", "overwrite", "locality", "retention")
        ),
        (
            "bad_updates_accepted",
            *(
                _of(result.get("bad_updates_accepted", {}), each, len(result["people"]))
                for each in contestants
            ),
            _WANTED["bad_updates_accepted"],
        ),
    ]
    if contestants:
        yield "shares", make_table(("figure", *contestants, "wanted"), rows)
    rates, seconds = result.get("tokens_per_second", {}), result.get("seconds_per_learn", {})
    speed = [
        ("tokens a second", *(_plain(rates.get(c)) for c in contestants)),
        *(
            (
                f"seconds a learn, {layer}",
                *(_plain(seconds.get(c, {}).get(layer)) for c in contestants),
            )
            for layer in ("style", "memory")
        ),
    ]
    yield "speed", make_table(("figure", *contestants), speed)
    by_person = [
        (
            name,
            *(_of_pair(figures.get("adapter", {}).get(figure)) for figure in _BY_PERSON.values()),
        )
        for name, figures in result["by_person"].items()
    ]
    yield "by person", make_table(("layers alone", *_BY_PERSON), by_person)


def _edits(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "style": each["name"],
            **{way: _of(each, way, each["asked"]) for way in ("base", "greedy", "sampled")},
            "verdict": each["verdict"],
            "learn, s": _fixed(each["seconds"], 1),
            "general": _of(each, "general", each["general_asked"]),
        }
        for each in result["styles"]
    )
    yield "styles", _table_of(rows)


def _thumbs(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "likes": each["name"],
            "thumbs up, down": f"{each['up']}, {each['down']}",
            "before": _of(each, "before", each["asked"]),
            "after": _of(each, "after", each["asked"]),
            "verdict": each["verdict"],
            "items improved, regressed": f"{each['improved']}, {each['regressed']}",
            "learn, s": _fixed(each["seconds"], 1),
            "general": _of(each, "general", each["general_asked"]),
        }
        for each in result["users"]
    )
    yield "users", _table_of(rows)


def _gate(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {"kind": name, "ran": f"{each['ran']}", "became live": f"{each['live']}"}
        for name, each in result["by_kind"].items()
    )
    yield "kinds", _table_of(rows)
    rows = (
        {
            "kind": each["kind"],
            "batch": each["name"],
            "live": "live" if each["live"] else "no",
            "s": _fixed(each["seconds"], 1),
            "why": "; ".join(each["learns"]),
        }
        for each in result.get("cases", ())
    )
    yield "batches", _table_of(rows)


def _nulls(result: Result) -> Iterator[tuple[str, Table]]:
    rows = (
        {
            "kind": kind,
            "ran": f"{each['ran']}",
            "went live": f"{each['live']}",
            "for good": f"{each['for_good']}",
        }
        for kind, each in result["kinds"].items()
    )
    yield "kinds", _table_of(rows)


def _prefeval(result: Result) -> Iterator[tuple[str, Table]]:
    topics = {**result["asked"], "all": sum(result["asked"].values())}
    rows = (
        {
            "topic": f"{topic}, {count}",
            **{way: _percent(shares[topic]) for way, shares in result["accuracy"].items()},
        }
        for topic, count in topics.items()
    )
    yield "topics", _table_of(rows)


def _skill(result: Result) -> Iterator[tuple[str, Table]]:
    base = {"name": "nothing (the base)", "unseen": result["before"]}
    rows = (
        {
            "after": each["name"],
            "passed": _of(each["unseen"], "passed", each["unseen"]["asked"]),
            "95 %": f"{_percent(each['unseen']['least'])} to {_percent(each['unseen']['most'])}",
            "attached": _whole(each["unseen"].get("attached")),
            "verdict": each.get("verdict", ""),
            "reason": each.get("reason", ""),
            "steps": _whole(each.get("steps")),
            "seconds": _fixed(each.get("seconds"), 0),
        }
        for each in (base, *result["stages"])
    )
    yield "stages", _table_of(rows)


def _world(result: Result) -> Iterator[tuple[str, Table]]:
    figures: Mapping[str, Any] = result["figures"]
    fidelity, checks = figures.get("fidelity", {}), figures.get("verification", {})
    names = {
        "exact_match": "exact match",
        "copied": "copy of the state before",
        "seen": "state seen before",
    }
    rows = [(name, _rate(fidelity.get(key)), "") for key, name in names.items()]
    if fidelity:
        learned = f"{fidelity['transitions']} transitions, {fidelity['steps']} steps"
        learned += f", {fidelity['learn_seconds']:.0f} s"
        rows.append(("learned", learned, fidelity["verdict"]))
    for agent, each in figures.get("consistency", {}).items():
        if isinstance(each, Mapping):
            pair = f"{_rate(each['real'])}, replayed {_rate(each['replayed'])}"
            rows.append((f"consistency of the agent: {agent}", f"{each['ratio']:.2f}", pair))
    for name in ("without", "with"):
        if each := checks.get(name):
            lost = f"{each['lost']} lost, {each['won']} won of {each['games']}"
            rows.append((f"games {name} verification", lost, f"{each['checks']} checks"))
    for name in ("without", "with"):
        if each := figures.get("warm-start", {}).get(name):
            rates = ", ".join(f"{rate:.0%}" for rate in each)
            rows.append((f"games won by a skill {name} warm start", rates, "by seed"))
    for name in ("real", "imagined", "both"):
        if each := figures.get("synthetic", {}).get(name):
            of = f"{each['trajectories']} trajectories"
            rows.append((f"skill of {name}", f"{each['success']:.0%}", of))
    wanted = {"exact match": {"coin": "95 %", "cooking": "80 %"}.get(result["game"], "")}
    heads = ("figure", "measured", "of", "wanted")
    yield "world", make_table(heads, [(*row, wanted.get(row[0], "")) for row in rows if row[1]])


_TABLES: Mapping[str, Callable[[Result], Iterable[tuple[str, Table]]]] = {
    "style": _style,
    "catalog": _catalog,
    "fleet-cost": _fleet_cost,
    "serve": _serve,
    "soak": _soak,
    "promote": _promote,
    "wave": _wave,
    "weights": _weights,
    "engines": _engines,
    "server": _server,
    "page": _page,
    "learn": _learn,
    "edits": _edits,
    "rebase": _rebase,
    "thumbs": _thumbs,
    "gate": _gate,
    "nulls": _nulls,
    "prefeval": _prefeval,
    "world": _world,
    "skill": _skill,
}


def _table_of(rows: Iterable[Mapping[str, str]]) -> Table:
    """Make a table of rows that have their cells by the headings."""
    rows = list(rows)
    return make_table(tuple(rows[0]) if rows else (), (tuple(row.values()) for row in rows))


def _spread_table(result: Result, figures: Result, unit: str = "") -> Table:
    return make_table(_SPREAD_HEADS, _spread_rows(result, figures, unit))


def _spread_rows(result: Result, figures: Result, unit: str) -> Iterator[Sequence[str]]:
    """Yield a row for each figure: its median, least and most. None means it was not run."""
    for key, figure in figures.items():
        least_and_most = result.get("spread", {}).get(key)
        between = " to ".join(f"{each:.4g}" for each in least_and_most) if least_and_most else ""
        median = f"{figure:.4g}" if figure is not None else "" if between else "not run"
        yield key, median, between, unit if median != "not run" else "", _WANTED.get(key, "")


def _named(figures: Result | None, name: str, target: str = "") -> Iterator[tuple[str, str, str]]:
    for key, figure in (figures or {}).items():
        yield name.format(key), _range(figure), target.format(key.replace(" ", "_"))


def _agreement(agreement: Result | None) -> Iterator[tuple[str, str, str]]:
    for key, each in (agreement or {}).items():
        same = _of(each, "same", each["prompts"])
        yield f"first greedy tokens as on torch, {key}", same, "agreement"
        difference = _plain(each.get("logprob_difference"))
        yield f"mean log-prob difference, {key} (nats)", difference, ""


def _with_targets(rows: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """Replace the name of a target by the target. A row without a figure has none."""
    for name, figure, target in rows:
        yield name, figure, _WANTED.get(target, "") if figure else ""


def _range(spread: Result | None) -> str:
    if spread is None:
        return ""
    return f"{spread['median']:.4g} ({spread['least']:.4g} to {spread['most']:.4g})"


def _percent(share: float) -> str:
    """Return whole per cents, with halves rounded up."""
    return f"{int(100 * share + 0.5)} %"


def _counted(share: float | None, asked: int | None) -> str:
    if share is None or not asked:
        return ""
    right = round(share * asked)
    return f"{right} of {asked} ({_percent(right / asked)})"


def _of(figures: Result, key: str, asked: int | None) -> str:
    return "" if figures.get(key) is None or asked is None else f"{figures[key]} of {asked}"


def _rate(share: Result | None) -> str:
    return f"{share['rate']:.1%} ({share['right']} of {share['asked']})" if share else ""


def _of_pair(tally: Sequence[int] | None) -> str:
    return f"{tally[0]} of {tally[1]}" if tally else ""


def _fixed(figure: float | None, digits: int) -> str:
    return "" if figure is None else f"{figure:.{digits}f}"


def _plain(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.4g}"


def _whole(figure: int | None) -> str:
    return "" if figure is None else f"{figure:,}"

"""Render the statement of a certificate as a page that a person can read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

_KINDS = {
    "item": "One item",
    "conversation": "A conversation",
    "layer": "A layer with all that it was taught",
    "user": "A whole user",
}
_SHOWN = 20


def render(statement: Mapping[str, Any], public_key: str, signature: str) -> str:
    """Return Markdown.

    Args:
        statement: The statement of a certificate of this version.
        public_key: The key that signed it.
        signature: The signature.
    """
    request = statement["request"]
    lines = [
        "# Certificate of erasure",
        "",
        f"{_KINDS.get(request['kind'], 'Something')} was forgotten on {request['at'][:10]} at "
        f"{request['at'][11:19]} UTC. This page has no words of it. Users, items and skills are named "
        "by HMACs, which only the home can tell.",
        "",
        *_table(
            [
                ("request", request["id"]),
                ("user", request["user"][:16]),
                ("method", statement["method"]),
                ("base", statement["base"]),
                ("environment", statement["environment_digest"]),
                ("keys destroyed", ", ".join(statement["keys_destroyed"]) or "none"),
                ("hash chain", _chain(statement["chain"])),
            ]
        ),
        "",
        "## Erased",
        "",
        *_closure(statement),
        "",
        "## Live revisions",
        "",
        *_revisions(statement),
        "",
        "## Would it be the same without the item?",
        "",
        *_equality(statement["equality"]),
        "",
        "## Does the model still know it?",
        "",
        *_exposure(statement["exposure"]),
        "",
        "## What remains",
        "",
        *_remains(statement["remains"]),
        "",
        "## Signature",
        "",
        "Ed25519, by the key of the home. `personalpeft verify-certificate` checks the JSON beside "
        "this page.",
        "",
        f"- key: `{public_key}`",
        f"- signature: `{signature}`",
    ]
    return "\n".join(lines) + "\n"


def _table(rows: Iterable[tuple[str, object]]) -> list[str]:
    return ["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _chain(chain: Mapping[str, Any] | None) -> str:
    if chain is None:
        return "erased with the user"
    return f"{chain['head']} after {chain['entries']} entries"


def _closure(statement: Mapping[str, Any]) -> Iterator[str]:
    closure = statement["closure"]
    for name in ("turns", "signals", "emptied", "revisions"):
        label = "replies emptied" if name == "emptied" else name
        yield f"- {label}: {_list(closure[name])}"
    for name in ("reports", "vectors", "files"):
        if name in closure:
            yield f"- {name}: {closure[name]}"
    if not closure["complete"]:
        yield "- not complete: another program reads an older state, and its end completes it"


def _revisions(statement: Mapping[str, Any]) -> Iterator[str]:
    revisions = statement["revisions"]
    yield "| | layer | digest | inputs | recipe |"
    yield "| --- | --- | --- | --- | --- |"
    for when in ("before", "after"):
        for each in revisions[when]:
            digests = " | ".join(each[name][:16] for name in ("digest", "inputs", "recipe"))
            yield f"| {when} | {each['layer']} | {digests} |"
    if not revisions["after"]:
        yield "| after | none: the bare base answers | | | |"
    yield ""
    for each in statement["rebuilt"]:
        yield f"- {each['layer']} was built again: {each['outcome']}"
    for layer in statement["not_rebuilt"]:
        yield f"- {layer} was not built again"


def _equality(equality: Mapping[str, Any]) -> Iterator[str]:
    if equality["check"] == "none" or equality["holds"] is None:
        yield "Nothing was to be checked: no revision is live."
        return
    yield (
        "Checked: whether any live revision has an erased signal or revision among its inputs, at any "
        "depth. A build depends on its inputs alone."
    )
    yield ""
    for each in equality["revisions"]:
        verdict = "no erased input" if each["holds"] else "NOT SHOWN: an erased or unknown input"
        yield f"- {each['digest'][:16]}: {verdict}"
    yield ""
    if not equality.get("rebuilds"):
        yield "Not checked: a second build and its bytes."
    for each in equality.get("rebuilds", ()):
        yield f"- {each['digest'][:16]}, built a second time: {each['outcome']}"


def _exposure(exposure: Mapping[str, Any]) -> Iterator[str]:
    if not exposure["results"]:
        yield f"Not measured: {exposure['not_measured']}."
        return
    count = exposure["unseen"]
    yield (
        f"Each forgotten answer was ranked among {count} texts of its form that no model saw. Exposure "
        f"is log2 of {count + 1} over its rank (Carlini et al. 2019). A text that was never seen has "
        "1.4 bits and an AUC of 0.5 on average, and any value by chance."
    )
    yield ""
    yield "| item | exposure before, after | AUC before, after | said by the model before, after |"
    yield "| --- | --- | --- | --- |"
    for each in exposure["results"]:
        sides = (each["before"], each["after"])
        bits, auc = (", ".join(str(side[name]) for side in sides) for name in ("bits", "auc"))
        said = ", ".join("yes" if side["extracted"] else "no" for side in sides)
        yield f"| {each['item']} | {bits} | {auc} | {said} |"


def _remains(remains: Mapping[str, Any]) -> Iterator[str]:
    for backup in remains["backups"]:
        copies = "not reachable now" if backup["copies"] is None else f"{backup['copies']} copies"
        yield f"- backups in {backup['folder']}: {copies}; a restore forgets it again"
    for label, key in (
        ("a former home that a restore replaced", "former_homes"),
        ("published stacks, and their copies elsewhere", "published"),
        ("generated on another server", "remote_engines"),
    ):
        if remains[key]:
            yield f"- {label}: {_list(remains[key])}"
    if remains["mentions"]:
        yield f"- the same words in other items: {_list(remains['mentions'])}"
    yield f"- exported files: {_exports(remains['exports'])}"
    # Certificates of earlier versions have no counts of plugins.
    for name, counts in remains.get("plugins", {}).items():
        kept = "not known" if counts is None else _counts(counts)
        yield f"- kept by the plugin {name}: {kept}"
    yield f"- logs: {remains['logs']}"


def _exports(exports: Sequence[Mapping[str, Any]] | str) -> str:
    # Earlier versions recorded no exports, and said so.
    if isinstance(exports, str):
        return exports
    return _list([f"{each['kind']} of {each['at'][:16]}" for each in exports])


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in counts.items())


def _list(values: Sequence[str]) -> str:
    if not values:
        return "none"
    shown = ", ".join(each[:32] for each in values[:_SHOWN])
    return shown + (f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else "")

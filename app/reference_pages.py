"""Write the reference pages that come from docstrings and tables of the code.

`python -m personalpeft_app.reference_pages FOLDER` writes them all; `make docs` runs it.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import personalpeft
from personalpeft import errors
from personalpeft.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS
from personalpeft.errors import ERROR_CODES, PersonalPeftError
from personalpeft.runtime import Runtime
from personalpeft.settings import CACHE, HOME, PLUGINS, VLLM, Serving, VllmServer
from personalpeft.user import User
from personalpeft_app.client.transport import NotAllowed, Unreachable
from personalpeft_app.daemon.settings import FILE, TABLE
from personalpeft_app.daemon.settings import Settings as DaemonSettings
from personalpeft_app.http.metrics import OWN_GAUGES, PREFIX
from personalpeft_app.options import BASE
from personalpeft_app.options import USER as USER_VARIABLE

_MADE = "`make docs` writes this page from the code.\n"

_VARIABLES = {
    HOME: "The home. Default: the platform's folder for user data.",
    CACHE: "The folder for files that can be made again: prepared bases, kernels. Default: the "
    "platform's cache folder.",
    PLUGINS: "Names of the plugins that may load, separated by commas. Default: all.",
    USER_VARIABLE: "The user of commands without `--user`. Default: your login name.",
    BASE: f"The base of commands without `--base`. Default: `{personalpeft.DEFAULT_BASE}`.",
    "PERSONALPEFT_KERNELS": "The instruction set of compiled kernels, such as `avx2`; `plain` for none. "
    "Default: the best that this processor has.",
    "NO_COLOR": "Any value turns colours off.",
}

_HOME_FILES = {
    "personalpeft.db": "The SQLite database: ledger, revisions, reports, tokens' digests.",
    "blobs/": "The adapter files of revisions, named by digest.",
    "sessions/": "Checkpoints of unfinished learns.",
    "locks/": "The leases of running learns.",
    "models/": "Your own cards.",
    FILE: "Your settings; personalpeft only reads it.",
    "token": "The first admin token, readable by you alone.",
    "backups/": "The daemon's backups.",
}


def python() -> str:
    """Return the page of the Python interface."""
    lines = ["# Python", "", _MADE]
    lines += [
        "Import `personalpeft`; importing loads no model. Everything public is listed here.",
        "",
    ]
    lines += ["## `personalpeft.open`", "", *_signature("open", personalpeft.open), ""]
    for kind in (Runtime, User):
        lines += [f"## `{kind.__name__}`", "", _cell(_first_paragraph(kind)), ""]
        for name, member in _public_members(kind):
            lines += [f"### `{kind.__name__}.{name}`", "", *_signature(name, member), ""]
    lines += ["## Other names", "", "| name | meaning |", "| --- | --- |"]
    listed = {"Runtime", "User", "open"}
    for name in sorted(set(personalpeft.__all__) - listed):
        value = getattr(personalpeft, name)
        if not (inspect.isclass(value) and issubclass(value, PersonalPeftError)):
            lines.append(f"| `{name}` | {_cell(_meaning(value))} |")
    lines += ["", "[Errors](errors.md) lists the exceptions."]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the page of errors."""
    lines = [
        "# Errors",
        "",
        _MADE,
        "Every error is a `PersonalPeftError` with a message and a `hint` that says what to do. An "
        "error has changed nothing, unless its description says otherwise.",
        "",
        "| error | meaning | exit code | HTTP status |",
        "| --- | --- | --- | --- |",
    ]
    for kind, codes in sorted(ERROR_CODES.items(), key=lambda item: item[0].__name__):
        lines.append(
            f"| `{kind.__name__}` | {_cell(_first_paragraph(kind))} "
            f"| {codes.exit_code} | {codes.http_status} |"
        )
    lines += ["", "The HTTP client raises two more:", "", "| error | meaning |", "| --- | --- |"]
    for kind in (NotAllowed, Unreachable):
        lines.append(f"| `{kind.__name__}` | {_cell(_first_paragraph(kind))} |")
    lines += ["", f"All are in `{errors.__name__}`; most can be imported from `personalpeft`."]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of metrics."""
    lines = [
        "# Metrics",
        "",
        _MADE,
        "`GET /metrics` of a server answers an admin token in the text format of Prometheus. Names "
        "after the prefix are vLLM's where they mean the same. No label names a user.",
        "",
        "| metric | type | meaning |",
        "| --- | --- | --- |",
    ]
    kinds: Mapping[str, Mapping[str, str]] = {
        "counter": COUNTERS,
        "gauge": {**OWN_GAUGES, **GAUGES},
        "histogram": HISTOGRAMS,
    }
    for kind, metrics in kinds.items():
        lines += [
            f"| `{PREFIX}{name}` | {kind} | {_cell(text)} |" for name, text in metrics.items()
        ]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """Return the page of environment variables, settings and files."""
    lines = ["# Configuration", "", _MADE]
    lines += ["## Environment variables", "", "| variable | meaning |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in _VARIABLES.items()]
    described = _attributes(VllmServer)
    lines += [
        f"| `{VLLM}{'CA' if each.name == 'certificate' else each.name.upper()}` "
        f"| {_cell(described[each.name])} |"
        for each in fields(VllmServer)
    ]
    lines += ["", "## The daemon", "", f"The table `[{TABLE}]` of `{FILE}` in the home:", ""]
    lines += _settings_table(DaemonSettings)
    lines += ["", "## The engine", "", "`personalpeft.open(serving=Serving(...))`:", ""]
    lines += _settings_table(Serving)
    lines += ["", "## The home", "", "| file | content |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in _HOME_FILES.items()]
    lines += ["", "[Cards](cards.md) configure a base and its training."]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "python.md": python,
    "errors.md": errors_page,
    "metrics.md": metrics,
    "configuration.md": configuration,
}


def _public_members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, member in vars(kind).items():
        if not name.startswith("_") and (
            inspect.isfunction(member) or isinstance(member, property)
        ):
            yield name, member


def _signature(name: str, member: Any) -> list[str]:
    """Return the signature as a code block, and the docstring."""
    text = _prose(inspect.getdoc(member) or "")
    if isinstance(member, property):
        return text
    signature = inspect.signature(member)
    parameters = []
    for key, each in signature.parameters.items():
        if each.kind is each.KEYWORD_ONLY and "*" not in "".join(parameters):
            parameters.append("*")
        if key != "self":
            parameters.append(_parameter(each))
    call = f"{name}({', '.join(parameters)}) -> {signature.return_annotation}"
    if len(call) > 96:
        inside = "".join(f"    {each},\n" for each in parameters)
        call = f"{name}(\n{inside}) -> {signature.return_annotation}"
    return ["```text", call, "```", "", *text]


def _parameter(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    text = f"{star}{parameter.name}: {parameter.annotation}"
    if parameter.default is parameter.empty:
        return text
    # The text of a function holds its address, which changes from run to run.
    default = "..." if callable(parameter.default) else repr(parameter.default)
    return f"{text} = {default}"


def _prose(docstring: str) -> list[str]:
    """Return a docstring as Markdown: sections in bold, their entries as a list."""
    lines: list[str] = []
    is_entry = False
    for line in docstring.replace("``", "`").splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Attributes):", line):
            lines += [f"**{line.removesuffix(':')}**", ""]
            is_entry = False
        elif entry := re.fullmatch(r"    (\*{0,2}\w[\w, ]*): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
            is_entry = True
        elif is_entry and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
            is_entry = False
    return lines


def _settings_table(kind: Any) -> list[str]:
    described = _attributes(kind)
    lines = ["| key | default | meaning |", "| --- | --- | --- |"]
    for each in fields(kind):
        default = "none" if each.default in (None, MISSING) else f"`{each.default!r}`"
        lines.append(f"| `{each.name}` | {default} | {_cell(described.get(each.name, ''))} |")
    return lines


def _attributes(kind: Any) -> dict[str, str]:
    """Return the descriptions of the fields, from the docstring of the class."""
    found: dict[str, str] = {}
    name = ""
    for line in (inspect.getdoc(kind) or "").splitlines():
        if entry := re.fullmatch(r"    (\w+): (.*)", line):
            name = entry[1]
            found[name] = entry[2]
        elif name and line.startswith("        "):
            found[name] += " " + line.strip()
        else:
            name = ""
    return found


def _meaning(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return _first_paragraph(value)
    return f"`{value!r}`" if isinstance(value, str) else "Type alias."


def _first_paragraph(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


if __name__ == "__main__":
    for page, make in PAGES.items():
        target = Path(sys.argv[1]) / page
        target.with_suffix(".new").write_text(make(), "utf-8")
        target.with_suffix(".new").replace(target)

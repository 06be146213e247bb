"""Write the reference pages that come from commands, docstrings and tables of the code.

Run without arguments to write them all, as `make docs` does; `--check` names those that are out of date.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
import http_api

import personalpeft
from personalpeft.adapters.formats.packed import FORMAT
from personalpeft.adapters.types import Manifest
from personalpeft.base_models.registry import all_cards
from personalpeft.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS
from personalpeft.errors import ERROR_CODES, PersonalPeftError
from personalpeft.runtime import Runtime
from personalpeft.settings import (
    CACHE,
    HOME,
    KEYS,
    LEARNING_DEVICE,
    PASSPHRASE,
    PLUGINS,
    VLLM,
    WEIGHTS,
    Serving,
    VllmServer,
)
from personalpeft.store.rows import COLUMNS, TOMBSTONE
from personalpeft.user import User
from personalpeft_app.cli import PLUGIN_COMMANDS_TITLE, PROGRAM, cli
from personalpeft_app.client.transport import NotAllowed, Unreachable
from personalpeft_app.daemon.settings import FILE, TABLE
from personalpeft_app.daemon.settings import Settings as DaemonSettings
from personalpeft_app.error_output import BROKEN_PIPE, BUG, STOPPED
from personalpeft_app.http.metrics import HTTP_GAUGES, PREFIX
from personalpeft_app.options import BASE, GLOBAL_OPTIONS_TITLE
from personalpeft_app.options import USER as USER_VARIABLE

FOLDER = Path(__file__).parent

_COMMANDS_HEAD = """\
# Commands

`make docs` writes this page from the commands.

Data goes to stdout, progress, notes and errors to stderr. Piped output has no colours and is not
cut to a width. With `--json` every command prints one JSON value, `chat` one for each reply. The
options of every command are listed once, under `personalpeft`. They may stand before or after the
command's name. [Configuration](configuration.md) lists the environment variables.

## Exit codes

0 is success; a refused learn is a report and no error. Each error has its own code
([errors](errors.md)). It is two lines on stderr, `error: ...` and `hint: ...`, or with `--json`
`{"error": {"kind", "message", "hint", "exit_code"}}`. It has changed nothing.
"""
_WIDTH = 96

_MADE = "`make docs` writes this page from the code.\n"

_VARIABLES = {
    HOME: "The home. Default: the platform's folder for user data.",
    CACHE: "The folder for files that can be made again: prepared bases, kernels. Default: the "
    "platform's cache folder.",
    PLUGINS: "Names of the plugins that may load, separated by commas. Default: all.",
    USER_VARIABLE: "The user of commands without `--user`. Default: your login name, or an id made of it.",
    BASE: f"The base of commands without `--base`. Default: `{personalpeft.DEFAULT_BASE}`.",
    "PERSONALPEFT_KERNELS": "The instruction set of compiled kernels, such as `avx2`; `plain` for none. "
    "Default: the best that this processor has.",
    WEIGHTS: "Where torch keeps the base's weights on a processor: `loaded` unpacks them into memory, `mapped` "
    "leaves them in the base's file. Default: `auto`, which loads them if they fit into the free memory.",
    LEARNING_DEVICE: "Where torch learns for a base that vLLM or llama.cpp serves: `cpu` or `cuda`. Default: `auto`, "
    "the GPU if the weights and 3 GB fit into its free memory. Where torch serves, it learns on the same device.",
    KEYS: "The folder of the key files of [encrypted homes](../how-to/encrypt.md). Default: a folder beside "
    "the platform's settings.",
    PASSPHRASE: "The passphrase of a home that is encrypted with one.",
    "NO_COLOR": "Any value turns colours off.",
}

_HOME_FILES = {
    "personalpeft.db": "The SQLite database: ledger, revisions, reports, cached embeddings.",
    "blobs/": "The adapter files of revisions, named by the SHA-256 of their bytes.",
    "sessions/": "Checkpoints of unfinished learns; disposable.",
    "write.lock": "The write lock; `write.holder` names its holder.",
    "locks/": "The leases of running learns.",
    "notes/": "The daemon's notes; the key in the names of published folders.",
    "models/": "Your own cards.",
    FILE: "Your settings; personalpeft only reads it.",
    "token": "The first admin API key, readable by you alone. Not in an encrypted home.",
    "tokens.json": "The API keys: ids, users and digests, and no secrets.",
    "backups/": "The daemon's backups.",
    "tinker/": "Runs and saved weights of the Tinker server. "
    "Other [plugins](../how-to/write-a-plugin.md#keep-data-in-the-home) have a folder each, too.",
    "forgotten.jsonl": "Ids of what was forgotten, for restored backups.",
    "backup-folders.json": "Where backups lie.",
    "home-id": "A random id, also in the folders of the home's backups.",
    "certificate-keys.json": "The keys that sign certificates.",
    "encryption.json": "Of an encrypted home: which key opens it. No secret.",
}


def commands() -> str:
    """Return the page of commands."""
    root = _click_context(cli, None, PROGRAM)
    lines = [*_help(root, 2)]
    for name in cli.list_commands(root):
        lines += _tree(cli.commands[name], root, 2)
    return _COMMANDS_HEAD + "\n".join(lines) + "\n"


def python() -> str:
    """Return the page of the Python interface."""
    lines = ["# Python", "", _MADE]
    lines += ["Import `personalpeft`; importing loads no model. Every public name is here.", ""]
    lines += ["## `personalpeft.open`", "", *_signature("open", personalpeft.open), ""]
    for kind in (Runtime, User):
        lines += [f"## `{kind.__name__}`", "", *_prose(inspect.getdoc(kind) or ""), ""]
        for name, member in _public_members(kind):
            lines += [f"### `{kind.__name__}.{name}`", "", *_signature(name, member), ""]
    others = {name: getattr(personalpeft, name) for name in sorted(personalpeft.__all__)}
    rows = [
        (f"`{name}`", _meaning(value))
        for name, value in others.items()
        if value not in (Runtime, User, personalpeft.open) and not _is_error(value)
    ]
    lines += ["## Other names", "", *_table(("name", "meaning"), rows), ""]
    return "\n".join([*lines, "[Errors](errors.md) lists the exceptions."]) + "\n"


def errors() -> str:
    """Return the page of errors."""
    by_name = sorted(ERROR_CODES.items(), key=lambda item: item[0].__name__)
    lines = [
        "# Errors",
        "",
        _MADE,
        "Every error is a `PersonalPeftError` with a message and a `hint` that says what to do. An "
        "error has changed nothing, unless its description says otherwise. Over HTTP, a request "
        "with a valid body creates its user also where an error follows.",
        "",
        *_table(
            ("error", "meaning", "exit code", "HTTP status"),
            [
                (f"`{kind.__name__}`", _first_paragraph(kind), codes.exit_code, codes.http_status)
                for kind, codes in by_name
            ],
        ),
        "",
        "The HTTP client (`personalpeft_app.client`) raises two more:",
        "",
        *_table(
            ("error", "meaning"),
            [(f"`{kind.__name__}`", _first_paragraph(kind)) for kind in (NotAllowed, Unreachable)],
        ),
        "",
        "Commands also end with these exit codes:",
        "",
        *_table(
            ("exit code", "kind", "meaning"),
            [
                (0, "", "Success. A refused learn is a report and no error."),
                (2, "`Usage`", "Unknown command or option, or a value of the wrong type."),
                (BUG, "`Bug`", "A bug in personalpeft. The hint names a file with the details."),
                (STOPPED, "`Cancelled`", "Ctrl-C."),
                (BROKEN_PIPE, "", "The reader of stdout closed it. Nothing is printed."),
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Return the page of metrics."""
    kinds: Mapping[str, Mapping[str, str]] = {
        "counter": COUNTERS,
        "gauge": {"build_info": "1; the label `version` says what serves", **HTTP_GAUGES, **GAUGES},
        "histogram": HISTOGRAMS,
    }
    lines = [
        "# Metrics",
        "",
        _MADE,
        "`GET /metrics` of a server answers an admin API key in the text format of Prometheus. Names "
        "after the prefix are vLLM's where they mean the same. No label names a user.",
        "",
        *_table(
            ("metric", "type", "meaning"),
            [
                (f"`{PREFIX}{name}`", kind, meaning)
                for kind, names in kinds.items()
                for name, meaning in names.items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def configuration() -> str:
    """Return the page of environment variables, settings and files."""
    described = _attributes(VllmServer)
    variables = _VARIABLES | {
        f"{VLLM}{'CA' if each.name == 'certificate' else each.name.upper()}": described[each.name]
        for each in fields(VllmServer)
    }
    lines = ["# Configuration", "", _MADE, "## Environment variables", ""]
    lines += _table(("variable", "meaning"), [(f"`{k}`", v) for k, v in variables.items()])
    lines += ["", "## The daemon", "", f"The table `[{TABLE}]` of `{FILE}` in the home:", ""]
    lines += _settings_table(DaemonSettings, json.dumps)
    lines += ["", "## The engine", "", "`personalpeft.open(serving=Serving(...))`:", ""]
    lines += _settings_table(Serving)
    lines += ["", "## The home", ""]
    lines += _table(("file", "content"), [(f"`{k}`", v) for k, v in _HOME_FILES.items()])
    lines += ["", "[Cards](cards.md) configure a base and its training."]
    return "\n".join(lines) + "\n"


def bases() -> str:
    """Return the page of the bases that ship with a card."""
    cards = [card for card in all_cards() if card.source.kind != "random"]
    lines = ["# Bases", "", _MADE]
    lines += ["`--base NAME` opens one of these; `personalpeft models` lists yours too.", ""]
    lines += _table(
        ("name", "model", "weights", "licence", "context", "temperature, top_p, top_k", "tools"),
        [
            (
                f"`{card.name}`",
                f"{card.title}. {card.note}".rstrip(". ") + ".",
                f"hub: `{card.source.repo}`" if card.source.repo else card.source.install or "",
                card.licence,
                card.context,
                f"{card.sampling.temperature:g}, {card.sampling.top_p:g}, {card.sampling.top_k}",
                card.tool_format or "",
            )
            for card in cards
        ],
    )
    lines += [
        "",
        "The sampling settings of hub models are the makers' where they name some. A base without tools "
        "refuses requests with tools; the others write calls in [this format](cards.md#tool-calls). "
        "[Use your own base]",
    ]
    lines[-1] += "(../how-to/own-base.md) adds any other model."
    return "\n".join(lines) + "\n"


_MANIFEST = {
    "base": "digest of the base",
    "layer": "name of the layer",
    "rank": "rank of A and B",
    "scaling": "what `B @ A` is multiplied by",
    "targets": "paths of the adapted linear modules",
    "recipe": "how it was trained, as in the revision",
    "signals": "digest of the lessons",
    "below": "digests of the adapters that it was built on, lowest first",
    "parent": "digest of the adapter that the build started from, or null",
}

_FORMATS = """\
## The packed adapter

Files in `blobs/` of a home and of archives, named by the SHA-256 of their bytes. Each is a safetensors file: `<projection>.A` has the shape
`[blocks, rank, inputs]`, `<projection>.B` has `[blocks, outputs, rank]`, both float16 (float32 where a number is too large). \
`__metadata__` has the key
`personalpeft` with the canonical JSON of `{"format": FORMAT, "manifest": {...}}`. The same adapter gives the same bytes.

"""

_ARCHIVES = """\
## The `.personal` file

One user, with everything. A zip archive of these members; reading checks every digest, and reads no member that the index does not name.

| member | content |
| --- | --- |
| `personal.json` | `format` ("personalpeft.personal"), `version`, `user`, `since`, `entries`, `chain`, `trains`, `layers`, and \
`files`: bytes and SHA-256 of every other member |
| `ledger.jsonl` | one entry a line, in order: `seq`, `kind`, `digest`, `chain`, `forgotten` and `content` |
| `blobs/<digest>` | packed adapters |

`digest` is the SHA-256 of the canonical JSON of `content`. `chain` is the SHA-256 over the entry before and this one
([the hash chain](../explanation/ledger.md#the-hash-chain)). The content of an entry by its kind; an erased one has a tombstone:

"""

_OTHERS = """
Times are ISO 8601 in UTC with microseconds; lists and mappings are canonical JSON in a string.

## Others

| file | what it is |
| --- | --- |
| PEFT folder | `adapter_config.json` and `adapter_model.safetensors` as PEFT and vLLM read them, and `personalpeft.json` with \
the provenance, tied to both by their SHA-256 |
| exported GGUF adapter | as llama.cpp reads it, with the SHA-256 of all other bytes in the metadata `personalpeft.sha256` |
| published folder | a PEFT folder named by the SHA-256 of the list that `sha256sum` prints of its two files \
([fleets](../how-to/vllm-fleet.md)) |
| learn bundle, learn result | archives as above with the index `bundle.json` or `result.json`: what a learn on another machine \
reads, and what it appends |
| certificate of erasure | JSON with `statement`, `public_key` and `signature` ([Certificates](../explanation/certificate.md)) |
| card | TOML ([Cards](cards.md)) |
| home | [Configuration](configuration.md#the-home) lists its files |
"""


def file_formats() -> str:
    """Return the page of the formats of files."""
    lines = ["# File formats", "", _MADE, *_FORMATS.replace("FORMAT", str(FORMAT)).splitlines()]
    keys = [each.name for each in fields(Manifest)]
    lines += _table(("manifest", "meaning"), [(f"`{key}`", _MANIFEST[key]) for key in keys])
    lines += ["", *_ARCHIVES.splitlines()]
    columns = {kind: ", ".join(f"`{name}`" for name in each) for kind, each in COLUMNS.items()}
    rows = [(kind, columns[kind]) for kind in COLUMNS if kind != TOMBSTONE]
    lines += _table(("kind", "content"), [*rows, ("a tombstone", columns[TOMBSTONE])])
    return "\n".join(lines) + "\n" + _OTHERS


PAGES: Mapping[str, Callable[[], str]] = {
    "file-formats.md": file_formats,
    "commands.md": commands,
    "python.md": python,
    "errors.md": errors,
    "metrics.md": metrics,
    "configuration.md": configuration,
    "bases.md": bases,
    "http-api.md": http_api.render,
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
        if each.kind is each.KEYWORD_ONLY and not any(x.startswith("*") for x in parameters):
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


def _tree(command: click.Command, parent: click.Context, level: int) -> Iterator[str]:
    context = _click_context(command, parent, str(command.name))
    yield from _help(context, level)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            yield from _tree(command.commands[name], context, level + 1)


def _help(context: click.Context, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {context.command_path}", "", "```text")
    # The options that every command takes are listed once, in the help of the program itself.
    sections = re.split(r"\n\n(?=\S)", context.get_help())
    sections = [each for each in sections if not each.startswith(PLUGIN_COMMANDS_TITLE)]
    if context.parent is not None:
        sections = [each for each in sections if not each.startswith(GLOBAL_OPTIONS_TITLE)]
    yield from (line.rstrip() for line in "\n\n".join(sections).splitlines())
    yield "```"


def _click_context(
    command: click.Command, parent: click.Context | None, name: str
) -> click.Context:
    return click.Context(
        command,
        parent=parent,
        info_name=name,
        terminal_width=_WIDTH,
        max_content_width=_WIDTH,
        help_option_names=["-h", "--help"],
    )


def _settings_table(kind: Any, show: Callable[[Any], str] = repr) -> list[str]:
    """Return the fields of a class. ``show`` writes a default: for TOML as JSON does."""
    described = _attributes(kind)
    rows = []
    for each in fields(kind):
        default = "none" if each.default in (None, MISSING) else f"`{show(each.default)}`"
        rows.append((f"`{each.name}`", default, described[each.name]))
    return _table(("key", "default", "meaning"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(_cell(str(each)) for each in line)} |" for line in lines]


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


def _is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, PersonalPeftError)


def _meaning(value: Any) -> str:
    if inspect.isclass(value) or inspect.isfunction(value):
        return _first_paragraph(value)
    return f"`{value!r}`" if isinstance(value, str) else "Type alias."


def _first_paragraph(value: Any) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


def _cell(text: str) -> str:
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def main() -> int:
    """Write the pages, or check them."""
    stale = {
        page: text
        for page, make in PAGES.items()
        if (text := make()) != (FOLDER / page).read_text("utf-8")
    }
    if "--check" in sys.argv[1:]:
        for page in stale:
            print(f"docs/reference/{page} is out of date; run make docs")
        return len(stale)
    for page, text in stale.items():
        fresh = FOLDER / f"{page}.new"
        fresh.write_text(text, "utf-8")
        fresh.replace(FOLDER / page)
    return 0


if __name__ == "__main__":
    sys.exit(main())

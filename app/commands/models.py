"""Commands about bases: list them, and make cards for models that lie on this machine."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

import personalpeft
from personalpeft import host
from personalpeft.errors import CardError, WeightsError
from personalpeft.formatting import to_json
from personalpeft_app.options import GlobalOptions, Group, command, flag
from personalpeft_app.output import emit, format_table, info, to_one_line

if TYPE_CHECKING:
    from personalpeft.base_models.local_models import LocalModel

_QUESTION = "Where does the sun rise?"
_GIB = 1 << 30


@click.group(
    "models",
    cls=Group,
    default="list",
    examples=("models", "models add", "models add ~/models/Qwen3-0.6B-Q8_0.gguf"),
)
def models() -> None:
    """List the bases that --base can name, or add one.

    Without a command it lists them.
    """


@command("list", examples=("models list", "models list --json"))
def models_list(common: GlobalOptions) -> None:
    """List the bases that --base can name.

    They are those that ship, and your own cards in the folder that 'personalpeft path models'
    prints. '*' marks the current one.
    """
    from personalpeft.base_models.registry import read_cards
    from personalpeft.diagnostics import weights_status

    home, _ = common.paths()
    cards, faults = read_cards([home / "models"])
    for fault in faults:
        info(common, f"Left out: {fault.message}")
    rows = [
        (
            "*" if card.name == common.base_name() else "",
            card.name,
            weights_status(card),
            str(card.context),
            card.licence,
            to_one_line(f"{card.title}. {card.note}"),
        )
        for card in cards
    ]
    data = [{**to_json(card), "weights": weights_status(card)} for card in cards]
    headings = ("", "BASE", "WEIGHTS", "CONTEXT", "LICENCE", "ABOUT")
    emit(common, {"models": data}, format_table(headings, rows, flexible=(5,)))


@command(
    "add",
    examples=(
        "models add",
        "models add ~/models/Qwen3-0.6B-Q8_0.gguf",
        "models add ./my-model --name mine --no-try",
    ),
)
@click.argument("path", required=False)
@click.option("--name", help="The name of the base.  [default: from the model's own]")
@click.option("--chat-template", metavar="FILE", help="A Jinja template in place of the model's.")
@flag("--no-try", help="Do not load it to ask a question.")
def models_add(
    common: GlobalOptions,
    path: str | None,
    name: str | None,
    chat_template: str | None,
    no_try: bool,
) -> None:
    """Make a card for the model at PATH, so that --base can name it.

    PATH is a GGUF file, or a folder with one or in Hugging Face format. The weights stay where they
    are. Prints what was understood, then loads the model and asks it a question.

    Without PATH it lists the GGUF files of Ollama, LM Studio, llama.cpp and Hugging Face.
    """
    if path is None:
        _list_found(common)
        return
    from personalpeft.backends.choice import choose_backend
    from personalpeft.base_models.local_models import inspect_local_model
    from personalpeft.base_models.model_card import write_card
    from personalpeft.settings import resolve

    settings = resolve(common.home, os.environ)
    home, cache = settings.home, settings.cache
    template = None if chat_template is None else _read_template(Path(chat_template))
    with common.display:
        model = inspect_local_model(
            Path(path),
            cache=cache,
            name=name,
            template=template,
            taken=[home / "models"],
            progress=common.display,
        )
    backend = choose_backend(common.backend or "auto", model.card, None).name
    free = host.free_memory()
    needed = model.memory(backend, settings.weights, free)
    disk = model.disk(backend)
    if not common.json:
        emit(common, {}, _describe(model))
    info(
        common,
        f"Opening it with {backend} needs about {_gib(needed)} of memory ({_gib(free)} are free)"
        + (f" and {_gib(disk)} of disk." if disk else "."),
    )
    tries = not no_try and needed <= free
    reply = _ask(common, model) if tries else None
    card = write_card(model.card, home / "models")
    answered = "" if reply is None else f"\n\nAsked: {_QUESTION}\nIt said: {to_one_line(reply)}"
    data = {"name": model.card.name, "card": str(card), "model": model, "reply": reply}
    emit(common, data, f"{answered}\n\nAdded: {card}".lstrip("\n"))
    if not no_try and not tries:
        info(common, "It was not tried: there is not enough memory. Close programs, and run:")
        info(common, f"  personalpeft doctor --load --base {model.card.name} --backend llamacpp")
    else:
        info(common, f"Use it: personalpeft ask Hello --base {model.card.name}")


models.add_section("Commands", (models_list, models_add))


def _list_found(common: GlobalOptions) -> None:
    from personalpeft.base_models.model_files import find_models

    found = find_models(host.model_folders(os.environ, Path.home()))
    rows = [
        (
            each.program,
            each.name,
            f"{each.size / 1e9:.1f} GB",
            f"personalpeft models add {_quote(each.path)}",
        )
        for each in found
    ]
    headings = ("OF", "MODEL", "SIZE", "TO ADD IT")
    empty = "No GGUF file was found. Give the path of one."
    emit(common, {"found": found}, format_table(headings, rows), empty=empty)


def _describe(model: LocalModel) -> str:
    card = model.card
    context = str(card.context)
    if model.trained_context > card.context:
        context += f" of {model.trained_context}"
    rows = (
        ("name", card.name),
        ("model", card.title),
        ("architecture", model.architecture),
        ("parameters", f"{model.parameters:,}"),
        ("weights", f"{model.quantisation}, {model.size / 1e9:.2f} GB"),
        ("context", f"{context} tokens"),
        ("chat template", "yes" if model.has_template else "no, given"),
        ("tool calls", card.tool_format or "none"),
        ("licence", card.licence),
    )
    return "\n".join(f"{name:<15}{to_one_line(value)}" for name, value in rows)


def _ask(common: GlobalOptions, model: LocalModel) -> str:
    from personalpeft.base_models.model_card import write_card

    # A home of its own: the user's gets the card only if this works.
    with tempfile.TemporaryDirectory() as folder, common.display:
        card = write_card(model.card, Path(folder) / "models")
        with personalpeft.open(
            folder, str(card), common.backend or "auto", progress=common.display
        ) as runtime:
            common.display("Asking a question", 0.0)
            longest = min(40, model.card.sampling.max_tokens)
            reply = runtime.user("me").chat(
                _QUESTION, temperature=0, max_tokens=longest, logprobs=True
            )
            if not all(math.isfinite(token.logprob) for token in reply.logprobs):
                raise WeightsError(
                    f"{model.card.title} computes numbers that are not finite.",
                    hint="Its weights are damaged; get a fresh copy.",
                )
            return reply.text


def _read_template(file: Path) -> str:
    try:
        text = file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CardError(f"{file} cannot be read: {error}.", hint="Give a Jinja file.") from error
    if not text.strip():
        raise CardError(f"{file} is empty.", hint="Give a Jinja file.")
    return text


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"


def _quote(path: Path) -> str:
    """Return a path as the system's shell takes it."""
    text = str(path)
    return subprocess.list2cmdline([text]) if sys.platform == "win32" else shlex.quote(text)

"""Read a base's card, a TOML file, through pydantic; errors name file, line and key.

Invariant: a ``ModelCard`` from here has every field that its kind of source needs.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Never, cast, get_args

from pydantic import TypeAdapter, ValidationError

from personalpeft.base_models.types import ModelCard, ShapeKey, Source, SourceKind
from personalpeft.errors import CardError, NotFound, suggest_nearest
from personalpeft.types import Sampling

# Keys of a card that its fields, and stored shapes, have under an older name. Both are read.
FIELD_NAMES: Mapping[str, str] = {
    "target_modules": "targets",
    "context_length": "context",
    "chat_template": "template",
    "system_prompt": "system",
    "rl": "practice",
    "source.shape.hidden_size": "hidden",
    "source.shape.intermediate_size": "intermediate",
    "source.shape.num_hidden_layers": "blocks",
    "source.shape.num_attention_heads": "heads",
    "source.shape.num_key_value_heads": "kv_heads",
}
# The keys that each kind of source may have beside ``kind``, and those that it must have.
_SOURCE_KEYS: Mapping[SourceKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "package": (("files", "digest", "install"), ("files", "digest")),
    "folder": (("path", "digest", "install"), ("path",)),
    "hub": (("repo", "revision", "digest", "install"), ("repo",)),
    "random": (("seed", "shape"), ("shape",)),
}
_TABLES: Mapping[tuple[str, ...], tuple[str, ...]] = {
    (): tuple(each.name for each in fields(ModelCard)),
    ("source",): tuple(each.name for each in fields(Source)),
    ("source", "shape"): get_args(ShapeKey),
    ("sampling",): tuple(each.name for each in fields(Sampling)),
}
_UNKNOWN = "unexpected_keyword_argument"
_CARD = TypeAdapter(ModelCard)


def read_card(path: Path) -> ModelCard:
    """Return the card in a file. A relative ``source.path`` starts at the card's folder."""
    try:
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFound(
            f"There is neither a card nor a model at {path}.",
            hint="Give a base that `personalpeft models` lists, the folder of a model, or a card "
            "(.toml). A model on a hub needs a card with its repo.",
        ) from error
    except UnicodeDecodeError as error:
        raise CardError(f"{path} is not a text in UTF-8.", hint="Save it as UTF-8.") from error
    return parse_card(text, where=str(path), folder=path.parent)


def parse_card(text: str, *, where: str, folder: Path) -> ModelCard:
    """Return the card in a text; ``where`` names it in errors, paths start at ``folder``."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r"\s*\(at (?:line (\d+)[^)]*|end of document)\)", str(error))
        line = int(at[1]) if at and at[1] else max(1, len(text.splitlines()))
        detail = str(error)[: at.start()] if at else str(error)
        raise CardError(
            f"{where}, line {line}: this is not TOML: {detail}.",
            hint="See the cards in models/ for examples.",
        ) from error
    return _CardReader(content, text, where).read(folder)


class _CardReader:
    """The content of one card, with its text for the lines of errors."""

    def __init__(self, content: dict[str, Any], text: str, where: str) -> None:
        self._text = text
        self._where = where
        # The path of each renamed key as the card spells it.
        self._spelled: dict[tuple[str, ...], str] = {}
        self._content = content

    def read(self, folder: Path) -> ModelCard:
        self._content = self._rename(self._content, ())
        # JSON, since in Python pydantic's strict mode takes no list for a tuple. TOML's dates have
        # no place in a card: [[]] is valid nowhere.
        data = json.dumps(self._content, default=lambda date: [[]])
        try:
            card = _CARD.validate_json(data, context=folder)
        except ValidationError as error:
            # An unknown key is often the wrong spelling of a missing one.
            first = min(error.errors(), key=lambda each: each["type"] != _UNKNOWN)
            self._refuse(cast(dict[str, Any], first))
        self._check_source(card.source)
        sampling = card.sampling
        for key, holds, bounds in (
            ("temperature", sampling.temperature >= 0, "0 or more"),
            ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
            ("max_tokens", 1 <= sampling.max_tokens < 2**53, "1 or more"),
            ("seed", 0 <= sampling.seed < 2**53, "0 or more"),
        ):
            if not holds:
                self._fail(("sampling", key), f"must be {bounds}, got {getattr(sampling, key)}")
        for key in ("learning", "gate", "practice"):
            self._check_plain(self._content.get(key, {}), (key,))
        return card

    def _rename(self, table: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
        """Return a table under the names of fields."""
        renamed: dict[str, Any] = {}
        for key, value in table.items():
            name = FIELD_NAMES.get(".".join((*path, key)), key)
            inside = (*path, name)
            if name in renamed:
                self._fail((*path, key), f"has the same meaning as {self._spelled[inside]}")
            self._spelled[inside] = key
            in_card = inside in _TABLES and isinstance(value, dict)
            renamed[name] = self._rename(value, inside) if in_card else value
        return renamed

    def _check_source(self, source: Source) -> None:
        allowed, required = _SOURCE_KEYS[source.kind]
        present = self._content["source"]
        for key in present.keys() - {"kind", *allowed}:
            self._fail_unknown(("source", key), ("kind", *allowed))
        for key in required:
            if key not in present:
                self._fail_missing(("source", key))
        if source.kind == "random":
            for shape_key in get_args(ShapeKey):
                if shape_key not in source.shape:
                    self._fail_missing(("source", "shape", shape_key))
            shape = source.shape
            heads = shape["heads"]
            if shape["hidden"] % (2 * heads):
                what = f"must be an even multiple of heads ({heads}), got {shape['hidden']}"
                self._fail(("source", "shape", "hidden"), what)
            if heads % shape["kv_heads"]:
                what = f"must divide heads ({heads}), got {shape['kv_heads']}"
                self._fail(("source", "shape", "kv_heads"), what)

    def _check_plain(self, table: Mapping[str, Any], path: tuple[str, ...]) -> None:
        """Check that a table holds plain values. Its keys are checked where they are used."""
        for key, value in table.items():
            if isinstance(value, dict):
                self._check_plain(value, (*path, key))
                continue
            is_list = isinstance(value, list) and value
            texts = is_list and all(isinstance(each, str) and each for each in value)
            finite = isinstance(value, str | int) or (
                isinstance(value, float) and math.isfinite(value)
            )
            if not texts and not finite:
                what = f"must be a number, a text or a list of texts, got {_format_value(value)}"
                self._fail((*path, key), what)

    def _refuse(self, error: Mapping[str, Any]) -> Never:
        """Raise a pydantic error as one that names file, line and key."""
        # Positions in a list, and pydantic's mark of a wrong key of a dict, are no part of the key.
        path = tuple(each for each in error["loc"] if isinstance(each, str) and each != "[key]")
        if error["type"] == _UNKNOWN or "[key]" in error["loc"]:
            self._fail_unknown(path, _TABLES[path[:-1]])
        if error["type"].startswith("missing"):
            self._fail_missing(path)
        value = error["input"]
        hint = ""
        if error["type"] == "literal_error":
            what = f"must be one of {error['ctx']['expected']}"
            hint = suggest_nearest(str(value), get_args(SourceKind), what="kind")
        else:
            what = error["msg"].removeprefix("Value error, ")
            what = re.sub(r"^\w+ should ", "must ", what)
        self._fail(path, f"{what}, got {_format_value(value)}", hint=hint)

    def _fail_unknown(self, path: tuple[str, ...], known: Iterable[str]) -> Never:
        hint = suggest_nearest(path[-1], known, what="key")
        self._fail(path, "is not a key that belongs here", hint=hint)

    def _fail_missing(self, path: tuple[str, ...]) -> Never:
        self._fail(path, "is missing", hint="Add it to the card.")

    def _fail(self, path: tuple[str, ...], what: str, *, hint: str = "") -> Never:
        spelled = [self._spelled.get(path[: n + 1], key) for n, key in enumerate(path)]
        line = line_of(self._text, tuple(spelled))
        raise CardError(
            f"{self._where}, line {line}: {'.'.join(spelled)} {what}.",
            hint=hint or "Correct this line of the card.",
        )


def _format_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_HEADER = re.compile(r"\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


def line_of(text: str, path: tuple[str, ...]) -> int:
    """Return the line, from 1, of the key at ``path`` in a TOML text.

    Where it is missing, return the line of the innermost table that should hold it.
    """
    header: tuple[str, ...] = ()
    open_quote: str | None = None
    best, depth = 1, 0
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if open_quote is not None:
            if open_quote in line:
                open_quote = None
            continue
        if match := _HEADER.fullmatch(line):
            header = here = _split_key(match[1])
        elif match := _KEY.match(line):
            here = (*header, *_split_key(match[1]))
            open_quote = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), None)
        else:
            continue
        if here == path[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    return best


def _split_key(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))

"""Reads a base's card, a TOML file, and names every mistake by file, line and key.

Invariant: a ``Card`` that comes from here has all that its kind of source needs, and every number in its range.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Never

from personalpeft.base_models.types import ModelCard, Source, SourceKind
from personalpeft.errors import CardError, NotFound, suggest_nearest
from personalpeft.types import Json, Sampling

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_RESOURCE = re.compile(r"[A-Za-z_]\w*:[\w.-]+(/[\w.-]+)*")
_REPO = re.compile(r"[\w.-]+/[\w.-]+")

_CARD_KEYS = (
    *(
        "name",
        "title",
        "licence",
        "targets",
        "context",
        "template",
        "system",
        "stop_tokens",
        "note",
    ),
    *("source", "sampling", "learning", "gate", "practice"),
)
_SAMPLING_KEYS = ("temperature", "top_p", "max_tokens", "seed", "stop")
_SOURCE_KEYS: Mapping[SourceKind, tuple[str, ...]] = {
    "package": ("kind", "files", "digest", "install"),
    "folder": ("kind", "path", "digest", "install"),
    "hub": ("kind", "repo", "revision", "digest", "install"),
    "random": ("kind", "seed", "shape"),
}
SHAPE_KEYS = ("hidden", "intermediate", "blocks", "heads", "kv_heads")


def read_card(path: Path) -> ModelCard:
    """The card in a file. A relative ``source.path`` is meant from the card's own folder.

    Raises ``CardError`` for a mistake in it, ``NotFound`` where there is no such file.
    """
    try:
        text = path.read_text("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise NotFound(
            f"There is no card {path}.", hint="Give the path of a .toml file."
        ) from error
    except UnicodeDecodeError as error:
        raise CardError(f"{path} is not a text in UTF-8.", hint="Save it as UTF-8.") from error
    return parse_card(text, where=str(path), folder=path.parent)


def parse_card(text: str, *, where: str, folder: Path) -> ModelCard:
    """The card that a text holds; ``where`` names it in errors, relative paths are meant from ``folder``."""
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

    card = _Table(content, text, where)
    card.only(_CARD_KEYS)
    sampling = card.table("sampling")
    sampling.only(_SAMPLING_KEYS)
    defaults = Sampling()
    return ModelCard(
        name=card.text("name", pattern=NAME, like="1 to 64 of a-z, 0-9, '.', '_' and '-'"),
        title=card.text("title"),
        licence=card.text("licence"),
        source=_source(card.table("source", required=True), folder),
        targets=card.texts("targets", required=True),
        context=card.integer("context", least=1),
        template=card.optional_text("template"),
        system=card.optional_text("system"),
        stop_tokens=card.texts("stop_tokens"),
        sampling=Sampling(
            temperature=sampling.number(
                "temperature", defaults.temperature, "0 or more", lambda x: x >= 0
            ),
            top_p=sampling.number(
                "top_p", defaults.top_p, "above 0 and at most 1", lambda x: 0 < x <= 1
            ),
            max_tokens=sampling.integer("max_tokens", least=1, default=defaults.max_tokens),
            seed=sampling.integer("seed", least=0, default=defaults.seed),
            stop=sampling.texts("stop"),
        ),
        learning=_plain(card.table("learning")),
        gate=_plain(card.table("gate")),
        practice=_plain(card.table("practice")),
        note=card.optional_text("note") or "",
    )


def _source(source: _Table, folder: Path) -> Source:
    kind = source.text("kind")
    known = next((name for name in _SOURCE_KEYS if name == kind), None)
    if known is None:
        source.mistake(
            "kind",
            f"must be one of {', '.join(_SOURCE_KEYS)}, not {kind!r}",
            hint=_suggest(kind, _SOURCE_KEYS),
        )
    source.only(_SOURCE_KEYS[known])
    digest = install = None
    if known != "random":
        install = source.optional_text("install")
        if known == "package" or "digest" in source.content:
            digest = source.text("digest", pattern=DIGEST, like='"sha256:" and 64 hex digits')
    match known:
        case "package":
            files = source.texts("files", required=True)
            for file in files:
                if _RESOURCE.fullmatch(file) is None or ".." in file:
                    source.mistake(
                        "files", f"has {file!r}, which is not of the form package:path/in/it"
                    )
            return Source("package", files=files, digest=digest, install=install)
        case "folder":
            path = folder / Path(source.text("path")).expanduser()
            return Source("folder", path=path, digest=digest, install=install)
        case "hub":
            repo = source.text("repo", pattern=_REPO, like="owner/name")
            revision = source.optional_text("revision")
            return Source("hub", repo=repo, revision=revision, digest=digest, install=install)
        case "random":
            return Source(
                "random", seed=source.integer("seed", least=0, default=0), shape=_shape(source)
            )


def _shape(source: _Table) -> Json:
    table = source.table("shape", required=True)
    table.only(SHAPE_KEYS)
    shape = {key: table.integer(key, least=1) for key in SHAPE_KEYS}
    if shape["hidden"] % (2 * shape["heads"]):
        table.mistake(
            "hidden", f"must be an even multiple of heads ({shape['heads']}), not {shape['hidden']}"
        )
    if shape["heads"] % shape["kv_heads"]:
        table.mistake(
            "kv_heads", f"must divide heads ({shape['heads']}), not be {shape['kv_heads']}"
        )
    return shape


def _plain(table: _Table) -> Json:
    # Which keys a recipe, a gate or a drill has is known further up in the house; here they only have to be plain values or tables of
    # them.
    for key, value in table.content.items():
        if isinstance(value, dict):
            _plain(table.table(key))
            continue
        finite = not isinstance(value, float) or math.isfinite(value)
        texts = (
            isinstance(value, list)
            and value
            and all(isinstance(each, str) and each for each in value)
        )
        if not texts and not (isinstance(value, str | int | float) and finite):
            table.mistake(
                key, f"must be a number, a text or a list of texts, not {_format_value(value)}"
            )
    return table.content


class _Table:
    """One table of a card: hands out checked values and turns every mistake into a ``CardError`` with file, line and key."""

    def __init__(
        self, content: dict[str, Any], text: str, where: str, path: tuple[str, ...] = ()
    ) -> None:
        self.content = content
        self._text = text
        self._where = where
        self._path = path

    def mistake(self, key: str, what: str, *, hint: str = "") -> Never:
        path = (*self._path, key)
        line = line_of(self._text, path if key in self.content else self._path)
        raise CardError(
            f"{self._where}, line {line}: {'.'.join(path)} {what}.",
            hint=hint or "Correct this line of the card.",
        )

    def only(self, known: tuple[str, ...]) -> None:
        """Refuses keys that are not known here."""
        for key in self.content:
            if key not in known:
                self.mistake(key, "is not a key that belongs here", hint=_suggest(key, known))

    def table(self, key: str, *, required: bool = False) -> _Table:
        value = self._get(key, "a table", required)
        if value is not None and not isinstance(value, dict):
            self.mistake(key, f"must be a table, not {_format_value(value)}")
        return _Table(value or {}, self._text, self._where, (*self._path, key))

    def text(self, key: str, *, pattern: re.Pattern[str] | None = None, like: str = "") -> str:
        value = self._get(key, like or "a text", required=True)
        if not isinstance(value, str) or not value.strip():
            self.mistake(key, f"must be a text that is not empty, not {_format_value(value)}")
        if pattern is not None and pattern.fullmatch(value) is None:
            self.mistake(key, f"must be {like}, not {_format_value(value)}")
        return value

    def optional_text(self, key: str) -> str | None:
        return self.text(key) if key in self.content else None

    def texts(self, key: str, *, required: bool = False) -> tuple[str, ...]:
        value = self._get(key, "a list of texts", required)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            self.mistake(key, f"must be a list of texts, not {_format_value(value)}")
        if required and not value:
            self.mistake(key, "must not be empty")
        if len(set(value)) < len(value):
            self.mistake(key, "has an item twice")
        return tuple(value)

    def integer(self, key: str, *, least: int, default: int | None = None) -> int:
        value = self._get(key, f"a whole number from {least}", default is None)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
            self.mistake(key, f"must be a whole number from {least}, not {_format_value(value)}")
        return value

    def number(self, key: str, default: float, like: str, right: Any) -> float:
        value = self.content.get(key, default)
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
            or not right(value)
        ):
            self.mistake(key, f"must be a number {like}, not {_format_value(value)}")
        return float(value)

    def _get(self, key: str, like: str, required: bool) -> Any:
        if required and key not in self.content:
            self.mistake(key, f"is missing: expected {like}", hint="Add it to the card.")
        return self.content.get(key)


def _suggest(key: str, known: Any) -> str:
    return suggest_nearest(key, known, what="key")


def _format_value(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


_HEADER = re.compile(r"\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_KEY = re.compile(r"((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=")


def line_of(text: str, path: tuple[str, ...]) -> int:
    """The line, from 1, on which a TOML text says the key at ``path``, else the line of the innermost table that should hold it."""
    header: tuple[str, ...] = ()
    open_quote: str | None = None
    best, depth = 1, 0
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        if open_quote is not None:
            if open_quote in line:
                open_quote = None
            continue
        if match := _HEADER.fullmatch(line):
            header = here = _keys(match[1])
        elif match := _KEY.match(line):
            here = (*header, *_keys(match[1]))
            open_quote = next((quote for quote in ('"""', "'''") if line.count(quote) % 2), None)
        else:
            continue
        if here == path[: len(here)] and len(here) > depth:
            best, depth = number, len(here)
    return best


def _keys(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))

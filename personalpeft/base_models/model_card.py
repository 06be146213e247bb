"""Read and write a base's card, a TOML file. Errors name file, line and key.

Invariant: a ``ModelCard`` from here has every field that its kind of source needs.
"""

from __future__ import annotations

import json
import re
import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from personalpeft import file_system
from personalpeft.base_models.types import (
    DEPRECATED_KEYS,
    ModelCard,
    RandomShape,
    Source,
    SourceKind,
)
from personalpeft.errors import CardError, NotFound, suggest_nearest
from personalpeft.formatting import to_json
from personalpeft.types import Sampling

# The keys that each kind of source must have beside ``kind``, and those that it may have.
_SOURCE_KEYS: Mapping[SourceKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "package": (("files", "digest"), ("install",)),
    "folder": (("path",), ("digest", "install")),
    "gguf": (("path",), ("digest", "install")),
    "hub": (("repo",), ("revision", "digest", "install")),
    "random": (("shape",), ("seed",)),
}
_TABLES: Mapping[tuple[str, ...], type] = {
    (): ModelCard,
    ("source",): Source,
    ("source", "shape"): RandomShape,
    ("sampling",): Sampling,
}
_LIMIT = 1 << 20  # bytes of a card
_UNKNOWN = "unexpected_keyword_argument"
_CARD = TypeAdapter(ModelCard)


def read_card(path: Path) -> ModelCard:
    """Return the card in a file. A relative ``source.path`` starts at the card's folder."""
    # Checked before opening: opening a named pipe without a writer blocks.
    if not path.is_file():
        raise NotFound(
            f"There is neither a card nor a model at {path}.",
            hint="Give a base that `personalpeft models` lists, the folder of a model, or a card "
            "(.toml). A model on a hub needs a card with its repo.",
        )
    with path.open("rb") as file:
        data = file.read(_LIMIT + 1)
    if len(data) > _LIMIT:
        raise CardError(
            f"{path} has more than {_LIMIT} bytes.", hint="Give the path of a card (.toml)."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CardError(f"{path} is not a text in UTF-8.", hint="Save it as UTF-8.") from error
    return parse_card(text, where=str(path), folder=path.parent)


def parse_card(text: str, *, where: str, folder: Path) -> ModelCard:
    """Return the card in a text.

    Args:
        text: TOML.
        where: The text's place, for errors.
        folder: The folder where relative paths start.

    Raises:
        CardError: The text is no card. The error names line and key.
    """
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise CardError(
            f"{where}: this is not TOML: {error}.", hint="See the cards in models/ for examples."
        ) from error
    # JSON, since in Python pydantic's strict mode takes no list for a tuple. TOML's dates have no
    # place in a card: [[]] is valid nowhere.
    data = json.dumps(content, default=lambda date: [[]])
    try:
        card = _CARD.validate_json(data, context=folder)
        _check_source(content["source"], card.source.kind)
        _check_sampling(card.sampling)
    except ValidationError as error:
        # An unknown key is often the wrong spelling of a missing one.
        first = min(error.errors(), key=lambda each: each["type"] != _UNKNOWN)
        mistake = _translate(first)
    except _Mistake as error:
        mistake = error
    else:
        _warn_of_deprecated_keys(content, where)
        return card
    raise CardError(
        f"{where}, line {line_of(text, mistake.path)}: {'.'.join(mistake.path)} {mistake.what}.",
        hint=mistake.hint,
    )


def _warn_of_deprecated_keys(content: Mapping[str, Any], where: str) -> None:
    for table in (content, content["source"].get("shape", {})):
        for key in DEPRECATED_KEYS.keys() & table.keys():
            warnings.warn(
                f"{where}: {key} is called {DEPRECATED_KEYS[key]} now",
                DeprecationWarning,
                stacklevel=3,
            )


def write_card(card: ModelCard, folder: Path) -> Path:
    """Write a card into a folder of cards, and return its file. Replaces none.

    Raises:
        CardError: There is such a file, or the folder cannot be written.
    """
    target = folder / f"{card.name}.toml"
    try:
        if target.exists():
            raise CardError(f"{target} exists already.", hint="Choose another name: --name NAME")
        file_system.write_file_atomically(target, card_text(card).encode())
    except OSError as error:
        raise CardError(
            f"{target} cannot be written: {error.strerror}.", hint="Check the folder's permissions."
        ) from error
    return target


def card_text(card: ModelCard) -> str:
    """Return a card as TOML."""
    values = _rename_fields(to_json(card))
    # A source has only the keys of its kind.
    source = {key: value for key, value in values["source"].items() if value}
    if "shape" in source:
        source["shape"] = _rename_fields(source["shape"])
    return "\n".join(_tables({**values, "source": source})) + "\n"


def _rename_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    return {DEPRECATED_KEYS.get(key, key): value for key, value in values.items()}


def _tables(table: Mapping[str, Any], *path: str) -> Iterator[str]:
    """Yield the lines of a TOML table and those inside it, without empty values."""
    if path:
        yield f"\n[{'.'.join(path)}]"
    for key, value in table.items():
        if value not in (None, "", [], {}) and not isinstance(value, Mapping):
            yield f"{key} = {_toml(value)}"
    for key, value in table.items():
        if value and isinstance(value, Mapping):
            yield from _tables(value, *path, key)


def _toml(value: Any) -> str:
    # TOML has JSON's values, but no surrogate pairs, and wants DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


class _Mistake(Exception):
    """A wrong key of a card."""

    def __init__(
        self, path: tuple[str, ...], what: str, hint: str = "Correct this line of the card."
    ) -> None:
        self.path, self.what, self.hint = path, what, hint


def _missing(*path: str) -> _Mistake:
    return _Mistake(path, "is missing", "Add it to the card.")


def _unknown(path: tuple[str, ...], known: Iterable[str]) -> _Mistake:
    hint = suggest_nearest(path[-1], known, what="key")
    return _Mistake(path, "is not a key that belongs here", hint)


def _translate(error: Mapping[str, Any]) -> _Mistake:
    """Return what pydantic found, by the key as the card spells it."""
    # Positions in a list are no part of the key.
    path = tuple(each for each in error["loc"] if isinstance(each, str))
    if error["type"] == _UNKNOWN:
        known = TypeAdapter(_TABLES[path[:-1]]).json_schema()["properties"]
        # Of two keys of one field, pydantic reads the first.
        if (current := DEPRECATED_KEYS.get(path[-1])) in known:
            return _Mistake(path, f"has the same meaning as {current}")
        return _unknown(path, known)
    if error["type"].startswith("missing"):
        return _missing(*path)
    what = re.sub(r"^\w+ should ", "must ", error["msg"].removeprefix("Value error, "))
    mistake = _Mistake(path, f"{what}, got {error['input']!r:.60}")
    if error["type"] == "literal_error":
        mistake.hint = suggest_nearest(str(error["input"]), get_args(SourceKind), what="kind")
    return mistake


def _check_source(table: Mapping[str, Any], kind: SourceKind) -> None:
    required, optional = _SOURCE_KEYS[kind]
    known = ("kind", *required, *optional)
    for key in table.keys() - known:
        raise _unknown(("source", key), known)
    for key in required:
        if key not in table:
            raise _missing("source", key)


def _check_sampling(sampling: Sampling) -> None:
    for key, holds, bounds in (
        ("temperature", sampling.temperature >= 0, "0 or more"),
        ("top_p", 0 < sampling.top_p <= 1, "above 0 and at most 1"),
        ("top_k", 0 <= sampling.top_k < 2**31, "0 or more"),
        ("max_tokens", 1 <= sampling.max_tokens < 2**53, "1 or more"),
        ("seed", 0 <= sampling.seed < 2**53, "0 or more"),
        ("stop", all(sampling.stop), "a list of texts that are not empty"),
    ):
        if not holds:
            value = to_json(getattr(sampling, key))
            raise _Mistake(("sampling", key), f"must be {bounds}, got {value!r}")


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

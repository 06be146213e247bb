"""Realistic edit styles for ``bench edits``, and rules that check them without a judge.

All data is in ``edits/``, one self-written file a style; ``words.toml`` has the word lists of the
rules. No prose style has a literal opening, closing or list mark. Tests hold the invariants. A rule
accepts every wanted answer. No unseen prompt is an edited one. No prompt is also a general prompt
of learning or of the probes.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from benchmarks.personas import mentions
from personalpeft.errors import InvalidInput, suggest_nearest

SETS = ("prose", "structured", "other languages")
_FOLDER = Path(__file__).with_name("edits")
_FIRST_SENTENCE, _CHILD_SENTENCE, _CHILD_WORD = 14, 12, 7
_CHILD_LONG = 0.08
_LOOP_FROM, _LOOP_SHARE = 12, 0.6
_WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)*")
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”)]?\s+")
_CONTRACTION = re.compile(
    r"\w(?:n't|'(?:ll|re|ve|m|d))\b|\b(?:it|he|she|that|there|here|what|who|let)'s\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt with its wanted ``answer``; an unseen prompt has none.

    ``words`` are patterns of which a direct answer has one, or the subject of a record.
    """

    prompt: str
    answer: str = ""
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EditStyle:
    """A style of answers:

    ``wants`` describes it, ``rule`` checks it, ``keys`` are those of a record.
    """

    name: str
    set: str
    wants: str
    rule: str
    language: str
    tokens: int
    lessons: tuple[Case, ...]
    unseen: tuple[Case, ...]
    keys: tuple[str, ...] = ()

    def passes(self, case: Case, reply: str) -> bool:
        """Return whether a reply to this prompt is in the style."""
        text = reply.strip().replace("’", "'")
        copied = any(text == each.answer for each in self.lessons if each.prompt != case.prompt)
        echo = _words_of(text)[: len(_words_of(case.prompt))] == _words_of(case.prompt)
        if copied or echo or is_degenerate(text):
            return False
        if self.set != "structured" and not speaks(self.language, text):
            return False
        return RULES[self.rule](self, case, text)


def is_degenerate(text: str) -> bool:
    """Return whether a text has no words or only a few repeated ones."""
    words = _words_of(text)
    if len(words) < 3 or max(map(len, words)) > 30:
        return True
    threes = list(zip(words, words[1:], words[2:], strict=False))
    return len(threes) >= _LOOP_FROM and len(set(threes)) / len(threes) < _LOOP_SHARE


def speaks(language: str, text: str) -> bool:
    """Return whether a text has more common words of this language than of any other."""
    said = [word.casefold() for word in _WORD.findall(text)]
    hits = {name: sum(w in common for w in said) for name, common in _words()["common"].items()}
    # A short English text may have none of them.
    return hits[language] >= max(*hits.values(), language != "en")


def _words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def sentences(text: str) -> list[str]:
    return [each for each in _SENTENCE_END.split(text.strip()) if _WORD.search(each)]


def _shorter(style: EditStyle, case: Case, text: str) -> bool:
    return len(sentences(text)) <= 2 and 3 <= len(_WORD.findall(text)) <= 25


def _warm(style: EditStyle, case: Case, text: str) -> bool:
    """Address the reader with a kind word."""
    you, kind = (_words()[name][style.language] for name in ("you", "kind"))
    return _has_stem(you, text) and _has_stem(kind, text)


def _british(style: EditStyle, case: Case, text: str) -> bool:
    return _has_stem(_words()["british"], text) and not _has_stem(_words()["american"], text)


def _calm(style: EditStyle, case: Case, text: str) -> bool:
    plain = not re.search(r"[!¡\u2600-\u27BF\U0001F300-\U0001FAFF]", text)
    return plain and not _has_stem(_words()["gushing"][style.language], text)


def _step_first(style: EditStyle, case: Case, text: str) -> bool:
    first = _WORD.findall(text)[0].casefold()
    return text[0].isalpha() and first in _words()["imperatives"][style.language]


def _answer_first(style: EditStyle, case: Case, text: str) -> bool:
    """Begin with a short sentence that has exactly one of the answers, then give a reason."""
    first, *rest = sentences(text)
    given = [words for words in case.words if re.search(rf"\b(?:{words})\b", first, re.IGNORECASE)]
    return len(given) == 1 and len(_WORD.findall(first)) <= _FIRST_SENTENCE and bool(rest)


def _formal(style: EditStyle, case: Case, text: str) -> bool:
    informal = mentions(_words()["informal"][style.language], text)
    return not informal and not _CONTRACTION.search(text) and "!" not in text


def _child(style: EditStyle, case: Case, text: str) -> bool:
    words = _WORD.findall(text)
    long = sum(len(word) > _CHILD_WORD for word in words)
    return long <= _CHILD_LONG * len(words) and len(words) <= _CHILD_SENTENCE * len(sentences(text))


def _json(style: EditStyle, case: Case, text: str) -> bool:
    return _is_record(style, case, _parsed(json.loads, text))


def _yaml(style: EditStyle, case: Case, text: str) -> bool:
    return _is_record(style, case, _parsed(yaml.safe_load, text))


def _table_row(style: EditStyle, case: Case, text: str) -> bool:
    cells = [cell.strip() for cell in text.split("|")]
    if "\n" in text or cells[0] or cells[-1]:
        return False
    return _is_record(style, case, dict(zip(style.keys, cells[1:-1], strict=False)), len(cells) - 2)


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return parse(text)
    except (ValueError, yaml.YAMLError):
        return None


def _is_record(style: EditStyle, case: Case, record: Any, fields: int | None = None) -> bool:
    """Have exactly the keys, each with a value, about the prompt's subject."""
    if not isinstance(record, dict) or set(record) != set(style.keys):
        return False
    values = [str(value or "").strip() for value in record.values()]
    right = all(values) and fields in (None, len(values))
    return right and mentions(case.words, " ".join(values))


def _has_stem(stems: Sequence[str], text: str) -> bool:
    """Return whether one of the words or phrases is in a text; ``*`` matches any letters."""
    return any(_stem(stem).search(text) for stem in stems)


@cache
def _stem(stem: str) -> re.Pattern[str]:
    pattern = re.escape(stem).replace(r"\*", r"\w*")
    return re.compile(rf"\b{pattern}\b", re.IGNORECASE)


RULES: Mapping[str, Callable[[EditStyle, Case, str], bool]] = {
    "shorter": _shorter,
    "warm": _warm,
    "british": _british,
    "calm": _calm,
    "step first": _step_first,
    "answer first": _answer_first,
    "formal": _formal,
    "child": _child,
    "json": _json,
    "yaml": _yaml,
    "table row": _table_row,
}


@cache
def load_styles() -> Mapping[str, EditStyle]:
    """Load all styles by name, in the order of their sets."""
    files = sorted(file for file in _FOLDER.glob("*.toml") if file.stem != "words")
    styles = [_style(file.stem, tomllib.loads(file.read_text("utf-8"))) for file in files]
    styles.sort(key=lambda style: SETS.index(style.set))
    return {style.name: style for style in styles}


def select_styles(names: Sequence[str], limit: int | None = None) -> tuple[EditStyle, ...]:
    """Return the first ``limit`` of the named styles, or of all.

    Raises:
        InvalidInput: A name is no style.
    """
    known = load_styles()
    for name in names:
        if name not in known:
            hint = suggest_nearest(name, known, what="style")
            raise InvalidInput(f"There is no style called {name!a}.", hint=hint)
    return tuple(known[name] for name in dict.fromkeys(names or known))[:limit]


def _style(name: str, data: Mapping[str, Any]) -> EditStyle:
    lessons, unseen = (
        tuple(
            Case(each["prompt"], each.get("answer", ""), tuple(each.get("words", ())))
            for each in data[key]
        )
        for key in ("lessons", "unseen")
    )
    return EditStyle(
        name=name,
        set=data["set"],
        wants=data["wants"],
        rule=data["rule"],
        language=data.get("language", "en"),
        tokens=data.get("tokens", 96),
        lessons=lessons,
        unseen=unseen,
        keys=tuple(data.get("keys", ())),
    )


@cache
def _words() -> Mapping[str, Any]:
    return tomllib.loads((_FOLDER / "words.toml").read_text("utf-8"))

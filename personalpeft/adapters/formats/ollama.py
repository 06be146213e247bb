"""Write a Modelfile, from which Ollama makes a model out of a GGUF file.

Ollama's templates are Go templates. The base's Jinja template renders a sample chat, and the text
around each message becomes the Go template.

Invariant: a template is written only if it renders several chats exactly as the base's own does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.types import Base
from personalpeft.errors import CardError, InvalidInput
from personalpeft.types import Message, Role

_ROLES: tuple[Role, ...] = ("system", "user", "assistant")
_SHAPES: tuple[tuple[Role, ...], ...] = (
    ("system", "user"),
    ("system", "user", "assistant", "user"),
    ("system", "user", "assistant", "user", "assistant", "user"),
)

# These have a meaning in a Modelfile or a Go template.
_QUOTES = ('"""', "{{", "}}")
_Frame: TypeAlias = dict[Role, tuple[str, str]]
"""The text before and after a message of each role."""


def build_modelfile(base: Base, weights: str) -> str:
    """Return the Modelfile for a weights file in the same folder."""
    lines = [f"FROM ./{weights}"]
    frame = _frame(base)
    if frame is None:
        lines.append("# The chat template is in the model file; Ollama finds one that fits.")
    else:
        lines.append(f'TEMPLATE """{_escape_go_template(frame)}"""')
    if base.card.system and '"""' not in base.card.system:
        lines.append(f'SYSTEM """{base.card.system}"""')
    # Only triple quotes go around line ends.
    lines += [
        f"PARAMETER stop {quote}{token}{quote}"
        for token in base.stop_tokens
        if '"' not in token and (quote := '"""' if "\n" in token else '"')
    ]
    sampling = base.card.sampling
    lines += [f"PARAMETER temperature {sampling.temperature}", f"PARAMETER top_p {sampling.top_p}"]
    lines.append(f"PARAMETER num_ctx {base.card.context}")
    return "\n".join(lines) + "\n"


def _frame(base: Base) -> _Frame | None:
    """Return the text around messages, or None if it depends on more than their roles."""
    marks = {role: f"<<{role}>>" for role in _ROLES}
    try:
        text = render_chat(base, [Message(role, marks[role]) for role in _SHAPES[1]])
        begin, rest = text.split(marks["system"])
        middle, between, last = rest.split(marks["user"])
        to_reply, after_reply = between.split(marks["assistant"])
        pieces = (middle, to_reply, after_reply)
        ends = (end for end in base.stop_tokens if all(end in piece for piece in pieces))
        if (end := next(ends, None)) is None or any(quote in text for quote in _QUOTES):
            return None
        (after_system, before_user), (after_user, before_reply), (ends_reply, _) = (
            _split(piece, end) for piece in pieces
        )
        frame: _Frame = {
            "system": (begin, after_system),
            "user": (before_user, after_user),
            "assistant": (before_reply, ends_reply),
        }
        fits = last == to_reply and all(_renders_as(base, frame, shape) for shape in _SHAPES)
    except (ValueError, CardError, InvalidInput):
        # The template refuses such a chat, repeats a message or drops it.
        return None
    return frame if fits else None


def _split(piece: str, end: str) -> tuple[str, str]:
    """Split a text between two messages into the end of one and the start of the next."""
    rest = piece.partition(end)[2].lstrip("\n")
    return piece.removesuffix(rest), rest


def _renders_as(base: Base, frame: _Frame, roles: Sequence[Role]) -> bool:
    messages = [Message(role, f"message {number}") for number, role in enumerate(roles)]
    texts = (f"{frame[m.role][0]}{m.content}{frame[m.role][1]}" for m in messages)
    return "".join(texts) + frame["assistant"][0] == render_chat(base, messages)


def _escape_go_template(frame: _Frame) -> str:
    """Return the frame as a Go template.

    A dash inside the braces would remove the line breaks beside them.
    """
    cases = [
        f'{{{{ {word} eq .Role "{role}" }}}}'
        + f"{frame[role][0]}{{{{ .Content }}}}{frame[role][1]}"
        for word, role in zip(("if", "else if", "else if"), _ROLES, strict=True)
    ]
    return "{{ range .Messages }}" + "".join(cases) + "{{ end }}{{ end }}" + frame["assistant"][0]

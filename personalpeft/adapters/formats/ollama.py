"""Write a Modelfile, from which Ollama makes a model out of a GGUF file.

Ollama's templates are Go templates. The base's Jinja template renders a sample chat, and the text
around each message becomes the Go template.

Invariant: a template is written only if it renders several chats exactly as the base's own does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class _Frame:
    """The text before and after a message of each role."""

    before: dict[str, str]
    after: dict[str, str]

    def render(self, messages: Sequence[Message]) -> str:
        texts = (f"{self.before[m.role]}{m.content}{self.after[m.role]}" for m in messages)
        return "".join(texts) + self.before["assistant"]


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
        if any(mark in text for mark in _QUOTES):
            return None
        frame = _split_template(base, begin, middle, to_reply, after_reply)
        if (
            last == to_reply
            and frame is not None
            and all(_renders_as(base, frame, shape) for shape in _SHAPES)
        ):
            return frame
    except (ValueError, CardError, InvalidInput):
        # The template refuses such a chat, repeats a message or drops it.
        return None
    return None


def _split_template(
    base: Base, begin: str, middle: str, to_reply: str, after_reply: str
) -> _Frame | None:
    """Split each text between two messages into the end of one and the start of the next."""
    for end in base.stop_tokens:
        if all(end in piece for piece in (middle, to_reply, after_reply)):
            parts = [_part(piece, end) for piece in (middle, to_reply, after_reply)]
            (after_system, before_user), (after_user, before_reply), (ends_reply, _) = parts
            before = {"system": begin, "user": before_user, "assistant": before_reply}
            after = {"system": after_system, "user": after_user, "assistant": ends_reply}
            return _Frame(before, after)
    return None


def _part(piece: str, end: str) -> tuple[str, str]:
    at = piece.index(end) + len(end)
    while at < len(piece) and piece[at] == "\n":
        at += 1
    return piece[:at], piece[at:]


def _renders_as(base: Base, frame: _Frame, roles: Sequence[Role]) -> bool:
    messages = [Message(role, f"message {number}") for number, role in enumerate(roles)]
    return frame.render(messages) == render_chat(base, messages)


def _escape_go_template(frame: _Frame) -> str:
    """Return the frame as a Go template.

    A dash inside the braces would remove the line breaks beside them.
    """
    cases = [
        f'{{{{ {word} eq .Role "{role}" }}}}'
        + f"{frame.before[role]}{{{{ .Content }}}}{frame.after[role]}"
        for word, role in zip(("if", "else if", "else if"), _ROLES, strict=True)
    ]
    return (
        "{{ range .Messages }}" + "".join(cases) + "{{ end }}{{ end }}" + frame.before["assistant"]
    )

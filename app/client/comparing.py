"""A blind comparison. Only the server knows which revision gave which answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from personalpeft.chat.compare import LabeledComparison
from personalpeft.formatting import to_json
from personalpeft.learning.report import excerpt
from personalpeft_app.http.api_v1 import schemas as v


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers. The server tells their revisions after ``choose``."""

    prompt: str
    answers: tuple[v.BlindAnswer, ...]
    same: bool
    keep: Callable[[int | str], LabeledComparison] = field(repr=False, compare=False)

    def choose(self, which: int | str) -> LabeledComparison:
        """Choose as ``personalpeft.Comparison.choose``. Raises ``NotFound`` if it expired."""
        return self.keep(which)

    def as_json(self) -> dict[str, object]:
        """Return the comparison as plain data."""
        return {"prompt": self.prompt, "answers": to_json(self.answers), "same": self.same}

    def __str__(self) -> str:
        lines = [f"> {excerpt(self.prompt, 80)}"]
        for answer in self.answers:
            lines += [
                "",
                f"{answer.number} ({answer.name})",
                *(f"  {line}" for line in answer.text.splitlines() or [""]),
            ]
        return "\n".join(lines)

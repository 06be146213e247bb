"""Two answers side by side, of which the server alone knows whose they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from personalpeft.chat.compare import LabeledComparison
from personalpeft.learning.report import excerpt
from personalpeft_app.http.api_v1 import schemas as v


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers, of which the server alone knows whose they are until ``choose`` is called."""

    prompt: str
    answers: tuple[v.BlindAnswer, ...]
    same: bool
    keep: Callable[[int | str], LabeledComparison] = field(repr=False, compare=False)

    def choose(self, which: int | str) -> LabeledComparison:
        """As ``personalpeft.Comparison.choose``; ``NotFound`` when the server no longer remembers it."""
        return self.keep(which)

    def as_json(self) -> dict[str, object]:
        """The comparison as plain data."""
        answers = [
            {"number": each.number, "name": each.name, "text": each.text} for each in self.answers
        ]
        return {"prompt": self.prompt, "answers": answers, "same": self.same}

    def __str__(self) -> str:
        lines = [f"> {excerpt(self.prompt, 80)}"]
        for answer in self.answers:
            lines += [
                "",
                f"{answer.number} ({answer.name})",
                *(f"  {line}" for line in answer.text.splitlines() or [""]),
            ]
        return "\n".join(lines)

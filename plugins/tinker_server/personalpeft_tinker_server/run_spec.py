"""What a run trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from sqlite3 import Row


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a run trains: the shape of its LoRA, and the name that the client gave the base."""

    run: str
    owner: str
    base: str
    rank: int
    seed: int
    attn: bool
    mlp: bool
    parent: str | None = None

    # The constant alpha of Tinker, so that a learning rate fits all ranks.
    ALPHA = 32.0

    @property
    def scaling(self) -> float:
        return self.ALPHA / self.rank

    @classmethod
    def of(cls, row: Row) -> RunSpec:
        """Return the spec in a row of ``runs``."""
        return cls(
            row["id"],
            row["owner"],
            row["base"],
            row["rank"],
            row["seed"],
            bool(row["attn"]),
            bool(row["mlp"]),
            row["parent"],
        )

    def targets(self, projections: Sequence[str]) -> tuple[str, ...]:
        """Return the projections that the run trains."""
        return tuple(name for name in projections if (self.attn if "attn" in name else self.mlp))

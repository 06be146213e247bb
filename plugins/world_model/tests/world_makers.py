"""Real recordings of games, and a kitchen that a tiny model can learn by heart."""

from __future__ import annotations

from pathlib import Path

from personalpeft import Runtime
from personalpeft_world_model import Outcome, State, Step, Training, Trajectory, WorldModel

RECORDINGS = Path(__file__).parent / "coin.jsonl"
"""Six games of the coin collector, as ``personalpeft world record`` wrote them."""

TASK = "Fry it."
RAW, FRIED = State("raw", actions=("cook", "eat")), State("fried", actions=("cook", "eat"))
DINNER, BURNED = State("full", Outcome.WON), State("ash", Outcome.LOST)
TRAINING = Training(epochs=60, batch_size=4, rank=8, learning_rate=0.02, holdout=0.0)


def kitchen() -> list[Trajectory]:
    cooked = Step("cook", FRIED)
    return [
        Trajectory("kitchen", TASK, RAW, (cooked, Step("eat", DINNER))),
        Trajectory("kitchen", TASK, RAW, (cooked, Step("cook", BURNED))),
        Trajectory("kitchen", TASK, RAW, (Step("eat", State("sick", Outcome.LOST)),)),
    ]


def kitchen_model(runtime: Runtime) -> WorldModel:
    """Return a model that has learned the kitchen."""
    model = WorldModel(runtime.user("world"), "kitchen")
    model.teach(kitchen())
    model.learn(TRAINING, accept=True)
    return model


class Kitchen:
    """The kitchen itself, an environment."""

    name, task = "kitchen", TASK

    def __init__(self) -> None:
        self._state = RAW

    def reset(self) -> State:
        self._state = RAW
        return RAW

    def step(self, action: str) -> State:
        after = {
            (RAW, "cook"): FRIED,
            (RAW, "eat"): State("sick", Outcome.LOST),
            (FRIED, "cook"): BURNED,
            (FRIED, "eat"): DINNER,
        }
        self._state = after.get((self._state, action), self._state)
        return self._state

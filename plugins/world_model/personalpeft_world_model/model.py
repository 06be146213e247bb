"""A world model: a user's layer ``skill.world.<name>`` that predicts the next state.

Demonstrations teach the layer, and ``User.learn`` builds it like any skill. It has revisions, a
gate and a history. It never answers a chat by itself, so its scope is "never".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from personalpeft import InvalidInput, LearnReport, NotFound, User
from personalpeft.ids import check_skill_name
from personalpeft.types import SignalKind
from personalpeft_world_model.environment import Outcome, State
from personalpeft_world_model.exact_match import EXACT_MATCH
from personalpeft_world_model.trajectories import Trajectory, demonstrations, transition_prompt

SKILL_PREFIX = "world."
MAX_STATE_TOKENS = 256
# Predictions that the engine reads in one batch.
AT_ONCE = 16

Query: TypeAlias = tuple[str, State, str]
"""A task, the state before an action, and the action."""


MAX_EPOCHS = 1_000_000


@dataclass(frozen=True, slots=True)
class Training:
    """How a world model is trained.

    Attributes:
        epochs: How often each new transition is trained on.
        batch_size: Transitions a step.
        rank: The rank of the layer, which later learns keep.
        learning_rate: The peak rate.
        holdout: The share of the transitions, in whole games, that the gate judges by. It is at
            most 128 transitions.
    """

    epochs: float = 3
    batch_size: int = 16
    rank: int = 16
    learning_rate: float = 1e-3
    holdout: float = 0.1

    def __post_init__(self) -> None:
        # Before anything is taught. Negated, so that NaN is refused as well.
        if not 0 < self.epochs <= MAX_EPOCHS:
            raise InvalidInput(
                f"The epochs must be more than 0 and at most {MAX_EPOCHS:,}, not {self.epochs}.",
                hint="Leave them out for the default.",
            )

    @property
    def recipe(self) -> dict[str, Any]:
        """The recipe of the layer, for ``User.learn``.

        The layer is attached to no chat, so nothing holds it to general replies.
        """
        return {
            "rank": self.rank,
            "learning_rate": self.learning_rate,
            "batch_size": self.batch_size,
            # The library makes ``min_steps`` for three batches of lessons.
            "min_steps": max(1, round(3 * self.epochs)),
            "max_steps": 1_000_000,
            "eval_fraction": self.holdout,
            "max_length": MAX_STATE_TOKENS,
            "replay_ratio": 0.25,
            "kl_prompts": 0,
            "few_shot_replies": 0,
        }


DEFAULT_TRAINING = Training()


class WorldModel:
    """The world model ``name`` of a user.

    Args:
        user: The owner. A user of its own is best: a layer is built on the layers below it.
        name: The name of the environment, such as "coin".

    Raises:
        InvalidInput: The name is no name of a skill.
    """

    def __init__(self, user: User, name: str) -> None:
        self.user = user
        self.skill = check_skill_name(f"{SKILL_PREFIX}{name}")
        self.layer = f"skill.{self.skill}"

    def teach(self, trajectories: Iterable[Trajectory]) -> int:
        """Record what trajectories show, and return how many transitions are new.

        A transition that was taught before is not recorded again. Of several outcomes of an action,
        the most frequent one is taught. Raises ``InvalidInput`` for an
        empty text.
        """
        payloads = (
            signal.payload
            for signal in self.user.signals()
            if signal.kind is SignalKind.DEMONSTRATION and signal.payload.get("skill") == self.skill
        )
        known = [
            (
                *(text for _, text, *_ in payload.get("before", ())),
                payload["prompt"],
                payload["answer"],
            )
            for payload in payloads
        ]
        new = list(demonstrations(trajectories, known))
        if new:
            self.user.teach_many(new, skill=self.skill)
            self.user.scope(self.layer, "never")
        return len(new)

    def learn(self, training: Training = DEFAULT_TRAINING, **options: Any) -> LearnReport:
        """Build a revision from what is new, and make it live if the gate promotes it.

        The gate compares exact matches on held-out games before and after. Later learns of the
        layer without this method, also a rebuild after ``forget``, train and judge it likewise.

        Args:
            training: How it is trained.
            options: Budgets and callbacks of ``User.learn``, such as ``seconds`` and ``progress``.

        Raises:
            NothingToLearn: Nothing was taught since the last learn.
            Exception: What else ``User.learn`` raises.
        """
        return self.user.learn(self.layer, recipe=training.recipe, verifier=EXACT_MATCH, **options)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that a prediction is made with: the head, and those that it was built on.

        Raises ``NotFound`` where nothing is live.
        """
        head = next((each.head for each in self.user.layers() if each.name == self.layer), None)
        if head is None:
            raise NotFound(
                f"{self.user.id} has no live world model {self.layer}.",
                hint="Teach it trajectories and learn: personalpeft world learn",
            )
        (revision,) = (each for each in self.user.revisions(self.layer) if each.id == head)
        return (*(entry.layer for entry in revision.below), self.layer)

    def predict(self, task: str, state: State, action: str) -> State:
        """Return the state that the model expects after an action. Raises ``NotFound``.

        A state of more than ``MAX_STATE_TOKENS`` is cut, and its outcome is unknown.
        """
        (predicted,) = self.predict_many([(task, state, action)])
        return predicted

    def predict_many(
        self, queries: Sequence[Query], *, progress: Callable[[float], None] = lambda done: None
    ) -> tuple[State, ...]:
        """Return the states that the model expects, several at a time. Raises ``NotFound``.

        Equal queries are predicted once. ``progress`` is called with the share that is done, 0 to 1.
        """
        layers = self.layers
        different = list(dict.fromkeys((task, state.text, act) for task, state, act in queries))
        known: dict[tuple[str, str, str], State] = {}

        def ask(query: tuple[str, str, str]) -> State:
            task, text, action = query
            reply = self.user.chat(
                list(transition_prompt(task, State(text), action)),
                temperature=0,
                max_tokens=MAX_STATE_TOKENS,
                memory=False,
                layers=layers,
            )
            if reply.finish_reason == "length":
                return State(reply.text, Outcome.UNKNOWN)
            return State.read(reply.text)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            for query, state in zip(different, pool.map(ask, different), strict=True):
                known[query] = state
                progress(len(known) / len(different))
        return tuple(known[task, state.text, action] for task, state, action in queries)

"""One practice, from tasks to a verdict: try, verify, train a step on what was tried, and again; then the gate.

Each round samples groups of replies from the layer as it is, so each step of the policy gradient is on-policy: no reply
is older than the step that learns from it. The first rounds imitate what has passed so far (rejection sampling), the
others follow the gradient of the rewards. A practice whose head was itself practised on the same tasks counts on from
there, so that many short ones come as far as a long one.

Invariants: of all tasks that there are, a quarter is only ever judged by: which, follows from what they ask, so that none
of them is practised at any time. What a round tried is kept with the steps that it asks for, and every step is kept before
the next one begins: so a practice that was stopped anywhere goes on to the same bytes, and a kill costs one step, or the
replies of the round that was being tried. What it publishes goes the way of a learn: durable file, gate, one transaction.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from personalpeft.adapters.formats.packed import in_half
from personalpeft.adapters.types import Adapter, Manifest
from personalpeft.backends.base import Continuation, Session
from personalpeft.backends.error_mapping import model_faults
from personalpeft.engine.engine import Engine
from personalpeft.errors import Cancelled, InvalidInput
from personalpeft.learning.gate.gate import EvalItem
from personalpeft.learning.options import Asking
from personalpeft.learning.plan import BUILD_FORMAT, in_its_place
from personalpeft.learning.report import Example
from personalpeft.learning.rl.advantages import advantages
from personalpeft.learning.rl.config import Drill
from personalpeft.learning.rl.policy_loss import PolicyGradient
from personalpeft.learning.rl.rollouts import STOPPED, Group, attempt, seed_from
from personalpeft.learning.rl.state import Diary, Step, read_page, write_page
from personalpeft.learning.rl.tasks import choose
from personalpeft.learning.train.config import Recipe
from personalpeft.learning.train.loop import Desk, Manners
from personalpeft.learning.train.losses import Supervised
from personalpeft.plugins import RIGHT, Shaped, Task, Verifying
from personalpeft.types import Revision, Sampling, Stack, StackEntry, canonical_digest


@dataclass(frozen=True, slots=True)
class Exercise:
    """What is practised, by whom, on what: decided before anything is tried."""

    user: str
    layer: str
    drill: Drill
    recipe: Recipe
    verifier: Verifying
    shaping: Shaped | None
    live: Stack
    below: Stack
    parent: Revision | None
    pool: tuple[Task, ...]
    held_back: tuple[Task, ...]

    @property
    def rounds_before(self) -> int:
        """How many rounds the parent was practised on such tasks since it was last shown any."""
        before = self.parent.recipe.get("practice", {}) if self.parent else {}
        same = all(before.get(key) == self.about[key] for key in ("verifier", "family"))
        return int(before["rounds"]) if before and same else 0

    @property
    def about(self) -> dict[str, Any]:
        """Everything beside the matrices that decides a round, as data."""
        return {
            **asdict(self.drill),
            "verifier": self.verifier.name,
            "family": self.verifier.family,
            "shaping": self.shaping.name if self.shaping else None,
        }

    def imitates(self, rounds: int) -> bool:
        """Whether the last of so many rounds of this practice imitates what has passed."""
        return self.rounds_before + rounds <= self.drill.imitate

    def inputs(self, rounds: int | None = None, steps: int | None = None) -> str:
        """Names everything that a build of so many rounds and steps depends on; without them, what each step depends on."""
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "base": self.live.base,
                "layer": self.layer,
                "practice": {**self.about, "rounds": self.rounds_before},
                "tasks": self.tasks_digest,
                "recipe": self.recipe.as_json(),
                "rounds": rounds,
                "steps": steps,
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
            }
        )

    @property
    def tasks_digest(self) -> str:
        """What there was to try, by content."""
        return canonical_digest([[task.id, task.prompt] for task in self.pool])

    def with_layer(self, digest: str, weight: float) -> Stack:
        """The live stack with a candidate in this layer's place."""
        return in_its_place(
            self.live, StackEntry(self.layer, f"{self.layer}@{digest[:12]}", digest, weight)
        )


def make_exercise(
    user: str,
    layer: str,
    drill: Drill,
    recipe: Recipe,
    verifier: Verifying,
    shaping: Shaped | None,
    live: Stack,
    below: Stack,
    head: Revision | None,
) -> Exercise:
    """Draws the tasks. Raises ``InvalidInput`` where the verifier has too few, ``PluginError``."""
    if head is not None:
        # A child has its parent's shape.
        recipe = replace(
            recipe,
            rank=head.recipe["rank"],
            alpha=head.recipe["alpha"],
            targets=tuple(head.recipe["targets"]),
        )
    # Others in the next practice, which has another parent.
    seed = seed_from("tasks", drill.seed, layer, head.digest if head else None)
    drawn = verifier.tasks(seed, 4 * max(drill.pool, drill.held_back))
    held_back = tuple(task for task in drawn if for_judging(task))[: drill.held_back]
    pool = tuple(task for task in drawn if not for_judging(task))[: drill.pool]
    if not held_back or not pool:
        raise InvalidInput(
            f"{verifier.name} has too few different tasks: {len(held_back)} to judge by and {len(pool)} others.",
            hint="Choose a larger family: a quarter of all tasks is only there to judge by.",
        )
    return Exercise(
        user, layer, drill, recipe, verifier, shaping, live, below, head, pool, held_back
    )


def run_rounds(
    engine: Engine,
    exercise: Exercise,
    session: Session,
    *,
    start: Stack,
    desk: Desk,
    manners: Manners,
) -> Diary:
    """Tries and trains until the rounds are done, a budget is used up (but one round is tried, and one step made of it), or
    no task has anything more to teach. ``start`` answers until there is a first step. After what each round tried and after
    each step all is on the ``desk``, and what lies there of the same practice is gone on from. Raises ``Cancelled``,
    ``ServingFailed``.
    """
    drill, inputs = exercise.drill, exercise.inputs()
    diary = read_page(desk.load(), session, inputs)
    before = diary.steps

    def go_on() -> None:
        manners.wait()
        if manners.cancelled():
            raise Cancelled(f"Stopped after step {diary.steps}; nothing has changed.", hint=STOPPED)

    def keep() -> None:
        with guarded():
            page = write_page(diary, session, inputs)
        desk.save(page)

    def over() -> bool:
        enough = manners.steps is not None and diary.steps - before >= manners.steps
        return enough or manners.out_of_time()

    while True:
        while diary.todo and not (diary.steps and over()):
            go_on()
            terms = diary.todo[0]
            with guarded():
                session.refer(terms)
                session.step(
                    terms,
                    drill.imitation_rate
                    if exercise.imitates(diary.rounds)
                    else drill.learning_rate,
                )
            diary.stepped()
            keep()
        manners.progress(diary.rounds / drill.rounds)
        if diary.rounds >= drill.rounds or (diary.rounds and over()):
            return diary
        go_on()
        chance = random.Random(seed_from("choice", drill.seed, exercise.tasks_digest, diary.rounds))
        tasks = _chosen(exercise, diary, chance)
        if not tasks:
            return diary
        groups = _tried(engine, exercise, session, start, diary, tasks, manners)
        diary.tried(groups)
        diary.todo = _steps(exercise, diary, groups, chance)
        keep()


def imitation(
    passed: Sequence[Continuation], drill: Drill, chance: random.Random
) -> tuple[Step, ...]:
    """Rejection sampling: the steps of one round. Each different reply that has passed so far, in whichever round, is an
    answer to give again: what was once right stays right, so that it need not come from the model as it is.
    """
    if not passed:
        return ()
    size = min(drill.batch, len(passed))
    drawn = [chance.sample(passed, size) for _ in range(drill.repeats)]
    return tuple(tuple(Supervised(said, 1 / size) for said in batch) for batch in drawn)


def policy(groups: Sequence[Group], shaping: Shaped | None, drill: Drill) -> Step:
    """The policy gradient of all groups whose replies are set apart by their rewards; the others say nothing."""
    pushed = []
    for group in groups:
        attempts = [rollout.attempt for rollout in group.rollouts]
        rewards = [dict(rollout.rewards) for rollout in group.rollouts]
        if shaping is not None:
            for each, shaped in zip(rewards, shaping.shape(attempts, group.pass_rate), strict=True):
                each[RIGHT] = shaped
        pushed += [
            (r.said, a) for r, a in zip(group.rollouts, advantages(rewards), strict=True) if a
        ]
    return tuple(
        PolicyGradient(said, a, drill.longest, drill.kl, 1 / len(pushed)) for said, a in pushed
    )


def examined(
    engine: Engine, exercise: Exercise, candidate: Stack, *, cancelled: Asking, paused: Asking
) -> tuple[tuple[EvalItem, ...], dict[str, Any], tuple[Example, ...]]:
    """What live stack and candidate make of the tasks held back, greedily: one comparison a task by the reward that was
    practised for, the figures, and examples.
    """
    how = Sampling(max_tokens=exercise.drill.longest)
    before, after = (
        [
            group.rollouts[0]
            for group in attempt(
                engine,
                exercise.user,
                stack,
                exercise.held_back,
                exercise.verifier,
                how,
                cancelled=cancelled,
                paused=paused,
            )
        ]
        for stack in (exercise.live, candidate)
    )
    asked = []
    for task, old, new in zip(exercise.held_back, before, after, strict=True):
        pair = (old.attempt, new.attempt)
        rewards = (pair[0].reward, pair[1].reward)
        if exercise.shaping is not None:
            first, second = exercise.shaping.shape(pair, sum(each.passed for each in pair) / 2)
            rewards = (first, second)
        asked.append(EvalItem(f"task_{seed_from(task.prompt):08x}", *rewards))
    figures = {
        "asked": len(asked),
        "won": sum(each.won for each in asked),
        "lost": sum(each.lost for each in asked),
        "passed_before": sum(rollout.attempt.passed for rollout in before),
        "passed_after": sum(rollout.attempt.passed for rollout in after),
        "length_before": round(sum(rollout.length for rollout in before) / len(before), 4),
        "length_after": round(sum(rollout.length for rollout in after) / len(after), 4),
    }
    shown = zip(exercise.held_back, before, after, strict=True)
    examples = tuple(Example(task.prompt, old.text, new.text) for task, old, new in list(shown)[:3])
    return tuple(asked), figures, examples


def adapter_of(exercise: Exercise, session: Session, recipe: Mapping[str, Any]) -> Adapter:
    """The layer as the session has it now, as it would be kept."""
    shape = exercise.recipe
    manifest = Manifest(
        base=exercise.live.base,
        layer=exercise.layer,
        rank=shape.rank,
        scaling=shape.scaling,
        targets=shape.targets,
        recipe=recipe,
        signals=exercise.tasks_digest,
        below=tuple(entry.digest for entry in exercise.below.entries),
        parent=exercise.parent.digest if exercise.parent else None,
    )
    return Adapter(manifest, in_half(session.pairs()))


def guarded() -> AbstractContextManager[None]:
    """Turns what the model fails at while it practises into ``ServingFailed``."""
    again = "Close what else takes memory and practise again, which goes on from what was done; a smaller batch or group"
    return model_faults(
        "The model failed while it practised.",
        hint=f"The log has the details. {STOPPED}",
        less=f"{again} under [practice] in the base's card takes less.",
    )


def for_judging(task: Task) -> bool:
    """Whether a task is only there to judge by: a quarter of all there are is, by what they ask, whoever sets them and in
    whichever practice.
    """
    return seed_from("judged by", task.prompt) % 4 == 0


def _chosen(exercise: Exercise, diary: Diary, chance: random.Random) -> tuple[Task, ...]:
    solved_too = exercise.shaping is not None and exercise.shaping.mastered
    return choose(
        exercise.pool, diary.standings, exercise.drill.per_round, chance, solved_too=solved_too
    )


def _tried(
    engine: Engine,
    exercise: Exercise,
    session: Session,
    start: Stack,
    diary: Diary,
    tasks: Sequence[Task],
    manners: Manners,
) -> tuple[Group, ...]:
    """What the layer as it is now replies, or ``start`` before there is one."""
    drill = exercise.drill
    how = Sampling(
        drill.temperature, 1.0, drill.longest, seed_from("reply", drill.seed, diary.rounds)
    )

    def by(stack: Stack) -> tuple[Group, ...]:
        return attempt(
            engine,
            exercise.user,
            stack,
            tasks,
            exercise.verifier,
            how,
            each=drill.group,
            cancelled=manners.cancelled,
            paused=manners.paused,
        )

    if not diary.steps:
        return by(start)
    with engine.lent(adapter_of(exercise, session, {})) as digest:
        return by(exercise.with_layer(digest, 1.0))


def _steps(
    exercise: Exercise, diary: Diary, groups: Sequence[Group], chance: random.Random
) -> tuple[Step, ...]:
    """What the round that was just tried asks for."""
    if exercise.imitates(diary.rounds):
        return imitation(tuple(diary.passed), exercise.drill, chance)
    terms = policy(groups, exercise.shaping, exercise.drill)
    return (terms,) if terms else ()

"""World models for personalpeft: a layer that predicts what an environment does next.

From "Word2World" (arXiv 2512.18832). Record trajectories of an environment, teach them as
demonstrations of the layer ``skill.world.<name>``, and learn. The layer checks actions before they
are taken, imagines trajectories, or starts a skill::

    from personalpeft_world_model import WorldModel, record
    from personalpeft_world_model.textworld_games import TextWorldGame, make_game

    games = [TextWorldGame(make_game("coin", seed, folder)) for seed in range(100)]
    model = WorldModel(runtime.user("world"), "coin")
    model.teach(record(games, seed=0))
    print(model.learn())
    model.predict(games[0].task, games[0].reset(), "go east")

Everything goes through the public surface of personalpeft; an environment needs no more than
``Environment`` says.
"""

from __future__ import annotations

from personalpeft_world_model.environment import Environment, Outcome, State
from personalpeft_world_model.fidelity import (
    Consistency,
    Fidelity,
    Rate,
    measure_baselines,
    measure_consistency,
    measure_fidelity,
    measure_success,
)
from personalpeft_world_model.imagination import (
    ImaginedGame,
    Verification,
    begins_with,
    imagine,
    warm_start,
)
from personalpeft_world_model.model import Training, WorldModel
from personalpeft_world_model.recording import (
    Policy,
    noisy,
    random_policy,
    record,
    run_policy,
    walkthrough_policy,
)
from personalpeft_world_model.trajectories import Step, Trajectory, read_jsonl, write_jsonl

__all__ = [
    "Consistency",
    "Environment",
    "Fidelity",
    "ImaginedGame",
    "Outcome",
    "Policy",
    "Rate",
    "State",
    "Step",
    "Training",
    "Trajectory",
    "Verification",
    "WorldModel",
    "begins_with",
    "imagine",
    "measure_baselines",
    "measure_consistency",
    "measure_fidelity",
    "measure_success",
    "noisy",
    "random_policy",
    "read_jsonl",
    "record",
    "run_policy",
    "walkthrough_policy",
    "warm_start",
    "write_jsonl",
]

"""Configuration of one training run, the part of a revision's recipe that a base's card can set.

Signals, base, the revisions below and a ``TrainingConfig`` together decide every byte of a
revision. The defaults suit a base of about 135M parameters; a card's ``[learning]`` table overrides
them. docs/explanation/learning.md says why each default is as it is.

Invariant: the digest of a build's inputs never changes by a new name. A field that was renamed
counts there under its name in ``FORMER_NAMES``.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from personalpeft.adapters.types import RANK_LIMIT
from personalpeft.errors import CardError, InvalidInput, suggest_nearest
from personalpeft.former_names import PRACTICE, TRAINING
from personalpeft.types import Architecture, Json

Start: TypeAlias = Literal["auto", "scratch"]
"""Where a build starts: the layer's head if it can be extended ("auto"), or an empty adapter."""

# Raise it with every change to code that decides a revision's bytes. Then no build of older code
# counts as one of newer code, finished or not.
BUILD_FORMAT = 13

MAX_LENGTH = 256
"""Tokens at which a reply is cut where no card says otherwise, in training and in scoring."""

# Training holds ten float32 numbers for each trained parameter. Four are the parameter, its
# gradient and two moments. A checkpoint copies the parameter and the moments twice.
_BYTES_PER_PARAMETER = 4 * (4 + 3 + 3)

_MAX_INT = 2**63 - 1
Count: TypeAlias = Annotated[int, Field(ge=1, le=_MAX_INT)]
Size: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_INT)]
# An int from a card stays an int: 8 and 8.0 differ in the bytes of files and in digests.
Number: TypeAlias = Size | Annotated[float, Field(ge=0, allow_inf_nan=False)]
Country: TypeAlias = Annotated[str, Field(pattern=r"^[A-Z]{2}$")]
Fraction: TypeAlias = Annotated[int, Field(ge=0, le=1)] | Annotated[float, Field(ge=0, le=1)]


class CardConfig(BaseModel):
    """A configuration that a table of a base's card can override. Instances are frozen."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {}
    """Fields by the names of earlier versions, which are deprecated keys of cards."""

    REMOVED_NAMES: ClassVar[frozenset[str]] = frozenset()
    """Keys of earlier versions that mean nothing now. Cards may still have them, with a warning."""

    def to_stored(self) -> dict[str, Any]:
        """Return the fields as JSON data."""
        return self.model_dump(mode="json")

    def to_digest(self) -> dict[str, Any]:
        """Return the fields as JSON data to digest, under the names that never change."""
        former = {name: key for key, name in self.FORMER_NAMES.items()}
        return {former.get(name, name): value for name, value in self.to_stored().items()}

    @classmethod
    def read_table(cls, card: str, table: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that a table of a card sets, checked, by field name.

        Deprecated keys are accepted with a warning.

        Args:
            card: The name of the card, for errors.
            table: The name of the table, for errors.
            values: The table.

        Raises:
            CardError: A key is unknown, or has a wrong value.
        """
        renamed = cls.FORMER_NAMES
        notes = {key: f"is called {renamed[key]} now" for key in renamed.keys() & values.keys()}
        notes |= dict.fromkeys(cls.REMOVED_NAMES & values.keys(), "has no effect any more")
        for key, note in notes.items():
            warnings.warn(
                f"{key} in [{table}] of the card {card} {note}", DeprecationWarning, stacklevel=2
            )
        keys = {renamed.get(key, key): key for key in values if key not in cls.REMOVED_NAMES}
        fields = {name: values[key] for name, key in keys.items()}
        return cls.check_fields(fields, f"[{table}] of the card {card}", CardError, keys)

    @classmethod
    def check_fields(
        cls,
        values: Mapping[str, Any],
        source: str,
        error: type[CardError | InvalidInput],
        keys: Mapping[str, str] = {},
    ) -> dict[str, Any]:
        """Return the fields that some values set, checked.

        Args:
            values: The values by field name.
            source: Where they are from, for the error.
            error: What to raise where a field is unknown or has a wrong value.
            keys: By field name, the name in the source where it is another.
        """
        try:
            known = cls.model_validate(dict(values))
        except ValidationError as invalid:
            # A number is checked as int and as float; the last message is of the wider type.
            last = invalid.errors()[-1]
            name = str(last["loc"][0])
            if last["type"] == "extra_forbidden":
                raise error(
                    f"{source} has no field {name!a}.",
                    hint=suggest_nearest(name, cls.model_fields, what="field"),
                ) from None
            raise error(
                f"{source} has a wrong value: {keys.get(name, name)} = {values[name]!a}.",
                hint=f"{last['msg']}; the default is {cls.model_fields[name].default!r}.",
            ) from None
        return {name: getattr(known, name) for name in known.model_fields_set}


class TrainingConfig(CardConfig):
    """How one layer is trained."""

    FORMER_NAMES: ClassVar[Mapping[str, str]] = TRAINING
    REMOVED_NAMES: ClassVar[frozenset[str]] = frozenset(
        {"content", "content_weight", "shared", "template_weight"}
    )

    rank: Annotated[int, Field(ge=1, le=RANK_LIMIT)] = 8  # rank of A and B
    alpha: Number = 32.0  # LoRA scaling is alpha / rank
    target_modules: Annotated[tuple[str, ...], Field(strict=False)] = ()  # paths or parts of paths
    learning_rate: Number = 5e-4  # peak rate of AdamW
    min_steps: Count = 26  # steps of a first build of up to min_steps_batches of new signals
    min_steps_batches: Count = 3  # more signals than these batches take proportionally more steps
    max_steps: Count = 120  # limit of steps
    batch_size: Count = 4  # lessons a step
    preference_pairs: Size = 1  # lessons with a rejected text that add a DPO loss to a step
    beta: Number = 0.1  # beta of DPO and KTO
    fact_weight: Number = 4.0  # weight of the answer of a fact, beside the other losses
    few_shot_replies: Size = 4  # few-shot replies a step (data/batching.py)
    few_shot_weight: Number = 2.0  # weight of all of these together
    rated_replies: Size = 2  # liked replies in a step's KTO loss, and as many disliked ones
    num_paraphrases: Size = 5  # more wordings of each question about a fact
    unanswerable_prompts: Size = 0  # questions a step whose right answer is "I do not know"
    kl_prompts: Size = 4  # general prompts a step that are held to the stack below
    kl_weight: Number = 2.0  # weight of all of these together
    replay_ratio: Fraction = 0.5  # share of a batch that replays lessons of the parent
    warmup_ratio: Fraction = 0.05  # share of the steps in which the rate rises
    max_grad_norm: Number = 1.0  # gradients are clipped to this norm
    weight_decay: Number = 0.0  # of AdamW
    eval_fraction: Fraction = 0.25  # share of the lessons that is held out
    max_length: Annotated[int, Field(ge=2, le=_MAX_INT)] = MAX_LENGTH  # tokens a reply is cut at
    tokens_per_parameter: Number = 1e-2  # most tokens of facts a trained parameter
    seed: Size = 0  # of A and of the order of lessons
    # Countries whose personal numbers are replaced in lessons; none: nothing is (data/scrubber.py).
    scrub: Annotated[tuple[Country, ...], Field(strict=False)] = ()

    def to_stored(self) -> dict[str, Any]:
        """Return the fields as JSON data. ``scrub`` is stored where it is used."""
        stored = super().to_stored()
        return stored if self.scrub else {k: v for k, v in stored.items() if k != "scrub"}

    @classmethod
    def from_stored(cls, recipe: Json, current: Self) -> Self:
        """Return the configuration that a revision stores.

        A recipe from before ``fact_weight`` was trained without it. With the weight of now, a lost
        adapter could not be built again.

        Args:
            recipe: The recipe of the revision.
            current: The configuration of its layer now. It has the fields that are newer than the
                recipe.
        """
        stored = {key: value for key, value in recipe.items() if key in cls.model_fields}
        values = {"fact_weight": 1.0, **stored}
        values["target_modules"] = tuple(values["target_modules"])
        values["scrub"] = tuple(recipe.get("scrub", ()))
        return current.model_copy(update=values)

    @property
    def scaling(self) -> float:
        """What ``B @ A`` is multiplied by."""
        return self.alpha / self.rank

    def count_parameters(self, architecture: Architecture) -> int:
        """Return the size of A (rank x inputs) and B (outputs x rank) of all modules and blocks."""
        sizes = sum(sum(architecture.projections[module]) for module in self.target_modules)
        return self.rank * sizes * architecture.blocks

    def estimate_session_mb(self, architecture: Architecture) -> float:
        """Return about how many MB a session takes beside the base and its activations."""
        return self.count_parameters(architecture) * _BYTES_PER_PARAMETER / 1e6

    def with_shape_of(self, recipe: Json) -> Self:
        """Return it with rank, alpha and modules of a parent's stored recipe."""
        return self.model_copy(
            update={
                "rank": recipe["rank"],
                "alpha": recipe["alpha"],
                "target_modules": tuple(recipe["target_modules"]),
            }
        )

    def learning_rate_at(self, step: int, steps: int) -> float:
        """Return the rate of a step: linear warm-up, then REX decay (Chen et al. 2022, eq. 2)."""
        done = step / steps
        warmup = min(1.0, (step + 1) / max(1.0, self.warmup_ratio * steps))
        return self.learning_rate * warmup * (1 - done) / (0.5 + 0.5 * (1 - done))


# A memory is many unrelated facts: the MLP stores the most of them for each parameter. It needs
# steps for every fact: of 160 facts at once, 120 steps taught a fifth. Of eight new answers to
# old questions, 8 steps taught six, and 21 all. A skill is what is particular to each answer.
# From thirty demonstrations, attention alone learned it better than all projections did.
_LAYER_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "style": {},
    "skill": {
        "rank": 16,
        "target_modules": ("self_attn",),
        "learning_rate": 1e-3,
        "min_steps": 20,
        "kl_prompts": 1,
        "kl_weight": 1.0,
    },
    "memory": {
        "rank": 16,
        "target_modules": ("mlp",),
        "learning_rate": 1e-3,
        "min_steps": 42,
        "min_steps_batches": 1,
        "max_steps": 480,
        "batch_size": 8,
        "num_paraphrases": 24,
        "unanswerable_prompts": 1,
        "kl_prompts": 2,
        "kl_weight": 2.0,
    },
}


@dataclass(frozen=True, slots=True)
class TrainingConfigs:
    """The configuration of each kind of layer."""

    style: TrainingConfig
    skill: TrainingConfig
    memory: TrainingConfig

    def for_layer(self, layer: str) -> TrainingConfig:
        """Return the configuration of a layer: "style", "memory" or "skill.<name>"."""
        config: TrainingConfig = getattr(self, layer.partition(".")[0])
        return config


def load_training_configs(
    card: str, overrides: Json, projections: Mapping[str, tuple[int, int]]
) -> TrainingConfigs:
    """Return the configurations for a base.

    Args:
        card: The name of its card, for errors.
        overrides: The card's ``[learning]`` table, for all layers. ``[learning.memory]`` and the
            like override it for one kind. ``target_modules`` may name a module by path, by last
            name or by part of the path ("mlp"); the default is all.
        projections: The base's linear modules, name -> (inputs, outputs).

    Raises:
        CardError: A table has an unknown key, or a wrong value.
    """
    fields = read_training_tables(card, overrides)
    for table in fields.values():
        _check_modules(table, projections, f"[learning] of the card {card}", CardError)
    configs = {}
    for kind, defaults in _LAYER_DEFAULTS.items():
        values = {**defaults, **fields[""], **fields[kind]}
        modules = _select_modules(values.get("target_modules", ()), projections)
        values["target_modules"] = modules or tuple(projections)
        configs[kind] = TrainingConfig(**values)
    return TrainingConfigs(**configs)


def read_training_tables(card: str, overrides: Json) -> dict[str, dict[str, Any]]:
    """Return the fields that a card sets, by kind of layer; those for all layers under "".

    They are checked without the base, so not which modules there are. Args and raises:
    ``load_training_configs``.
    """
    common = {key: value for key, value in overrides.items() if key not in _LAYER_DEFAULTS}
    fields = {"": TrainingConfig.read_table(card, "learning", common)}
    for kind in _LAYER_DEFAULTS:
        table = overrides.get(kind, {})
        if not isinstance(table, Mapping):
            raise CardError(
                f"[learning] of the card {card} has a wrong value: {kind} = {table!r}.",
                hint=f"Make it a table: [learning.{kind}].",
            )
        fields[kind] = TrainingConfig.read_table(card, f"learning.{kind}", table)
    return fields


def override_config(
    config: TrainingConfig, overrides: Mapping[str, Any], projections: Mapping[str, tuple[int, int]]
) -> TrainingConfig:
    """Return a configuration with some fields replaced.

    Args:
        config: The configuration.
        overrides: New values by field name. ``target_modules`` may be parts of paths.
        projections: The base's linear modules.

    Raises:
        InvalidInput: A field is unknown, or has a wrong value.
    """
    changes = TrainingConfig.check_fields(overrides, "The recipe", InvalidInput)
    _check_modules(changes, projections, "The recipe", InvalidInput)
    if "target_modules" in changes:
        changes["target_modules"] = _select_modules(changes["target_modules"], projections)
    return config.model_copy(update=changes)


def _check_modules(
    fields: Mapping[str, Any],
    projections: Mapping[str, tuple[int, int]],
    source: str,
    error: type[CardError | InvalidInput],
) -> None:
    """Raise ``error`` if a base has none of the modules that a name in ``target_modules`` means."""
    known = {part for path in projections for part in (path, *path.split("."))}
    for name in fields.get("target_modules", ()):
        if name not in known:
            raise error(
                f"{source} names a module that the base does not have: {name!a}.",
                hint=suggest_nearest(name, known, what="module"),
            )


def _select_modules(names: Sequence[str], projections: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that the names mean, in the base's order."""
    return tuple(p for p in projections if any(name == p or name in p.split(".") for name in names))


class RLConfig(CardConfig):
    """How a skill is practiced: rounds of rejection sampling, then of policy gradient."""

    FORMER_NAMES: ClassVar[Mapping[str, str]] = PRACTICE

    rounds: Count = 36  # rounds of sampling and training
    rejection_rounds: Size = 12  # first rounds, which train on replies that passed
    rejection_steps: Count = 4  # steps of such a round; a round of policy gradient has one
    batch_size: Count = 8  # replies a step of rejection sampling
    prompts_per_round: Count = 8  # tasks a round
    num_generations: Annotated[Count, Field(ge=2)] = 5  # replies a task, the group of GRPO
    num_train_tasks: Count = 128  # tasks to practice
    num_eval_tasks: Count = 48  # other tasks, for the gate
    temperature: Number = 1.0  # of sampling; at 1 the gradient is that of the model itself
    max_completion_length: Count = 48  # tokens at which a reply ends
    beta: Number = 0.01  # weight of the KL from the stack below
    rejection_learning_rate: Number = 5e-4  # rate of rejection sampling
    learning_rate: Number = 2e-4  # rate of policy gradient
    seed: Size = 0  # of tasks, replies and their order

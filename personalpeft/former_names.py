"""The names that earlier versions stored, and those of today.

Rows under the hash chain are never rewritten, so old rows keep their names. The store gives all
that it reads the names of today, and new rows are written with them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

TRAINING: Mapping[str, str] = {
    "targets": "target_modules",
    "steps": "min_steps",
    "most_steps": "max_steps",
    "batch": "batch_size",
    "pairs": "preference_pairs",
    "thumbs": "rated_replies",
    "phrasings": "num_paraphrases",
    "unknown": "unanswerable_prompts",
    "anchors": "kl_prompts",
    "anchor_weight": "kl_weight",
    "replay": "replay_ratio",
    "warmup": "warmup_ratio",
    "clip": "max_grad_norm",
    "held_out": "eval_fraction",
    "longest": "max_length",
    "capacity": "tokens_per_parameter",
}
"""Fields of ``TrainingConfig``."""

PRACTICE: Mapping[str, str] = {
    "imitate": "rejection_rounds",
    "repeats": "rejection_steps",
    "imitation_rate": "rejection_learning_rate",
    "batch": "batch_size",
    "per_round": "prompts_per_round",
    "group": "num_generations",
    "pool": "num_train_tasks",
    "held_back": "num_eval_tasks",
    "longest": "max_completion_length",
    "kl": "beta",
}
"""Fields of ``RLConfig``."""

ROLES: Mapping[str, str] = {"train": "trained", "pinned": "held_out"}
"""Values of ``SignalRole``."""

MOVE_CAUSES: Mapping[str, str] = {
    "rollback undone": "rollback_undone",
    "taken back": "retracted",
    "judged again": "revalidated",
}
"""Values of ``MoveCause``."""

START: Mapping[str, str] = {"nothing": "scratch"}
"""Values of ``start`` of a learn."""

_PLACEMENTS = {"profile": "rule", "prompt": "rule", "kept": "unused"}
_CAPACITY = {"most": "max_tokens", "advised": "recommended_tokens"}
_SCORES = {
    "canaries": "probes",
    "bet": "e_value",
    "spent": "spent_items",
    "counted": "decided_items",
    "sense": "text_quality",
    "pins": "items",
}
_TEXT_QUALITY = {"fit": "pmi", "order": "word_order_gap", "own": "novelty"}
_COUNTS = {"won": "improved", "lost": "regressed"}
_COUNTED = ("target", "retention", "trained", "tasks")


class ShownCode(StrEnum):
    """A code that accepts its former value, too: a client reads the codes of earlier servers."""

    @classmethod
    def _missing_(cls, value: object) -> ShownCode | None:
        current = _PLACEMENTS.get(str(value), str(value).replace(" ", "_"))
        return next((member for member in cls if member.value == current), None)


def rename(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with the names of today."""
    return {names.get(key, key): value for key, value in values.items()}


def rename_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored recipe with the names of today."""
    # A recipe stores the steps that were made under "steps", and so it still does.
    renamed = rename(recipe, {old: new for old, new in TRAINING.items() if old != "steps"})
    _rename_within(renamed, "practice", lambda values: rename(values, PRACTICE))
    return renamed


def rename_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored scores of a revision with the names of today."""
    renamed = rename(scores, _SCORES)
    for key in _COUNTED:
        _rename_within(renamed, key, lambda values: rename(values, _COUNTS))
    _rename_within(renamed, "text_quality", lambda values: rename(values, _TEXT_QUALITY))
    return renamed


def rename_report(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a stored report with the names of today, and with it those of the layers above."""
    renamed = dict(body)
    _rename_within(renamed, "scores", rename_scores)
    if isinstance(room := renamed.get("room"), Mapping):
        renamed.setdefault("capacity", rename(room, _CAPACITY))
    if isinstance(event := renamed.get("event"), str):
        renamed["event"] = MOVE_CAUSES.get(event, event)
    if isinstance(above := renamed.get("above"), list):
        renamed["above"] = [
            rename_report(each) if isinstance(each, Mapping) else each for each in above
        ]
    return renamed


def _rename_within(
    values: dict[str, Any], key: str, change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> None:
    """Change one value in place if it is a mapping: what was imported may be anything."""
    if isinstance(within := values.get(key), Mapping):
        values[key] = change(within)

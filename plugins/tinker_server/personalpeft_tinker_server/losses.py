"""The losses of Tinker's API. Each is a sum over the tokens of one datum.

``lp`` are the log-probs of the targets, ``q`` those of the policy that sampled them, ``A`` the
advantages and ``r = exp(lp - q)``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from personalpeft.backends.base import (
    Continuation,
    ForwardResult,
    ModelOutputs,
    TrainingBackend,
)
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput
from personalpeft.types import is_number
from personalpeft_tinker_server.codec import Array, Datum

_CLIP_LOW, _CLIP_HIGH = 0.8, 1.2
# Those of the paper's section 5.1.
_GSPO_LOW, _GSPO_HIGH = 1 - 3e-4, 1 + 4e-4
_DRO_BETA = 0.05

Formula = Callable[[Any, Mapping[str, Any], Mapping[str, float]], Any]
"""From log-probs, the loss's inputs and its options, tensors of one length, to the loss."""


@dataclass(frozen=True, slots=True, eq=False)
class SingleLoss:
    """The part of a ``personalpeft.backends.base.Loss`` of one continuation without references."""

    item: Continuation
    is_general: ClassVar[bool] = False

    @property
    def continuations(self) -> Sequence[Continuation]:
        return (self.item,)

    @property
    def references(self) -> Sequence[Continuation]:
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class DatumLoss(SingleLoss):
    """One datum under one loss, as a ``personalpeft.backends.base.Loss``.

    Attributes:
        item: What the model reads, and the first target of each place.
        formula: The loss.
        inputs: The inputs of the loss.
        options: Its options.
        targets: All targets ``[n, k]``, where there are several for one place.
        found: The log-probs of these, after a pass.
    """

    formula: Formula
    inputs: Mapping[str, Array]
    options: Mapping[str, float]
    targets: Array | None = None
    found: list[Array] = field(default_factory=list)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        import torch

        logp = outputs[0].token_logp
        if self.targets is not None:
            targets = torch.as_tensor(self.targets.copy(), device=logp.device)
            logp = outputs[0].logp.gather(1, targets)
            self.found[:] = [logp.detach().float().cpu().numpy()]
        inputs = {
            name: torch.as_tensor(array.copy(), dtype=logp.dtype, device=logp.device)
            for name, array in self.inputs.items()
        }
        return self.formula(logp, inputs, self.options)

    def logprobs(self, result: ForwardResult) -> Array:
        """Return the log-probs of the targets, in the targets' shape."""
        return self.found[0] if self.targets is not None else result.token_logprobs[0]


def _cross_entropy(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """``-sum w lp``."""
    return -(inputs["weights"] * lp).sum()


def _importance_sampling(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """``-sum r A``: the policy gradient, corrected for the policy that sampled."""
    return -(_ratio(lp, inputs) * inputs["advantages"]).sum()


def _ppo(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """``-sum min(r A, clip(r) A)`` (Schulman et al. 2017, arXiv 1707.06347, eq. 7)."""
    ratio = _ratio(lp, inputs)
    clipped = ratio.clamp(*_clip(options))
    return -(ratio * inputs["advantages"]).minimum(clipped * inputs["advantages"]).sum()


def _cispo(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """``-sum sg(clip(r)) lp A`` (MiniMax-M1 2025, arXiv 2506.13585, eq. 4)."""
    ratio = _ratio(lp, inputs).clamp(*_clip(options)).detach()
    return -(ratio * lp * inputs["advantages"]).sum()


def _gspo(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """PPO's loss with one ratio for the sequence (Zheng et al. 2025, arXiv 2507.18071, eq. 7).

    The ratio is the geometric mean over the tokens of ``sequence_ratio_mask``. Each token has its
    own gradient.
    """
    masked = inputs["sequence_ratio_mask"] != 0
    mean = (lp.detach() - inputs["logprobs"])[masked].mean() if masked.any() else lp.new_zeros(())
    ratio = (mean + lp - lp.detach()).exp()
    low = options.get("clip_low_threshold", _GSPO_LOW)
    clipped = ratio.clamp(low, options.get("clip_high_threshold", _GSPO_HIGH))
    return -(ratio * inputs["advantages"]).minimum(clipped * inputs["advantages"]).sum()


def _dro(lp: Any, inputs: Mapping[str, Any], options: Mapping[str, float]) -> Any:
    """``-sum [lp A - beta / 2 (lp - q)^2]`` (Richemond et al. 2024, arXiv 2405.19107)."""
    beta = options.get("beta", _DRO_BETA)
    distance = (lp - inputs["logprobs"]).square()
    return -(lp * inputs["advantages"] - beta / 2 * distance).sum()


def _ratio(lp: Any, inputs: Mapping[str, Any]) -> Any:
    """Return ``r``, 1 where ``A`` is 0: there clients put -99999 for "no log-prob"."""
    distance = lp - inputs["logprobs"]
    return distance.where(inputs["advantages"] != 0, lp.new_zeros(())).exp()


def _clip(options: Mapping[str, float]) -> tuple[float, float]:
    return (
        options.get("clip_low_threshold", _CLIP_LOW),
        options.get("clip_high_threshold", _CLIP_HIGH),
    )


_POLICY = ("logprobs", "advantages")
_CLIPPING = frozenset({"clip_low_threshold", "clip_high_threshold"})
_LOSSES: Mapping[str, tuple[Formula, tuple[str, ...], frozenset[str]]] = {
    "cross_entropy": (_cross_entropy, ("weights",), frozenset()),
    "importance_sampling": (_importance_sampling, _POLICY, frozenset()),
    "ppo": (_ppo, _POLICY, _CLIPPING),
    "cispo": (_cispo, _POLICY, _CLIPPING),
    "gspo": (_gspo, (*_POLICY, "sequence_ratio_mask"), _CLIPPING),
    "dro": (_dro, _POLICY, frozenset({"beta"})),
}


def build_losses(
    name: str,
    data: Sequence[Datum],
    config: Mapping[str, float | str],
    backend: TrainingBackend,
) -> list[DatumLoss]:
    """Return the losses of a pass, checked.

    Args:
        name: The loss.
        data: The data.
        config: Options of the loss.
        backend: Computes the pass.

    Raises:
        InvalidInput: The loss is unknown, or an input does not fit it.
    """
    if name not in _LOSSES:
        raise InvalidInput(
            f"The loss {name[:40]!a} is not supported.", hint=f"Use {', '.join(sorted(_LOSSES))}."
        )
    formula, needed, known = _LOSSES[name]
    options: dict[str, float] = {}
    for key, value in config.items():
        if key not in known:
            raise InvalidInput(
                f"{name} has no option {key[:40]!a}.",
                hint=f"Its options are: {', '.join(sorted(known)) or 'none'}.",
            )
        if not is_number(value) or not math.isfinite(value):
            raise InvalidInput(
                f"{key} must be a number, got {value!a:.40}.", hint="Give a finite number."
            )
        options[key] = float(value)
    vocabulary = vocabulary_size(backend.base)
    return [
        _build(index, datum, formula, needed, options, vocabulary, backend.max_length)
        for index, datum in enumerate(data)
    ]


def _build(
    index: int,
    datum: Datum,
    formula: Formula,
    needed: Sequence[str],
    options: Mapping[str, float],
    vocabulary: int,
    max_length: int,
) -> DatumLoss:
    size = len(datum.tokens)
    if not 1 <= size <= max_length:
        raise invalid_datum(index, f"has {size} tokens; 1 to {max_length} fit")
    targets = datum.inputs.get("target_tokens")
    # Several targets of a place are for distillation, which is cross-entropy.
    several = targets is not None and targets.ndim == 2 and formula is _cross_entropy
    shape = (size, targets.shape[1]) if targets is not None and several else (size,)
    if targets is None or targets.shape != shape or not all(shape):
        text = f"[{size}] or [{size}, k]" if formula is _cross_entropy else f"[{size}]"
        raise invalid_datum(index, f"needs target_tokens of the shape {text}")
    targets = targets.astype(np.int64)
    inputs = {}
    for name in needed:
        values = datum.inputs.get(name)
        if values is None and name == "weights":
            values = np.ones(shape, np.float32)
        if values is None or values.shape != shape or not np.isfinite(values).all():
            raise invalid_datum(index, f"needs finite {name} of the shape {list(shape)}")
        inputs[name] = values
    check_tokens(index, (*datum.tokens, *targets.ravel().tolist()), vocabulary)
    target_tokens = tuple(int(token) for token in targets.reshape(size, -1)[:, 0])
    # The model reads all of a continuation but its last token, so any token may end it.
    item = Continuation(datum.tokens[:1], (*datum.tokens[1:], target_tokens[-1]), target_tokens)
    return DatumLoss(item, formula, inputs, options, targets if several else None)


def vocabulary_size(base: Base) -> int:
    """Return how many tokens a base has."""
    config = base.folder / "config.json"
    if not config.is_file():
        return 2**31
    sizes = json.loads(config.read_text("utf-8"))
    return int(sizes.get("vocab_size") or sizes["text_config"]["vocab_size"])


def check_tokens(index: int, tokens: Iterable[int], vocabulary: int) -> None:
    """Raise ``InvalidInput`` for a datum with a token that the base does not have."""
    if not all(0 <= token < vocabulary for token in tokens):
        raise invalid_datum(index, f"has a token outside of 0 to {vocabulary - 1}")


def invalid_datum(index: int, problem: str) -> InvalidInput:
    """Return the error for a datum that does not fit."""
    return InvalidInput(f"Datum {index} {problem}.", hint="Check the data of this call.")

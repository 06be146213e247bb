"""Between the values of Tinker's API and those of the backend."""

from __future__ import annotations

from collections.abc import Sequence

from personalpeft.backends.base import AdamParams, ForwardResult
from personalpeft.errors import InvalidInput
from personalpeft_tinker_server import models
from personalpeft_tinker_server.losses import DatumLoss


def read_adam(request: models.OptimStep) -> AdamParams:
    """Return the options of an optimizer step. Raises ``InvalidInput`` for other optimizers."""
    params = request.adam_params
    if params is None:
        raise InvalidInput("The only optimizer is AdamW.", hint="Send AdamParams.")
    return AdamParams(
        params.learning_rate,
        params.beta1,
        params.beta2,
        params.eps,
        params.weight_decay,
        params.grad_clip_norm or None,
    )


def write_pass(losses: Sequence[DatumLoss], results: Sequence[ForwardResult]) -> bytes:
    """Return the results of a pass as the JSON of a ``ForwardBackwardOutput``.

    Args:
        losses: The losses.
        results: Their results, with log-probs.
    """
    outputs = []
    for loss, result in zip(losses, results, strict=True):
        logprobs = loss.logprobs(result)
        tensor = models.Tensor(data=logprobs.ravel().tolist(), shape=list(logprobs.shape))
        outputs.append({"logprobs": tensor})
    total = sum(result.loss for result in results)
    return (
        models.ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={"loss:sum": total})
        .model_dump_json()
        .encode()
    )

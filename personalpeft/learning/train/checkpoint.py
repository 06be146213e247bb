"""The checkpoint of an unfinished build, in supervised training and in practice alike.

One safetensors file: the arrays of the training session, and as metadata the progress (JSON) and a
digest over both and over the inputs of the build.

Invariant: a checkpoint is resumed by the same build only, and only whole. A file that is torn,
altered, of other inputs or of an older version counts as none, so the build starts anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.backends.base import Session
from personalpeft.errors import AdapterError
from personalpeft.store.store import Store

SessionState = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class CheckpointStore:
    """Where one build keeps its checkpoint; ``save`` replaces the file as a whole."""

    load: Callable[[], bytes | None]
    save: Callable[[bytes], None]

    @classmethod
    def of_layer(cls, store: Store, user: str, layer: str) -> Self:
        """Return the one of a user's layer, in the home's session folder."""
        return cls(
            lambda: store.load_session(user, layer),
            lambda data: store.save_session(user, layer, data),
        )


def encode_checkpoint(state: SessionState, inputs: str, progress: Any) -> bytes:
    """Return the file's bytes; ``inputs`` is the digest of all that the build depends on."""
    arrays = {name: np.atleast_1d(array) for name, array in state.items()}
    text = json.dumps(progress)
    metadata = {"progress": text, "digest": _digest(inputs, text, arrays)}
    return safetensors.numpy.save(arrays, metadata)


def restore_checkpoint(data: bytes | None, session: Session, inputs: str) -> Any:
    """Restore a session from a checkpoint and return the progress; None if it cannot be used."""
    if data is None:
        return None
    try:
        tensors = read_tensors(data, source="the checkpoint")
        text = tensors.metadata["progress"]
        # Without this, a wrong number that is still a number would reach the revision unnoticed.
        if tensors.metadata["digest"] != _digest(inputs, text, tensors.arrays):
            return None
        session.restore(tensors.arrays)
        return json.loads(text)
    except (AdapterError, KeyError, ValueError):
        return None


def _digest(inputs: str, progress: str, arrays: SessionState) -> str:
    digest = hashlib.sha256(f"{inputs} {progress} ".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()

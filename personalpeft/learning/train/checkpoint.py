"""The checkpoint of a training, for lessons and for practice alike.

A checkpoint is one safetensors file. It has the arrays of the training session. Its metadata has
the progress (JSON) and a digest over both and over the inputs of the build.

Invariant: only the same build resumes a checkpoint, and only a whole one. A torn or altered file,
or one of other inputs or of an older version, is ignored. Then the build starts anew.
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
        """Return the store of a user's layer, in the home's session folder.

        Args:
            store: The open home.
            user: The user.
            layer: The layer.
        """
        return cls(
            lambda: store.load_checkpoint(user, layer),
            lambda data: store.save_checkpoint(user, layer, data),
        )


def encode_checkpoint(state: SessionState, inputs_digest: str, progress: Any) -> bytes:
    """Return the bytes of a checkpoint.

    Args:
        state: The arrays of the training session.
        inputs_digest: The digest of all that the build depends on.
        progress: How far the training came, as JSON data.
    """
    arrays = {name: np.atleast_1d(array) for name, array in state.items()}
    text = json.dumps(progress)
    metadata = {"progress": text, "digest": _checkpoint_digest(inputs_digest, text, arrays)}
    return safetensors.numpy.save(arrays, metadata)


def restore_checkpoint(data: bytes | None, session: Session, inputs_digest: str) -> Any:
    """Restore a session from a checkpoint, and return the progress; None if it cannot be used.

    Args:
        data: The bytes of the checkpoint; None where there is none.
        session: The training session.
        inputs_digest: The digest of all that the build depends on.
    """
    if data is None:
        return None
    try:
        tensors = read_tensors(data, source="the checkpoint")
        text = tensors.metadata["progress"]
        # Without this, a wrong number that is still a number would reach the revision unnoticed.
        if tensors.metadata["digest"] != _checkpoint_digest(inputs_digest, text, tensors.arrays):
            return None
        session.restore(tensors.arrays)
        return json.loads(text)
    except (AdapterError, KeyError, ValueError):
        return None


def _checkpoint_digest(inputs_digest: str, progress: str, arrays: SessionState) -> str:
    digest = hashlib.sha256(f"{inputs_digest} {progress} ".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()

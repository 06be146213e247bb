"""Build a model around weights that stay in the base's file.

Invariants: the model computes what the loaded one computes, up to rounding. Only vectors, such as
norms, are in memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from personalpeft.backends.torch.mapped_linear import MappedEmbedding, MappedLinears, Unpacker
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.base_models.mapped_weights import MappedWeights
from personalpeft.errors import WeightsError


def fill_mapped_model(module: nn.Module, weights: MappedWeights, unpacker: Unpacker) -> None:
    """Give a model on the meta device its vectors, buffers and embeddings.

    Linear layers stay without weights, for ``install_lora_layers`` and ``map_other_linears``.

    Args:
        module: The model, changed in place.
        weights: The base's file.
        unpacker: Unpacks parts of its matrices.

    Raises:
        WeightsError: The file does not have the model's weights, or the model has others.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        for path, part in list(module.named_modules()):
            if isinstance(part, nn.Embedding):
                matrix = weights.matrix(f"{path}.weight")
                if matrix.shape != (part.num_embeddings, part.embedding_dim):
                    raise WeightsError(
                        f"The embeddings have the shape {matrix.shape} in the base's file.",
                        hint="The file and config.json must be of one model.",
                    )
                scale = getattr(part, "scalar_embed_scale", None)
                scaled = None if scale is None else torch.tensor(scale, dtype=unpacker.ops.dtype)
                _replace(module, path, MappedEmbedding(matrix, scaled, unpacker))
            elif type(part).__name__.endswith("RotaryEmbedding"):
                # Its tables are computed, not stored.
                _replace(module, path, _on_cpu(part))
            elif not isinstance(part, nn.Linear):
                _fill_vectors(part, path, weights, unpacker.ops.dtype)
    _check_complete(module)


def map_other_linears(module: nn.Module, make_linear: MappedLinears) -> None:
    """Replace the linear layers that have no adapters."""
    for path, part in list(module.named_modules()):
        if isinstance(part, nn.Linear):
            _replace(module, path, make_linear([(path, part)]))


def check_unpacking(weights: MappedWeights, ops: Ops) -> None:
    """Raise ``WeightsError`` unless each format of the file is unpacked as the reference does."""
    reference = Ops(ops.device, ops.dtype)
    for matrix in weights.examples():
        columns = matrix.shape[1]
        found, expected = (torch.empty((1, columns), dtype=ops.dtype) for _ in range(2))
        ops.unpack(matrix, slice(0, 1), slice(0, columns), found)
        reference.unpack(matrix, slice(0, 1), slice(0, columns), expected)
        if not torch.equal(found, expected):
            raise WeightsError(
                f"The compiled kernel unpacks {matrix.tensor.format.name} wrongly on this"
                " processor.",
                hint="Set PERSONALPEFT_KERNELS=plain.",
            )


def _fill_vectors(part: nn.Module, path: str, weights: MappedWeights, dtype: torch.dtype) -> None:
    for name, _ in list(part.named_parameters(recurse=False)):
        vector = torch.tensor(weights.vector(f"{path}.{name}"), dtype=dtype)
        setattr(part, name, nn.Parameter(vector, requires_grad=False))


def _on_cpu(part: Any) -> nn.Module:
    if not any(buffer.is_meta for buffer in part.buffers()):
        kept: nn.Module = part
        return kept
    on_cpu: nn.Module = type(part)(config=part.config)
    return on_cpu


def _check_complete(module: nn.Module) -> None:
    """Raise ``WeightsError`` if something but linear layers has no numbers."""
    for path, part in module.named_modules():
        tensors = (*part.parameters(recurse=False), *part.buffers(recurse=False))
        if not isinstance(part, nn.Linear) and any(tensor.is_meta for tensor in tensors):
            raise WeightsError(
                f"The weights of {type(part).__name__} ({path}) cannot stay in the base's file.",
                hint="Unpack the weights: PERSONALPEFT_WEIGHTS=loaded.",
            )


def _replace(module: nn.Module, path: str, part: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(module.get_submodule(parent), name, part)

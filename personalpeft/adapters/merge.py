"""A base with a stack baked in, for programs that know nothing of layers.

Invariants: each weight is the base's own plus what the stack adds to it, summed in float32 and rounded once; a folder
appears complete or not at all. What is baked in cannot be taken out again: it is a copy, and the ledger stays where it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.adapters.compose import merged
from personalpeft.adapters.formats.atomic_folder import new_folder
from personalpeft.adapters.formats.ollama import modelfile
from personalpeft.adapters.types import Composed
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import weights_of, write_gguf
from personalpeft.base_models.types import Base

if TYPE_CHECKING:
    from torch import Tensor

_GGUF = "model.gguf"
_LEFT_OUT = (".safetensors", ".safetensors.index.json")


def write_merged_folder(base: Base, stack: Composed, folder: Path) -> None:
    """A folder that transformers loads: the base's config and tokenizer, and its weights with the stack in them.

    Raises ``InvalidInput`` for a folder that holds something or cannot be written, ``AdapterError`` where a weight makes
    the stack's numbers too large.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with new_folder(folder) as new:
        for file in sorted(base.folder.iterdir()):
            if (
                file.suffix in (".json", ".jinja")
                and not file.name.endswith(_LEFT_OUT)
                and file.name != "base.json"
            ):
                shutil.copyfile(file, new / file.name)
        # What the card says of the template and of where a reply ends holds for whoever loads it.
        (new / "chat_template.jinja").write_text(base.template, "utf-8")
        try:
            save_file(
                dict(_weights(base, stack)), new / "model.safetensors", metadata={"format": "pt"}
            )
        except SafetensorError as error:
            # A full disk, for one, which it does not say as an OSError.
            raise OSError(str(error)) from error


def write_merged_gguf(
    base: Base, stack: Composed, folder: Path, check: Callable[[Path], None]
) -> None:
    """A folder with model.gguf and a Modelfile, from which Ollama makes a model. ``check`` is shown the file before there is a
    folder, and raises for one that nobody is to have. Raises as ``write_merged_folder``, and ``WeightsError`` for a base that
    has no form in GGUF here.
    """
    names = gguf_names(base)
    with new_folder(folder) as new:
        write_gguf(base, names, new / _GGUF, partial(_weights, base, stack), for_others=True)
        check(new / _GGUF)
        (new / "Modelfile").write_text(modelfile(base, _GGUF), "utf-8")


def _weights(base: Base, stack: Composed) -> Iterator[tuple[str, Tensor]]:
    import torch

    pairs = merged(stack)
    architecture = base.architecture
    adapted = {
        f"{architecture.block_path}.{block}.{projection}.weight": (pair, block)
        for projection, pair in pairs.items()
        for block in range(architecture.blocks)
    }
    for name, weight in weights_of(base):
        if name in adapted:
            pair, block = adapted[name]
            change = torch.tensor(pair.b[block]) @ torch.tensor(pair.a[block])
            weight = (weight.float() + change).to(weight.dtype)
        yield name, weight

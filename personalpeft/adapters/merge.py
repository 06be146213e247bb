"""Write a base with a stack merged into its weights, for programs without LoRA support.

Invariants: each weight is the base's own plus the stack's change, summed in float32 and rounded
once. Those of a GGUF file are unpacked to bfloat16 first. A folder appears complete or not at all.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.adapters.compose import concatenate
from personalpeft.adapters.formats.ollama import build_modelfile
from personalpeft.adapters.safe_io import write_folder_atomically
from personalpeft.adapters.types import AdapterStack
from personalpeft.base_models.files import MANIFEST, weights_of
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import AS_SAFETENSORS, write_gguf
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

_GGUF = "model.gguf"
_SKIPPED_SUFFIXES = (".safetensors", ".safetensors.index.json")


def write_merged_folder(base: Base, stack: AdapterStack, folder: Path) -> None:
    """Write a folder that transformers loads: config, tokenizer and merged weights.

    Args:
        base: The base.
        stack: The stack that is merged into its weights.
        folder: The new folder.

    Raises:
        InvalidInput: The folder exists, or cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with write_folder_atomically(folder) as new:
        source = unpacked_folder(base)
        for file in sorted(source.iterdir()):
            if (
                file.suffix in (".json", ".jinja")
                and not file.name.endswith(_SKIPPED_SUFFIXES)
                and file.name != MANIFEST
            ):
                shutil.copyfile(file, new / file.name)
        # The card may replace the template that lies in the base's folder.
        (new / "chat_template.jinja").write_text(base.template, "utf-8")
        try:
            save_file(
                dict(_merged_weights(base, source, stack)),
                new / "model.safetensors",
                metadata={"format": "pt"},
            )
        except SafetensorError as error:
            # The library does not raise an OSError for a full disk.
            raise OSError(str(error)) from error


def write_merged_gguf(
    base: Base, stack: AdapterStack, folder: Path, check: Callable[[Path], None]
) -> None:
    """Write ``model.gguf`` and a Modelfile for Ollama.

    Args:
        base: The base.
        stack: The stack that is merged into its weights.
        folder: The new folder.
        check: Called with the GGUF file. It raises an exception to refuse the file.

    Raises:
        WeightsError: llama.cpp would not compute or tokenize as the base does.
        InvalidInput: The folder exists, or cannot be written.
    """
    names = gguf_names(base, AS_SAFETENSORS)
    with write_folder_atomically(folder) as new:
        merged = partial(_merged_weights, base, unpacked_folder(base), stack)
        write_gguf(base, names, new / _GGUF, merged, for_others=True)
        check(new / _GGUF)
        (new / "Modelfile").write_text(build_modelfile(base, _GGUF), "utf-8")


def _merged_weights(base: Base, source: Path, stack: AdapterStack) -> Iterator[tuple[str, Tensor]]:
    import torch

    weights = concatenate(stack)
    architecture = base.architecture
    adapted = {
        f"{architecture.block_path}.{block}.{projection}.weight": (pair, block)
        for projection, pair in weights.items()
        for block in range(architecture.blocks)
    }
    for name, weight in weights_of(source):
        # As transformers renames a multimodal model's weights when it loads them.
        loaded = re.sub(r"^language_model\.model\.", "model.language_model.", name)
        if loaded in adapted:
            pair, block = adapted.pop(loaded)
            change = torch.tensor(pair.b[block]) @ torch.tensor(pair.a[block])
            weight = (weight.float() + change).to(weight.dtype)
        yield name, weight
    if adapted:
        raise WeightsError(
            f"The files of {base.card.name} have no weight called {next(iter(adapted))}.",
            hint="Export the adapter instead: personalpeft export-peft.",
        )

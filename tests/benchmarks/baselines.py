"""Baselines in this process: transformers, and PEFT on top of it, used as documented.

They get the device and number format of our own backend, and adapters in that format. They get no
end of turn, so every row generates all its tokens.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from personalpeft.backends.sequence import Tokens
from personalpeft.backends.torch.device import choose_device
from personalpeft.errors import ServingFailed

_PAD = 0


def load_plain(folder: Path) -> Any:
    """Load a causal language model of transformers without adapters."""
    from transformers import AutoModelForCausalLM, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    where = choose_device()
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=where.dtype, local_files_only=True, use_safetensors=True
    )
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=_PAD)
    model.config.eos_token_id = None
    return model.to(where.device).eval()


def load_with_adapters(folder: Path, adapters: Sequence[Path]) -> Any:
    """Load a PEFT model with these adapters, named after their folders."""
    from peft import PeftModel

    with warnings.catch_warnings():
        # PEFT still uses an attribute that transformers has renamed.
        warnings.simplefilter("ignore", FutureWarning)
        model = PeftModel.from_pretrained(
            load_plain(folder),
            str(adapters[0]),
            adapter_name=adapters[0].name,
            autocast_adapter_dtype=False,
        )
        for adapter in adapters[1:]:
            model.load_adapter(
                str(adapter), adapter_name=adapter.name, autocast_adapter_dtype=False
            )
    return model.eval()


def generate(model: Any, prompts: Sequence[Tokens], count: int, **more: Any) -> int:
    """Generate ``count`` tokens greedily after each prompt in one batch and return their total.

    Prompts are padded on the left.

    Raises:
        ServingFailed: A row ended early, so the comparison is invalid.
    """
    longest = max(map(len, prompts))
    device = next(model.parameters()).device
    ids = torch.tensor([(_PAD,) * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([(0,) * (longest - len(p)) + (1,) * len(p) for p in prompts], device=device)
    with torch.inference_mode():
        said = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, **more)
    # Reading the result back waits for the device.
    written = len(said[0].tolist()) - longest
    if written != count:
        raise ServingFailed(
            f"generate wrote {written} tokens a row and not {count}.", hint="Update transformers."
        )
    return written * len(prompts)


def bytes_of(model: Any) -> int:
    """Return the bytes of the base that a step reads: all parameters, tied ones once."""
    return sum(each.nbytes for each in model.parameters())


def read_bandwidth(size: int = 2**29) -> float:
    """Return the bytes a second that all threads together read: the best of five sums of a tensor."""
    where = choose_device()
    tensor = torch.ones(size // 4, device=where.device)
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        tensor.sum().item()
        best = min(best, time.perf_counter() - began)
    return tensor.nbytes / best

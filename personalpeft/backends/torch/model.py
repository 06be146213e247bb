"""A base loaded into torch: which device and numbers, the forward passes that the rest needs, and the turn that all of
them take.

Invariants: the base's parameters never require a gradient and are never assigned; one forward (or forward and backward)
pass runs at a time, so what is bound for it is seen by it alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from personalpeft.backends.base import Continuation
from personalpeft.backends.torch.packing import pack
from personalpeft.backends.torch.slots import Bound, install
from personalpeft.bases.base import Base


@dataclass(frozen=True, slots=True)
class Device:
    """Where the base runs, in which numbers, and why: the reason is a line for ``doctor``."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose_device() -> Device:
    """A GPU where there is one, else the processor; bfloat16 wherever the hardware multiplies it."""
    if torch.cuda.is_available():
        return Device(torch.device("cuda"), torch.bfloat16, f"bfloat16 on {torch.cuda.get_device_name()}")
    threads = torch.get_num_threads()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Device(torch.device("cpu"), torch.bfloat16, f"bfloat16 on the processor, {threads} threads")
    reason = f"float32 on the processor, {threads} threads (it does not multiply bfloat16)"
    return Device(torch.device("cpu"), torch.float32, reason)


class Model:
    """The loaded base and its attachment points."""

    def __init__(self, base: Base, where: Device) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.base = base
        self.where = where
        # Any: what transformers returns depends on the base, and its stubs know few of its methods.
        module: Any = AutoModelForCausalLM.from_pretrained(
            base.folder, dtype=where.dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
        )
        self.module = module.to(where.device).eval().requires_grad_(False)
        self.attachment = install(self.module, base.architecture)
        self._turn = threading.RLock()
        self._sliding = _sliding_window(self.module.config)

    @contextmanager
    def turn(self, *bound: Bound | None) -> Iterator[None]:
        """Waits for the device and binds adapters for one pass."""
        with self._turn, self.attachment.holding(*bound):
            yield

    def logits(self, items: Sequence[Continuation]) -> list[Tensor]:
        """For each continuation ``[n, vocabulary]`` float32: what predicts its n tokens. Needs the turn; follows the
        gradient mode.
        """
        packed = pack(items)
        tokens = torch.from_numpy(packed.tokens)[None].to(self.where.device)
        positions = torch.from_numpy(packed.positions)[None].to(self.where.device)
        reads = torch.cat([torch.from_numpy(r) for r in packed.reads]).to(self.where.device)
        # The fused attention kernels are slow on the CPU when a mask and a gradient are asked for; plain products are not.
        with sdpa_kernel(SDPBackend.MATH):
            output = self.module(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._mask(torch.from_numpy(packed.visible), torch.from_numpy(packed.positions)),
                logits_to_keep=reads,
                use_cache=False,
            )
        return list(output.logits[0].float().split([len(r) for r in packed.reads]))

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and bytes of all base parameters as they are in memory."""
        digest = hashlib.sha256()
        with self._turn:
            for name, parameter in sorted(self.module.named_parameters()):
                digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
                digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def _mask(self, visible: Tensor, positions: Tensor) -> Any:
        def additive(seen: Tensor) -> Tensor:
            mask = torch.zeros(seen.shape, dtype=self.where.dtype).masked_fill_(
                ~seen, torch.finfo(self.where.dtype).min
            )
            return mask[None, None].to(self.where.device)

        if self._sliding is None:
            return additive(visible)
        near = positions[:, None] - positions[None, :] < self._sliding
        return {"full_attention": additive(visible), "sliding_attention": additive(visible & near)}


def _sliding_window(config: Any) -> int | None:
    """The window of a model that mixes full and sliding attention (Gemma 3), None for all others."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return int(config.sliding_window) if "sliding_attention" in kinds and config.sliding_window else None

"""A base loaded into torch: which device and numbers, the forward passes that the rest needs, and the turn that all of
them take.

Invariants: the base's parameters never require a gradient and are never assigned; one forward (or forward and backward)
pass runs at a time, so what is bound for it is seen by it alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from personalpeft.backends.base import Continuation
from personalpeft.backends.torch.kernels import Kernels
from personalpeft.backends.torch.kv import Pass, attend
from personalpeft.backends.torch.linear import Bound, FrozenLinear, install
from personalpeft.backends.torch.packing import pack
from personalpeft.backends.torch.threads import dismiss
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
        # Older ones only emulate bfloat16; float16 they multiply well, but activations can leave its range.
        fit = torch.cuda.get_device_capability() >= (8, 0)
        dtype, named = (torch.bfloat16, "bfloat16") if fit else (torch.float32, "float32")
        return Device(torch.device("cuda"), dtype, f"{named} on {torch.cuda.get_device_name()}")
    threads = torch.get_num_threads()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Device(torch.device("cpu"), torch.bfloat16, f"bfloat16 on the processor, {threads} threads")
    reason = f"float32 on the processor, {threads} threads (it does not multiply bfloat16)"
    return Device(torch.device("cpu"), torch.float32, reason)


# Norms that are x / rms(x) * weight; Gemma's, for one, are not.
_RMS_NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})


class Model:
    """The loaded base and its attachment points."""

    def __init__(self, base: Base, where: Device, kernels: Kernels) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        AttentionInterface.register("personalpeft", attend)
        self.base = base
        self.where = where
        # Any: what transformers returns depends on the base, and its stubs know few of its methods.
        module: Any = AutoModelForCausalLM.from_pretrained(
            base.folder,
            dtype=where.dtype,
            attn_implementation="personalpeft",
            local_files_only=True,
            use_safetensors=True,
        )
        self.module = module.to(where.device).eval().requires_grad_(False)
        # Only processors multiply faster from weights in another order, and only bfloat16 is worth the copying.
        reorder = where.device.type == "cpu" and where.dtype == torch.bfloat16
        self.attachment, self._products = install(self.module, base.architecture, reorder=reorder)
        if reorder:
            head = self.module.get_output_embeddings()
            self.module.set_output_embeddings(FrozenLinear(head.weight.detach(), head.bias, reorder=True))
        _speed_up_norms(self.module, kernels)
        self._turn = threading.RLock()
        self._sliding = _sliding_window(self.module.config)

    @contextmanager
    def turn(self, *bound: Bound | None, more_to_come: bool = False) -> Iterator[None]:
        """Waits for the device and binds adapters for one pass. Without ``more_to_come`` the threads that helped with it
        are dismissed.
        """
        with self._turn, self.attachment.holding(*bound):
            try:
                yield
            finally:
                if not more_to_come:
                    dismiss()

    def logits(self, items: Sequence[Continuation]) -> list[Tensor]:
        """For each continuation ``[n, vocabulary]`` float32: what predicts its n tokens. Needs the turn; follows the
        gradient mode.
        """
        packed = pack(items)
        tokens = torch.from_numpy(packed.tokens)[None].to(self.where.device)
        positions = torch.from_numpy(packed.positions)[None].to(self.where.device)
        reads = torch.cat([torch.from_numpy(r) for r in packed.reads]).to(self.where.device)
        # The fused attention kernels are slow on the CPU when a mask and a gradient are asked for; plain products are not.
        on_cpu = self.where.device.type == "cpu"
        with sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            output = self.module(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=self._mask(torch.from_numpy(packed.visible), torch.from_numpy(packed.positions)),
                logits_to_keep=reads,
                use_cache=False,
            )
        return list(output.logits[0].float().split([len(r) for r in packed.reads]))

    def step(
        self, tokens: Sequence[int], positions: Sequence[int], reads: Sequence[int], batch: Pass, bound: Bound | None
    ) -> Tensor:
        """One pass over tokens of many rows, which ``batch`` tells apart: the logits after those that ``reads`` names,
        ``[reads, vocabulary]``, which may be none.
        """
        device = self.where.device
        given: dict[str, Any] = {
            "input_ids": torch.tensor(tokens, device=device)[None],
            "position_ids": torch.tensor(positions, device=device)[None],
            "use_cache": False,
            "batch": batch,
        }
        with torch.inference_mode(), self.turn(bound, more_to_come=True):
            if not reads:
                self.module.base_model(**given)
                return torch.empty((0, 0), device=device)
            output = self.module(**given, logits_to_keep=torch.tensor(reads, device=device))
        logits: Tensor = output.logits[0]
        return logits

    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and bytes of all base parameters as they are in memory."""
        digest = hashlib.sha256()
        with self._turn:
            held = {path: product.weight for path, product in self._products.items()}
            for name, parameter in sorted({**dict(self.module.named_parameters()), **held}.items()):
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


class _FastNorm(nn.Module):
    """A norm whose passes without a gradient go through the kernels."""

    def __init__(self, inner: Any, kernels: Kernels) -> None:
        super().__init__()
        self.inner = inner
        self._kernels = kernels
        self._epsilon = float(inner.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            y: Tensor = self.inner(x)
            return y
        return self._kernels.norm(x.contiguous(), self.inner.weight, self._epsilon)


def _speed_up_norms(module: nn.Module, kernels: Kernels) -> None:
    for path, norm in list(module.named_modules()):
        if type(norm).__name__ in _RMS_NORMS:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, _FastNorm(norm, kernels))


def _sliding_window(config: Any) -> int | None:
    """The window of a model that mixes full and sliding attention (Gemma 3), None for all others."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return int(config.sliding_window) if "sliding_attention" in kinds and config.sliding_window else None

"""A base loaded into torch: which device and numbers, the forward passes that the rest needs, and the turn that all of
them take.

Invariants: the base's parameters never require a gradient and are never assigned; one forward (or forward and backward)
pass runs at a time, so what is bound for it is seen by it alone.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from personalpeft.backends.torch.kv_cache import ForwardContext, paged_attention_forward
from personalpeft.backends.torch.lora_layers import (
    ActiveLoRA,
    FrozenLinear,
    TrainedLoRA,
    install_lora_layers,
)
from personalpeft.backends.torch.openmp import limit_threads, release_threads
from personalpeft.backends.torch.ops import Ops
from personalpeft.backends.torch.processor import usable_cores
from personalpeft.backends.torch.row_counts import (
    ProductChooser,
    ProductKind,
    ProductShape,
    is_usable,
)
from personalpeft.backends.torch.thread_governor import ThreadGovernor, thread_counts
from personalpeft.backends.torch.training.fused_modules import install_fused_modules, to_segments
from personalpeft.backends.torch.training.packing import PackedSequence
from personalpeft.base_models.types import Base


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Where the base runs, in which numbers, and why: the reason is a line for ``doctor``."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose_device() -> DeviceChoice:
    """A GPU where there is one, else the processor; bfloat16 wherever the hardware multiplies it."""
    if torch.cuda.is_available():
        # Older ones only emulate bfloat16; float16 they multiply well, but activations can leave its range.
        fit = torch.cuda.get_device_capability() >= (8, 0)
        dtype, named = (torch.bfloat16, "bfloat16") if fit else (torch.float32, "float32")
        return DeviceChoice(
            torch.device("cuda"), dtype, f"{named} on {torch.cuda.get_device_name()}"
        )
    threads = torch.get_num_threads()
    if _multiplies_bfloat16():
        return DeviceChoice(
            torch.device("cpu"), torch.bfloat16, f"bfloat16 on the processor, {threads} threads"
        )
    reason = f"float32 on the processor, {threads} threads (it does not multiply bfloat16)"
    return DeviceChoice(torch.device("cpu"), torch.float32, reason)


def _multiplies_bfloat16() -> bool:
    """Return whether the processor does so itself, and the libraries do it right."""
    able: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return able and is_usable(
        ProductKind.PACKED, ProductShape(512, 512, torch.bfloat16, bias=False)
    )


class ModelRunner:
    """The loaded base and its attachment points."""

    def __init__(self, base: Base, where: DeviceChoice, kernels: Ops, cache: Path | None) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        AttentionInterface.register("personalpeft", paged_attention_forward)
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
        # Classes of row counts are a matter of processors' libraries; what GPUs do has not been measured.
        self._chooser = (
            ProductChooser(thread_counts(min(torch.get_num_threads(), usable_cores())), cache)
            if where.device.type == "cpu"
            else None
        )
        self.attachment, self._products = install_lora_layers(
            self.module, base.architecture, self._chooser
        )
        if self._chooser is not None:
            head = self.module.get_output_embeddings()
            self.module.set_output_embeddings(
                FrozenLinear(head.weight.detach(), head.bias, self._chooser)
            )
        self.kernels = kernels
        self._in_chains = install_fused_modules(self.module, kernels)
        self._governor = (
            None if self._chooser is None else ThreadGovernor(self._chooser.threads, usable_cores())
        )
        self._turn = threading.RLock()
        self._sessions = 0
        self._sliding = _sliding_window(self.module.config)

    @contextmanager
    def exclusive(
        self,
        bound: ActiveLoRA | None = None,
        *,
        training: TrainedLoRA | None = None,
        more_to_come: bool = False,
    ) -> Iterator[None]:
        """Wait for the device and bind adapters for one pass, with as many threads as there are free cores.

        Without ``more_to_come`` the threads are released afterwards.
        """
        with self._turn, self.attachment.holding(bound, training), self._team():
            try:
                yield
            finally:
                if not more_to_come:
                    release_threads()

    def _team(self) -> AbstractContextManager[None]:
        if self._governor is None:
            return nullcontext()
        threads = self._governor.threads()
        if self._governor.is_crowded():
            release_threads()
        return limit_threads(threads)

    @property
    def batch_invariant(self) -> bool:
        """Whether each product gives a row the same bits in any batch."""
        return self._chooser is not None and self._chooser.invariant

    def hidden(self, packed: PackedSequence) -> Tensor:
        """``[reads, size]``: what the head makes the logits of, for each of the pack's reads in order. Needs the turn;
        follows the gradient mode.
        """
        device = self.where.device
        seen: dict[str, Any]
        if self._in_chains:
            seen = {"stretches": to_segments(packed)}
        else:
            seen = {
                "attention_mask": self._mask(
                    torch.from_numpy(packed.visible), torch.from_numpy(packed.positions)
                )
            }
        # The fused attention kernels are slow on the CPU when a mask and a gradient are asked for; plain products are not.
        with sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext():
            output = self.module.base_model(
                input_ids=torch.from_numpy(packed.tokens)[None].to(device),
                position_ids=torch.from_numpy(packed.positions)[None].to(device),
                use_cache=False,
                **seen,
            )
        states: Tensor = output.last_hidden_state[0]
        return states[torch.cat([torch.from_numpy(r) for r in packed.reads]).to(device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, vocabulary]`` of hidden states ``[n, size]``, in the base's own format."""
        logits: Tensor = self.module.get_output_embeddings()(hidden)
        cap = getattr(self.module.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def open_session(self) -> None:
        """Gets ready for gradients, as long as any session is open."""
        with self._turn:
            self._sessions += 1
            for product in self._all_products():
                product.enable_backward()

    def close_session(self) -> None:
        """Ends what one ``open_session`` began."""
        with self._turn:
            self._sessions -= 1
            if not self._sessions:
                for product in self._all_products():
                    product.disable_backward()

    def _all_products(self) -> list[FrozenLinear]:
        head = self.module.get_output_embeddings()
        return [*self._products.values(), *([head] if isinstance(head, FrozenLinear) else [])]

    def step(
        self,
        tokens: Sequence[int],
        positions: Sequence[int],
        reads: Sequence[int],
        batch: ForwardContext,
        bound: ActiveLoRA | None,
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
        with torch.inference_mode(), self.exclusive(bound, more_to_come=True):
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


def _sliding_window(config: Any) -> int | None:
    """The window of a model that mixes full and sliding attention (Gemma 3), None for all others."""
    kinds = set(getattr(config, "layer_types", None) or ())
    return (
        int(config.sliding_window)
        if "sliding_attention" in kinds and config.sliding_window
        else None
    )

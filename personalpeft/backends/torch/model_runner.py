"""The loaded base: device, dtype, forward passes and the lock that passes take.

Invariants: the base's parameters never require a gradient and are never assigned. One pass runs at
a time, so active adapters affect that pass alone. A pass lets a waiting step of the batch go first
between two blocks of the model, which changes no bit of either. A recorded step takes no lock, since
it reads no active adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from personalpeft import host
from personalpeft.backends.openmp import limit_threads, release_threads
from personalpeft.backends.thread_governor import ThreadGovernor, thread_counts
from personalpeft.backends.torch.autograd import BlockCheckpoints, differentiable
from personalpeft.backends.torch.batch_invariant_matmul import ProductChooser
from personalpeft.backends.torch.device import DeviceChoice
from personalpeft.backends.torch.device_lock import DeviceLock
from personalpeft.backends.torch.kv_cache import ForwardContext, paged_attention_forward
from personalpeft.backends.torch.llama import empty_llama, load_llama
from personalpeft.backends.torch.lora_layers import (
    ActiveLoRA,
    FrozenLinear,
    LoRAContext,
    fuse_loaded_linears,
    group_projections,
    install_lora_layers,
)
from personalpeft.backends.torch.mapped_model import (
    Unpacker,
    check_unpacking,
    fill_mapped_model,
    fuse_mapped_linears,
    map_other_linears,
)
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.training.fused_modules import RotaryTable, install_fused_modules
from personalpeft.backends.torch.training.packing import PackedSequence
from personalpeft.base_models.files import FRESH_COPY
from personalpeft.base_models.mapped_weights import MappedWeights
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError
from personalpeft.types import Architecture

# Activations of one pass beyond these bytes are computed twice instead of kept: with weights in
# memory, and with weights in the base's file, which are chosen to save memory.
LOADED_ACTIVATIONS, MAPPED_ACTIVATIONS = 512 * 2**20, 96 * 2**20

# Hidden states whose logits are computed at a time. A head is as slow as several blocks. A mapped
# one is unpacked each time.
_LOADED_HEAD_ROWS, _MAPPED_HEAD_ROWS = 64, 256


class ModelRunner:
    """The loaded base and its LoRA layers."""

    def __init__(
        self,
        base: Base,
        where: DeviceChoice,
        ops: Ops,
        cache: Path | None,
        weights: MappedWeights | Path,
    ) -> None:
        self.base = base
        self.where = where
        on_cpu = where.device.type == "cpu"
        threads = min(torch.get_num_threads(), host.usable_cores()) if on_cpu else 1
        self._chooser = ProductChooser(thread_counts(threads), cache, where.device, ops.matmul)
        self.ops = ops
        # Any: transformers' stubs have few of the methods.
        self.module: Any
        self._context = LoRAContext()
        # The products of each group in each layer, and that of the head.
        self._products: list[FrozenLinear]
        if isinstance(weights, MappedWeights):
            self._build(weights)
            kept, self._head_rows = MAPPED_ACTIVATIONS, _MAPPED_HEAD_ROWS
        else:
            self._load(weights)
            kept, self._head_rows = LOADED_ACTIVATIONS, _LOADED_HEAD_ROWS
        self._most_tokens = kept // _activation_bytes(base.architecture, where.dtype)
        self._config = self.module.config.get_text_config()
        self._fused_attention = install_fused_modules(self.module, ops)
        self._rotary_tables = [
            part for part in self.module.modules() if isinstance(part, RotaryTable)
        ]
        self._governor = (
            ThreadGovernor(self._chooser.threads, host.usable_cores()) if on_cpu else None
        )
        self._lock = DeviceLock()
        blocks = list(self.module.get_submodule(base.architecture.block_path))
        for block in blocks:
            block.register_forward_pre_hook(self._at_boundary)
        self._checkpoints = BlockCheckpoints(blocks)
        self._sessions = 0
        self._window, self._all_slide = _sliding_window(self._config)

    def _load(self, folder: Path) -> None:
        """Load all weights of a folder into memory."""
        where, make_linear = self.where, partial(fuse_loaded_linears, chooser=self._chooser)
        module = load_llama(folder, where.dtype)
        module = module or _make_with_transformers(folder, where, load=True)
        self.module = module.to(where.device).eval().requires_grad_(False)
        self._products = install_lora_layers(
            self.module, self.base.architecture, make_linear, self._context
        )
        head = make_linear([("lm_head", self.module.get_output_embeddings())])
        self.module.set_output_embeddings(head)
        self._products.append(head)
        if all(product.copies_weights for product in self._products):
            # The rest alone would keep the whole file in memory, beside its copy.
            for parameter in self.module.parameters():
                parameter.data = parameter.data.clone()

    def _build(self, mapped: MappedWeights) -> None:
        """Build the model around weights that stay in their file."""
        check_unpacking(mapped, self.ops)
        host.return_large_blocks()
        unpacker = Unpacker(self.ops, self._chooser)
        make_linear = partial(fuse_mapped_linears, weights=mapped, unpacker=unpacker)
        folder = self.base.folder
        self.module = empty_llama(folder) or _make_with_transformers(folder, self.where, load=False)
        fill_mapped_model(self.module, mapped, unpacker)
        self._products = install_lora_layers(
            self.module, self.base.architecture, make_linear, self._context
        )
        # The head has no adapter, and its weights are mapped too.
        map_other_linears(self.module, make_linear)
        self._products.append(self.module.get_output_embeddings())
        self.module.eval()

    @contextmanager
    def exclusive(self, active: ActiveLoRA | None = None) -> Iterator[None]:
        """Take the device's lock and activate adapters, with as many threads as cores are free.

        Steps may take their turn between two blocks. The threads are released afterwards.
        """
        with self._lock.for_pass(), self._activated(active):
            try:
                yield
            finally:
                release_threads()

    @contextmanager
    def _activated(self, active: ActiveLoRA | None) -> Iterator[None]:
        team: AbstractContextManager[None] = nullcontext()
        if self._governor is not None:
            team = limit_threads(self._governor.threads())
            if self._governor.is_crowded():
                release_threads()
        with team:
            self._context.active = active
            try:
                yield
            finally:
                self._context.active = None

    @property
    def vocabulary_size(self) -> int:
        """The number of logits of a token."""
        return int(self._config.vocab_size)

    @property
    def batch_invariant(self) -> bool:
        """Whether each product gives a row the same bits in any batch."""
        return self._chooser.invariant

    @property
    def packing_invariant(self) -> bool:
        """Whether a continuation has the same bits in any packed sequence."""
        return self.batch_invariant and self._fused_attention

    def hidden(self, packed: PackedSequence) -> Tensor:
        """Return the last hidden states ``[reads, size]`` of a packed sequence's reads.

        The caller holds the lock. Follows the gradient mode.
        """
        device = self.where.device
        visibility = (
            {"segments": packed.segments}
            if self._fused_attention
            else {"attention_mask": self._mask(packed)}
        )
        self._reserve_positions(int(packed.positions.max()) + 1)
        # They change no bits, so their use may depend on the size of a pass.
        self._checkpoints.active = len(packed.tokens) > self._most_tokens
        output = self.module.base_model(
            input_ids=packed.tokens[None].to(device),
            position_ids=packed.positions[None].to(device),
            use_cache=False,
            **visibility,
        )
        states: Tensor = output.last_hidden_state[0]
        return states[torch.cat(packed.reads).to(device)]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[n, vocabulary]`` of hidden states ``[n, size]``, in the base's dtype."""
        head = self._products[-1]
        logits = differentiable(
            lambda x: self._in_parts(head.multiply, x),
            lambda x, grad: self._in_parts(head.multiply_transposed, grad),
            hidden,
        )
        cap = getattr(self._config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    def _in_parts(self, product: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return a product of the head, and let steps go first between its parts."""
        result: Tensor | None = None
        for begin in range(0, len(x), self._head_rows):
            self.let_step_go_first()
            part = product(x[begin : begin + self._head_rows])
            if result is None:
                result = part.new_empty((len(x), part.shape[-1]))
            result[begin : begin + self._head_rows] = part
        return product(x) if result is None else result

    def _at_boundary(self, block: nn.Module, args: tuple[Any, ...]) -> None:
        """Let a step go first before a block, and in the backward pass after its gradients."""
        self.let_step_go_first()
        if args[0].requires_grad:
            args[0].register_hook(lambda grad: self.let_step_go_first())

    def let_step_go_first(self) -> None:
        """Let a step that waits take its turn. For the thread of a pass; otherwise nothing happens."""
        if self._lock.is_wanted():
            active, self._context.active = self._context.active, None
            # A team that spins would slow the step down.
            release_threads()
            try:
                self._lock.give_way()
            finally:
                self._context.active = active

    def open_session(self) -> None:
        """Store what gradients need while any session is open."""
        with self._lock.for_pass():
            self._sessions += 1
            for product in self._products:
                product.enable_backward()

    def close_session(self) -> None:
        """Undo one ``open_session``."""
        with self._lock.for_pass():
            self._sessions -= 1
            if not self._sessions:
                for product in self._products:
                    product.disable_backward()
                host.return_free_memory()

    def step(
        self,
        tokens: Tensor,
        positions: Tensor,
        reads: Tensor,
        batch: ForwardContext,
        active: ActiveLoRA | None,
        *,
        length: int,
    ) -> Tensor:
        """Queue one pass over tokens of many rows. On a GPU nothing waits for it.

        Args:
            tokens: The tokens of all rows, int64 on the device, as the next two.
            positions: The position of each token in its row.
            reads: The tokens after which logits are needed.
            batch: Where keys and values are.
            active: The rows' adapters.
            length: Larger than every position.

        Returns:
            Logits ``[reads, vocabulary]``.
        """
        inputs = {"input_ids": tokens[None], "position_ids": positions[None], "batch": batch}
        with torch.inference_mode(), self._lock.for_step(), self._activated(active):
            self._reserve_positions(length)
            if not len(reads):
                self.module.base_model(**inputs, use_cache=False)
                return torch.empty((0, 0), device=self.where.device)
            output = self.module(**inputs, use_cache=False, logits_to_keep=reads)
        logits: Tensor = output.logits[0]
        return logits

    def synchronize(self) -> None:
        """Wait until everything that is queued on a GPU is done."""
        if self.where.device.type == "cuda":
            torch.cuda.synchronize(self.where.device)

    def rotary_tables(self) -> list[Tensor]:
        """Return the tables of positions that steps read."""
        return [tensor for table in self._rotary_tables for tensor in table.tensors()]

    def _reserve_positions(self, length: int) -> None:
        for table in self._rotary_tables:
            table.reserve(length)

    def _mask(self, packed: PackedSequence) -> Any:
        def to_additive(visible: Tensor) -> Tensor:
            mask = torch.zeros(visible.shape, dtype=self.where.dtype).masked_fill_(
                ~visible, torch.finfo(self.where.dtype).min
            )
            return mask[None, None].to(self.where.device)

        visible, positions = packed.visible, packed.positions
        if self._window is None:
            return to_additive(visible)
        distances = positions[:, None] - positions[None, :]
        sliding = to_additive(visible & (distances < self._window))
        if self._all_slide:
            return sliding
        return {"full_attention": to_additive(visible), "sliding_attention": sliding}


def _make_with_transformers(folder: Path, where: DeviceChoice, *, load: bool) -> Any:
    """Return a folder's model, or with ``load`` off one without weights, on the meta device."""
    # Not at the top: it takes longer than the rest of a start.
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    AttentionInterface.register("personalpeft", paged_attention_forward)
    options = {"dtype": where.dtype, "attn_implementation": "personalpeft"}
    parts_for_images = ("vision_tower", "multi_modal_projector")
    if load:
        try:
            module: Any
            module, info = AutoModelForCausalLM.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise WeightsError(
                f"The weights in {folder} do not fit its config.json, or the memory: {reason}",
                hint=FRESH_COPY,
            ) from error
        # transformers makes up weights that are missing.
        missing = [
            name
            for name in sorted(info["missing_keys"])
            if not any(f"{part}." in name for part in parts_for_images)
        ]
        if missing:
            raise WeightsError(
                f"The weights in {folder} lack {len(missing)} tensors, such as {missing[0]}.",
                hint=FRESH_COPY,
            )
    else:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, **options)
    # Only images pass through these. A multimodal model then reads text as before.
    for name in parts_for_images:
        if hasattr(module.base_model, name):
            setattr(module.base_model, name, None)
    return module


def _activation_bytes(architecture: Architecture, dtype: torch.dtype) -> int:
    """Return roughly what one token's activations take in all blocks until the backward pass."""
    numbers = sum(group.inputs + group.outputs for group in group_projections(architecture))
    return numbers * architecture.blocks * dtype.itemsize


def _sliding_window(config: Any) -> tuple[int | None, bool]:
    """Return the window of a model with sliding attention, else None; and whether all layers slide.

    A model that mixes both kinds names that of each layer (Gemma 3). One without such names has the
    window in all layers (Mistral 7B v0.1, Phi-3).
    """
    window = getattr(config, "sliding_window", None)
    if not window or getattr(config, "use_sliding_window", True) is False:
        return None, False
    kinds = getattr(config, "layer_types", None)
    slides = kinds is None or "sliding_attention" in kinds
    return (int(window) if slides else None), kinds is None

"""Compiles the kernels for an H100, which needs no GPU; prints the name of each that was compiled."""

from __future__ import annotations

import sys
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from personalpeft.backends.torch.ops import triton_kernels
from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.triton_ops import TritonOps


class NoDevice:
    """As much of a driver as compiling asks for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands for a program: what would be launched is compiled."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_it(*given: Any, **options: Any) -> None:
            compiled = self._program.warmup(*given, grid=grid, **options)
            assert compiled.asm["cubin"]
            sys.stdout.write(f"{self._program.__name__}\n")

        return compile_it


def main() -> None:
    driver.set_active(NoDevice())
    for name in ("shrink", "expand", "write_kv", "paged_attention", "merge_splits", "rms_norm"):
        setattr(triton_kernels, name, Compiled(getattr(triton_kernels, name)))
    kernels, tokens, dim = TritonOps(torch.device("cpu")), 20, 128
    ints = torch.zeros(tokens, dtype=torch.int32)
    shelf = StackedLoRAWeights(zeros(3, 2, 24, 576), zeros(3, 2, 8, 960), (576, 768, 960))
    kernels.apply_lora(zeros(tokens, 576), zeros(tokens, 960), LoRAMapping(ints, ints), shelf, 1)
    keys, values, q = (
        zeros(64, 3, dim, KV_BLOCK_SIZE),
        zeros(64, 3, KV_BLOCK_SIZE, dim),
        zeros(tokens, 9, dim),
    )
    places = AttentionMetadata(ints.long(), torch.zeros(tokens, 20, dtype=torch.int32), ints)
    kernels.write_kv(zeros(tokens, 3, dim), zeros(tokens, 3, dim), keys, values, places)
    for window, softcap in ((0, 0.0), (512, 50.0)):
        kernels.paged_attention(
            q, keys, values, places, scaling=0.1, softcap=softcap, window=window
        )
        chunk = PrefillChunk(0, tokens, tokens, ints)
        kernels.prefill_attention(
            q, keys, values, chunk, scaling=0.1, softcap=softcap, window=window
        )
    kernels.rms_norm(zeros(1, tokens, 576), zeros(576), 1e-5)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()

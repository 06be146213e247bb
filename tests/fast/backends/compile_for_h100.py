"""Compile the kernels for an H100 without a GPU and print each compiled kernel's name."""

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
    AttentionParams,
    KVLayer,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.triton_ops import TritonOps


class CompileOnlyDriver:
    """The part of a Triton driver that compiling needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledKernel:
    """Wraps a kernel: a launch compiles it for the target and runs nothing."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def compile_kernel(*given: Any, **options: Any) -> None:
            compiled = self._program.warmup(*given, grid=grid, **options)
            assert compiled.asm["cubin"]
            sys.stdout.write(f"{self._program.__name__}\n")

        return compile_kernel


def main() -> None:
    driver.set_active(CompileOnlyDriver())
    for name in ("shrink", "expand", "write_kv", "paged_attention", "merge_splits", "rms_norm"):
        setattr(triton_kernels, name, CompiledKernel(getattr(triton_kernels, name)))
    kernels, tokens, dim = TritonOps(torch.device("cpu"), torch.bfloat16), 20, 128
    ints = torch.zeros(tokens, dtype=torch.int32)
    shelf = StackedLoRAWeights(zeros(3, 2, 24, 576), zeros(3, 2, 8, 960), (576, 768, 960))
    kernels.apply_lora(zeros(tokens, 576), zeros(tokens, 960), LoRAMapping(ints, ints), shelf, 1)
    kv = KVLayer(zeros(64, 3, dim, KV_BLOCK_SIZE), zeros(64, 3, KV_BLOCK_SIZE, dim))
    q = zeros(tokens, 9, dim)
    places = AttentionMetadata(ints.long(), torch.zeros(tokens, 20, dtype=torch.int32), ints)
    kernels.write_kv(zeros(tokens, 3, dim), zeros(tokens, 3, dim), kv, places)
    for window, softcap in ((0, 0.0), (512, 50.0)):
        params = AttentionParams(0.1, softcap, window)
        kernels.paged_attention(q, kv, places, params)
        kernels.prefill_attention(q, kv, PrefillChunk(0, tokens, tokens, ints), params)
    kernels.rms_norm(zeros(1, tokens, 576), zeros(576), 1e-5)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


if __name__ == "__main__":
    main()

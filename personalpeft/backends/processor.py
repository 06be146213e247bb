"""Read which instructions the CPU supports, and which of them may be used."""

from __future__ import annotations

import os

from personalpeft import host

# Variables that limit the instruction sets of libraries and of our kernels.
KERNELS = "PERSONALPEFT_KERNELS"
_LIMITS = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    KERNELS,
)


def instruction_sets() -> str:
    """Return the CPU's instruction sets and the environment's limits on them."""
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return " ".join([host.cpu_flags(), *limits])

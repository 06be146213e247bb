"""Print a benchmark's result, and when, where and from which code it was measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from benchmarks.tables import tables_of
from personalpeft.formatting import to_json
from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import emit, format_table

_PACKAGES = ("torch", "transformers", "peft", "llama-cpp-python")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")


@dataclass(frozen=True, slots=True)
class Measured:
    """When, where and from which code a result was measured.

    ``commit`` ends in "-dirty" for changed files, and is None outside a checkout. ``software`` are
    versions of packages. ``note`` is for conditions that a program cannot know.
    """

    date: str
    machine: str
    commit: str | None
    software: Mapping[str, str]
    note: str = ""


def describe_measurement() -> Measured:
    """Return the date, machine and code of this process."""
    return Measured(
        date=datetime.now(UTC).date().isoformat(),
        machine=_describe_machine(),
        commit=_commit(),
        software=dict(_versions()),
    )


def emit_result(common: GlobalOptions, found: Any, *more: str) -> None:
    """Print a result as JSON with --json, else its tables and then ``more`` text."""
    result = to_json(found)
    tables = tables_of(result)
    parts = []
    for name, table in tables.items():
        flexible = range(1, len(table.heads))
        text = format_table([head.upper() for head in table.heads], table.rows, flexible=flexible)
        parts.append(text if len(tables) == 1 else f"{name}\n{text}")
    text = "\n\n".join((*parts, *filter(None, more)))
    emit(common, {**result, "measured": to_json(describe_measurement())}, text)


def _describe_machine() -> str:
    """Return the processor, its instruction sets, the cores of this process, memory and GPU."""
    lines: list[str] = []
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        lines = cpuinfo.read_text("utf-8", "replace").splitlines()
    fields = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", fields.get("Features", "")).split()
    sets = [name for name in _INSTRUCTIONS if name in flags]
    processor = fields.get("model name") or platform.processor() or platform.machine()
    if sets:
        processor += f" ({', '.join(sets)})"
    total = os.cpu_count() or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    cores = f"{total} cores" if usable == total else f"{usable} of {total} cores"
    memory = psutil.virtual_memory().total / 2**30
    parts = [processor, cores, f"{memory:.0f} GiB"]
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    return ", ".join(parts)


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        ran = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return ran.stdout.strip()


def _versions() -> Mapping[str, str]:
    installed = {}
    for name in _PACKAGES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed

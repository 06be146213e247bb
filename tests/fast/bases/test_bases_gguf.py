"""A base's weights as a GGUF file: its content, and the memory that writing takes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf_models import copy_fields, write_out

from personalpeft.base_models.files import weights_of
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import resolve_gguf_file, write_gguf
from personalpeft.base_models.types import Base

Weights = Callable[[], Iterator[tuple[str, torch.Tensor]]]


def weights_in(base: Base, kind: torch.dtype, largest: float) -> Weights:
    """Return the base's weights in another type, each with one number of this size."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights_of(base.folder):
            changed = tensor.to(kind)
            changed.view(-1)[0] = largest
            yield name, changed

    return weights


def write_with_gguf_writer(path: Path, like: Path) -> Path:
    """Write a file with the content of another by a writer that holds all of it in memory."""
    reader = GGUFReader(like)
    writer = GGUFWriter(path, "llama")
    copy_fields(reader, writer)
    for tensor in reader.tensors:
        raw = tensor.tensor_type if tensor.tensor_type == GGMLQuantizationType.BF16 else None
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=raw)
    write_out(writer)
    return path


@pytest.mark.parametrize(
    ("kind", "largest"),
    [(torch.float32, 1.0), (torch.float16, 1.0), (torch.bfloat16, 1.0), (torch.bfloat16, 70_000.0)],
)
def test_streamed_file_is_byte_identical_to_one_written_at_once(
    kind: torch.dtype, largest: float, tiny: Base, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny, gguf_names(tiny), file, weights_in(tiny, kind, largest))
    assert len(GGUFReader(file).tensors) == len(list(weights_of(tiny.folder)))
    assert file.read_bytes() == write_with_gguf_writer(tmp_path / "at-once.gguf", file).read_bytes()


@pytest.mark.parametrize(
    ("largest", "kind"),
    [
        (1.0, GGMLQuantizationType.F16),
        (-60_000.0, GGMLQuantizationType.F16),
        (70_000.0, GGMLQuantizationType.BF16),
        (-70_000.0, GGMLQuantizationType.BF16),
    ],
)
def test_bfloat16_matrix_becomes_float16_where_it_fits_and_a_vector_float32(
    largest: float, kind: GGMLQuantizationType, tiny: Base, tmp_path: Path
) -> None:
    file, weights = tmp_path / "model.gguf", weights_in(tiny, torch.bfloat16, largest)
    write_gguf(tiny, gguf_names(tiny), file, weights)
    found = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    for name, wanted in weights():
        tensor = found[gguf_names(tiny).tensor(name)]
        assert tensor.tensor_type == (kind if wanted.ndim > 1 else GGMLQuantizationType.F32)
        if kind == GGMLQuantizationType.F16 and "up_proj" in name:
            assert np.allclose(tensor.data, wanted.float().numpy(), atol=1e-7)


def test_writing_more_weights_takes_no_more_memory(tiny: Base, tmp_path: Path) -> None:
    blocks = 32
    size = 2**18

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for block in range(blocks):
            yield (
                f"model.layers.{block}.mlp.up_proj.weight",
                torch.ones(256, size // 512, dtype=torch.bfloat16),
            )

    tracemalloc.start()
    write_gguf(tiny, replace(gguf_names(tiny), blocks=blocks), tmp_path / "model.gguf", weights)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "model.gguf").stat().st_size > blocks * size
    assert most < blocks * size / 4


_KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
from personalpeft.base_models.gguf import writer
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.registry import find_card

def write(base, names, into):
    into.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

writer.write_gguf = write
base = resolve_base(find_card("tiny-random"), cache=Path(sys.argv[1]))
writer.resolve_gguf_file(replace(base, cache=Path(sys.argv[2])), gguf_names(base))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_partial_file_of_a_killed_process_is_not_used(
    tiny: Base, tiny_cache: Path, tmp_path: Path
) -> None:
    killed = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tiny_cache), str(tmp_path)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.glob("bases/*.tmp-*"))) == 1
    file = resolve_gguf_file(replace(tiny, cache=tmp_path), gguf_names(tiny))
    assert GGUFReader(file).tensors
    assert list(tmp_path.glob("bases/*.tmp-*")) == []

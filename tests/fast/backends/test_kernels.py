"""What every kernel promises: the numbers of the plain version, whatever the shapes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from personalpeft.backends.torch.kernels import choose_kernels
from personalpeft.backends.torch.kernels.base import BLOCK, Kernels, Places, Pointers, Shelf
from personalpeft.backends.torch.kernels.native import NativeKernels, NoCompiler
from personalpeft.backends.torch.kernels.plain import PlainKernels, attention

PLAIN = PlainKernels()
DTYPES = (torch.float32, torch.bfloat16)
few = settings(max_examples=40, deadline=None)


@pytest.fixture(scope="module")
def natives(shared_cache: Path) -> Iterator[dict[torch.dtype, Kernels]]:
    try:
        yield {dtype: NativeKernels(shared_cache, dtype) for dtype in DTYPES}
    except NoCompiler as why:
        pytest.skip(str(why))


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    rough = found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=2e-2 if rough else 1e-4, atol=5e-2 if rough else 1e-4)


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    ranks=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    tokens=st.integers(1, 9),
    inputs=st.integers(1, 70),
    widths=st.lists(st.integers(1, 250), min_size=1, max_size=3),
)
def test_each_token_gets_what_its_own_slot_adds(
    natives: dict[torch.dtype, Kernels],
    seed: int,
    dtype: torch.dtype,
    ranks: list[int],
    tokens: int,
    inputs: int,
    widths: list[int],
) -> None:
    chance = torch.Generator().manual_seed(seed)
    capacity, slots, blocks = 8, len(ranks) + 1, 2
    a = torch.zeros(slots, blocks, len(widths), capacity, inputs, dtype=dtype)
    b = torch.zeros(slots, blocks, capacity, sum(widths), dtype=dtype)
    for slot, rank in enumerate(ranks, 1):
        a[slot, :, :, :rank] = random(chance, blocks, len(widths), rank, inputs, dtype=dtype) / 8
        b[slot, :, :rank] = random(chance, blocks, rank, sum(widths), dtype=dtype) / 8
    shelf = Shelf(a.flatten(2, 3), b, tuple(np.cumsum(widths).tolist()))
    pointed = torch.randint(0, slots, (tokens,), generator=chance, dtype=torch.int32)
    pointers = Pointers(pointed, torch.tensor([0, *ranks], dtype=torch.int32))
    x, y = random(chance, tokens, inputs, dtype=dtype), random(chance, tokens, sum(widths), dtype=dtype)
    wanted, found = y.clone(), y.clone()
    PLAIN.lora(x, wanted, pointers, shelf, 1)
    natives[dtype].lora(x, found, pointers, shelf, 1)
    assert_near(found, wanted)
    assert torch.equal(found[pointed == 0], y[pointed == 0])


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    lengths=st.lists(st.integers(1, 3 * BLOCK + 5), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    dim=st.sampled_from([8, 12, 64]),
    window=st.sampled_from([0, 1, 7, 40]),
    softcap=st.sampled_from([0.0, 2.0]),
)
def test_a_token_attends_to_its_own_row_alone(
    natives: dict[torch.dtype, Kernels],
    seed: int,
    dtype: torch.dtype,
    lengths: list[int],
    heads: tuple[int, int],
    dim: int,
    window: int,
    softcap: float,
) -> None:
    chance = torch.Generator().manual_seed(seed)
    longest = max(-(-length // BLOCK) for length in lengths)
    pool = len(lengths) * longest + 1
    table = torch.randperm(pool - 1, generator=chance, dtype=torch.int32).view(len(lengths), longest) + 1
    rows = [
        (random(chance, n, heads[1], dim, dtype=dtype), random(chance, n, heads[1], dim, dtype=dtype)) for n in lengths
    ]
    q = random(chance, len(lengths), heads[0], dim, dtype=dtype)
    counts = torch.tensor(lengths, dtype=torch.int32)
    wanted = []
    for row, (k, v) in enumerate(rows):
        first = max(0, lengths[row] - window) if window else 0
        wanted.append(attention(q[row : row + 1], k[first:], v[first:], mask=None, scaling=dim**-0.5, softcap=softcap))
    for kernels in (PLAIN, natives[dtype]):
        # What other rows and former ones left behind is larger than anything that is there by right.
        keys = torch.full((pool, heads[1], dim, BLOCK), 50.0, dtype=dtype)
        values = torch.full((pool, heads[1], BLOCK, dim), 50.0, dtype=dtype)
        for row, (k, v) in enumerate(rows):
            spots = torch.arange(lengths[row])
            writes = table[row][spots // BLOCK].long() * BLOCK + spots % BLOCK
            kernels.remember(k, v, keys, values, Places(writes, table, counts))
        found = kernels.attend(
            q, keys, values, Places(torch.tensor([0]), table, counts), scaling=dim**-0.5, softcap=softcap, window=window
        )
        assert_near(found, torch.cat(wanted))


@few
@given(seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), tokens=st.integers(1, 5), size=st.integers(1, 70))
def test_norms_are_those_of_the_model(
    natives: dict[torch.dtype, Kernels], seed: int, dtype: torch.dtype, tokens: int, size: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, weight = random(chance, 1, tokens, size, dtype=dtype), random(chance, size, dtype=dtype)
    assert_near(natives[dtype].norm(x, weight, 1e-5), PLAIN.norm(x, weight, 1e-5))


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 300), st.integers(1, 40)),
    half=st.booleans(),
    turned=st.booleans(),
    factor=st.sampled_from([1.0, 0.25, -3.0]),
)
def test_what_is_laid_is_the_source_times_its_factor(
    natives: dict[torch.dtype, Kernels],
    seed: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    half: bool,
    turned: bool,
    factor: float,
) -> None:
    source = np.random.default_rng(seed).standard_normal(shape).astype(np.float16 if half else np.float32)
    source[0, 0, 0] = 6e-8 if half else 1e-30
    places = []
    for kernels in (PLAIN, natives[dtype]):
        wide = torch.full(
            (shape[0], shape[2] + 3, shape[1] + 5) if turned else (shape[0], shape[1] + 3, shape[2] + 5), 7.0
        )
        whole = wide.to(dtype)
        place = whole[:, 1 : shape[2] + 1, 2 : shape[1] + 2].transpose(1, 2) if turned else whole[:, 1:-2, 2:-3]
        assert kernels.lay(source, place, factor)
        places.append(whole)
    assert torch.equal(*places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_when_it_is_laid(
    natives: dict[torch.dtype, Kernels], dtype: torch.dtype, bad: float
) -> None:
    source = np.ones((2, 3, 70), np.float32)
    source[1, 2, 69] = bad
    for kernels in (PLAIN, natives[dtype]):
        assert not kernels.lay(source, torch.empty(2, 3, 70, dtype=dtype), 1.0)
        assert not kernels.lay(np.full((1, 1, 2), 3e38, np.float32), torch.empty(1, 1, 2, dtype=dtype), 100.0)


def test_without_a_compiler_the_plain_kernels_serve_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels, why = choose_kernels(torch.device("cpu"), torch.float32, tmp_path)
    assert kernels.name == "plain"
    assert "no C++ compiler" in why


def test_a_damaged_library_in_the_cache_is_built_anew(natives: dict[torch.dtype, Kernels], tmp_path: Path) -> None:
    NativeKernels(tmp_path, torch.float32)
    (built,) = tmp_path.rglob("native.so")
    built.unlink()  # Not written over: this process still runs the former one.
    built.write_bytes(b"half a file")
    assert NativeKernels(tmp_path, torch.float32).norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]
    assert [path.name for path in built.parent.iterdir()] == ["native.so"]

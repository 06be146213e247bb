"""What every kernel promises: the numbers of the plain version, whatever the shapes.

Those for a GPU run through Triton's interpreter on the processor (tests/conftest.py); with ``TRITON_INTERPRET=0`` they are
compiled and run on the GPU that has to be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from personalpeft.backends.torch.ops import choose_ops
from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    LoRAMapping,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.native_library import NoCompiler
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps, attention

PLAIN = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)
few = examples(25)
fewer = examples(6)


@dataclass(frozen=True)
class Fast:
    """Kernels that are quicker than the plain ones, for each number format, and where they run."""

    of: dict[torch.dtype, Ops]
    device: torch.device


@pytest.fixture(scope="module")
def natives(shared_cache: Path) -> dict[torch.dtype, Ops]:
    try:
        return {dtype: CpuOps(shared_cache, dtype) for dtype in DTYPES}
    except NoCompiler as why:
        pytest.skip(str(why))


@pytest.fixture(
    scope="module", params=["native", pytest.param("triton", marks=pytest.mark.exhaustive)]
)
def fast(request: pytest.FixtureRequest) -> Fast:
    if request.param == "native":
        return Fast(request.getfixturevalue("natives"), torch.device("cpu"))
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from personalpeft.backends.torch.ops.triton_ops import try_triton_ops

    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
    return Fast({dtype: try_triton_ops(device, dtype) for dtype in DTYPES}, device)


@dataclass(frozen=True)
class Adapted:
    """Tokens before and after a projection, and slots that hold adapters."""

    x: Tensor
    y: Tensor
    pointers: LoRAMapping
    shelf: StackedLoRAWeights

    def added(self, kernels: Ops, tokens: slice = slice(None)) -> Tensor:
        """The outputs of some tokens, in a pass without the others."""
        y = self.y[tokens].clone()
        kernels.apply_lora(
            self.x[tokens],
            y,
            LoRAMapping(self.pointers.slots[tokens], self.pointers.ranks),
            self.shelf,
            1,
        )
        return y

    def on(self, device: torch.device) -> Adapted:
        pointers = LoRAMapping(self.pointers.slots.to(device), self.pointers.ranks.to(device))
        shelf = StackedLoRAWeights(
            self.shelf.a.to(device), self.shelf.b.to(device), self.shelf.ends
        )
        return Adapted(self.x.to(device), self.y.to(device), pointers, shelf)


@st.composite
def adapted(draw: st.DrawFn) -> Adapted:
    chance, dtype = (
        torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
        draw(st.sampled_from(DTYPES)),
    )
    ranks = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    widths = draw(st.lists(st.integers(1, 300), min_size=1, max_size=3))
    tokens, inputs = draw(st.integers(1, 20)), draw(st.integers(1, 70))
    capacity, slots, blocks = 24, len(ranks) + 1, 2
    a = torch.zeros(slots, blocks, len(widths), capacity, inputs, dtype=dtype)
    b = torch.zeros(slots, blocks, capacity, sum(widths), dtype=dtype)
    for slot, rank in enumerate(ranks, 1):
        a[slot, :, :, :rank] = random(chance, blocks, len(widths), rank, inputs, dtype=dtype) / 8
        b[slot, :, :rank] = random(chance, blocks, rank, sum(widths), dtype=dtype) / 8
    pointed = torch.randint(0, slots, (tokens,), generator=chance, dtype=torch.int32)
    if draw(st.booleans()):
        # As in a pass that reads prompts: many tokens of one slot, one after another.
        pointed = (
            pointed[:1].expand(tokens).contiguous()
            if draw(st.booleans())
            else pointed.sort().values
        )
    return Adapted(
        random(chance, tokens, inputs, dtype=dtype),
        random(chance, tokens, sum(widths), dtype=dtype),
        LoRAMapping(pointed, torch.tensor([0, *ranks], dtype=torch.int32)),
        StackedLoRAWeights(a.flatten(2, 3), b, tuple(np.cumsum(widths).tolist())),
    )


@dataclass(frozen=True)
class Rows:
    """Rows of a batch: all keys and values of each, and the blocks that they are put into."""

    rows: list[tuple[Tensor, Tensor]]
    table: Tensor
    heads: int
    window: int
    softcap: float
    chance: torch.Generator

    @property
    def scaling(self) -> float:
        return float(self.rows[0][0].shape[-1] ** -0.5)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(k) for k, _ in self.rows], dtype=torch.int32)

    def queries(self, count: int) -> Tensor:
        k, _ = self.rows[0]
        return random(self.chance, count, self.heads, k.shape[-1], dtype=k.dtype)

    def pool(self, device: torch.device) -> tuple[Tensor, Tensor]:
        _, kv_heads, dim = self.rows[0][0].shape
        size, dtype = int(self.table.max()) + 1, self.rows[0][0].dtype
        # What other rows and former ones left behind is larger than anything that is there by right.
        keys = torch.full((size, kv_heads, dim, KV_BLOCK_SIZE), 50.0, dtype=dtype)
        values = torch.full((size, kv_heads, KV_BLOCK_SIZE, dim), 50.0, dtype=dtype)
        for row, (k, v) in enumerate(self.rows):
            spots = torch.arange(len(k))
            writes = (
                self.table[row][spots // KV_BLOCK_SIZE].long() * KV_BLOCK_SIZE
                + spots % KV_BLOCK_SIZE
            )
            PLAIN.write_kv(k, v, keys, values, AttentionMetadata(writes, writes, writes))
        return keys.to(device), values.to(device)

    def attended(
        self, kernels: Ops, device: torch.device, q: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """What the last tokens of some rows attend to, in a pass without the others."""
        lengths, keys_values = self.lengths[rows], self.pool(device)
        table = self.table[rows, : -(-int(lengths.max()) // KV_BLOCK_SIZE)].contiguous()
        places = AttentionMetadata(
            torch.tensor([0], device=device), table.to(device), lengths.to(device)
        )
        return kernels.paged_attention(
            q[rows].to(device),
            *keys_values,
            places,
            scaling=self.scaling,
            softcap=self.softcap,
            window=self.window,
        ).cpu()

    def read(self, kernels: Ops, device: torch.device, q: Tensor, length: int) -> Tensor:
        """What tokens of the first row attend to, the last of which is its token ``length - 1``."""
        chunk = PrefillChunk(0, len(q), length, self.table[0].to(device))
        return kernels.prefill_attention(
            q.to(device),
            *self.pool(device),
            chunk,
            scaling=self.scaling,
            softcap=self.softcap,
            window=self.window,
        ).cpu()

    def wanted(self, q: Tensor, row: int, length: int) -> Tensor:
        """What a row's token ``length - 1`` should attend to."""
        k, v = self.rows[row]
        own = slice(max(0, length - self.window) if self.window else 0, length)
        return attention(
            q[None], k[own], v[own], mask=None, scaling=self.scaling, softcap=self.softcap
        )[0]


@st.composite
def batches(draw: st.DrawFn) -> Rows:
    chance, dtype = (
        torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
        draw(st.sampled_from(DTYPES)),
    )
    # Long ones too, which a GPU reads in parts.
    lengths = draw(
        st.lists(
            st.integers(1, 3 * KV_BLOCK_SIZE + 5) | st.integers(250, 290), min_size=1, max_size=4
        )
    )
    heads, kv_heads = draw(st.sampled_from([(1, 1), (4, 2), (9, 3)]))
    dim = draw(st.sampled_from([8, 12, 64]))
    longest = -(-max(lengths) // KV_BLOCK_SIZE)
    blocks = torch.randperm(len(lengths) * longest, generator=chance, dtype=torch.int32) + 1
    rows = [tuple(random(chance, n, kv_heads, dim, dtype=dtype) for _ in "kv") for n in lengths]
    return Rows(
        rows=rows,
        table=blocks.view(len(lengths), longest),
        heads=heads,
        window=draw(st.sampled_from([0, 1, 7, 40])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        chance=chance,
    )


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: Tensor, wanted: Tensor) -> None:
    rough = found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found, wanted, rtol=2e-2 if rough else 1e-4, atol=5e-2 if rough else 1e-4
    )


@few
@given(case=adapted())
def test_each_token_gets_what_its_own_slot_adds(fast: Fast, case: Adapted) -> None:
    wanted = case.added(PLAIN)
    found = case.on(fast.device).added(fast.of[case.x.dtype]).cpu()
    assert_near(found, wanted)
    untouched = case.pointers.slots == 0
    assert torch.equal(found[untouched], case.y[untouched])


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 6),
    heads=st.sampled_from([1, 3]),
    dim=st.sampled_from([8, 12, 400]),
)
def test_keys_and_values_lie_in_their_places_and_nowhere_else(
    fast: Fast, seed: int, dtype: torch.dtype, tokens: int, heads: int, dim: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    k, v = (random(chance, tokens, heads, dim, dtype=dtype) for _ in "kv")
    writes = torch.randperm(3 * KV_BLOCK_SIZE, generator=chance)[:tokens]
    pools = []
    for kernels, device in ((PLAIN, torch.device("cpu")), (fast.of[dtype], fast.device)):
        keys = torch.full((3, heads, dim, KV_BLOCK_SIZE), 7.0, dtype=dtype, device=device)
        values = torch.full((3, heads, KV_BLOCK_SIZE, dim), 7.0, dtype=dtype, device=device)
        there = writes.to(device)
        kernels.write_kv(
            k.to(device), v.to(device), keys, values, AttentionMetadata(there, there, there)
        )
        pools.append((keys.cpu(), values.cpu()))
    assert all(torch.equal(*both) for both in zip(*pools, strict=True))


@few
@given(rows=batches())
def test_a_token_attends_to_its_own_row_alone(fast: Fast, rows: Rows) -> None:
    q = rows.queries(len(rows.rows))
    wanted = torch.stack([rows.wanted(q[row], row, len(k)) for row, (k, _) in enumerate(rows.rows)])
    assert_near(rows.attended(PLAIN, torch.device("cpu"), q), wanted)
    assert_near(rows.attended(fast.of[q.dtype], fast.device, q), wanted)


@few
@given(rows=batches(), count=st.integers(1, 40), short=st.integers(0, 40))
def test_a_token_of_a_prompt_attends_to_those_before_it(
    fast: Fast, rows: Rows, count: int, short: int
) -> None:
    length = max(1, len(rows.rows[0][0]) - short)
    q = rows.queries(min(count, length))
    wanted = torch.stack([rows.wanted(q[at], 0, length - len(q) + at + 1) for at in range(len(q))])
    assert_near(rows.read(PLAIN, torch.device("cpu"), q, length), wanted)
    assert_near(rows.read(fast.of[q.dtype], fast.device, q, length), wanted)


@fewer
@given(case=adapted(), rows=batches(), count=st.integers(2, 40), cut=st.integers(1, 39))
def test_who_else_is_in_the_pass_changes_no_bit(
    fast: Fast, case: Adapted, rows: Rows, count: int, cut: int
) -> None:
    here = case.on(fast.device)
    alone = [here.added(fast.of[case.x.dtype], slice(t, t + 1)) for t in range(len(case.x))]
    assert torch.equal(here.added(fast.of[case.x.dtype]), torch.cat(alone))

    q = rows.queries(len(rows.rows))
    kernels = fast.of[q.dtype]
    alone = [rows.attended(kernels, fast.device, q, slice(row, row + 1)) for row in range(len(q))]
    assert torch.equal(rows.attended(kernels, fast.device, q), torch.cat(alone))

    length = len(rows.rows[0][0])
    q = rows.queries(min(count, length))
    if cut < len(q):
        parts = (
            rows.read(kernels, fast.device, q[:cut], length - len(q) + cut),
            rows.read(kernels, fast.device, q[cut:], length),
        )
        assert torch.equal(rows.read(kernels, fast.device, q, length), torch.cat(parts))


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 5),
    size=st.integers(1, 70),
)
def test_norms_are_those_of_the_model(
    fast: Fast, seed: int, dtype: torch.dtype, tokens: int, size: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    x, weight = random(chance, 1, tokens, size, dtype=dtype), random(chance, size, dtype=dtype)
    found = fast.of[dtype].rms_norm(x.to(fast.device), weight.to(fast.device), 1e-5)
    assert_near(found.cpu(), PLAIN.rms_norm(x, weight, 1e-5))


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 4),
    size=st.integers(1, 70),
    kinds=st.integers(1, 5),
)
def test_the_first_of_the_largest_is_found(
    fast: Fast, seed: int, dtype: torch.dtype, rows: int, size: int, kinds: int
) -> None:
    x = torch.randint(-kinds, 1, (rows, size), generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    found = fast.of[dtype].argmax(x.to(fast.device)).tolist()
    assert found == [row.index(max(row)) for row in x.tolist()]


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
    natives: dict[torch.dtype, Ops],
    seed: int,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    half: bool,
    turned: bool,
    factor: float,
) -> None:
    source = (
        np.random.default_rng(seed)
        .standard_normal(shape)
        .astype(np.float16 if half else np.float32)
    )
    source[0, 0, 0] = 6e-8 if half else 1e-30
    places = []
    for kernels in (PLAIN, natives[dtype]):
        wide = torch.full(
            (shape[0], shape[2] + 3, shape[1] + 5)
            if turned
            else (shape[0], shape[1] + 3, shape[2] + 5),
            7.0,
        )
        whole = wide.to(dtype)
        place = (
            whole[:, 1 : shape[2] + 1, 2 : shape[1] + 2].transpose(1, 2)
            if turned
            else whole[:, 1:-2, 2:-3]
        )
        assert kernels.pack_weights(source, place, factor)
        places.append(whole)
    assert torch.equal(*places)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_when_it_is_laid(
    natives: dict[torch.dtype, Ops], dtype: torch.dtype, bad: float
) -> None:
    source = np.ones((2, 3, 70), np.float32)
    source[1, 2, 69] = bad
    for kernels in (PLAIN, natives[dtype]):
        assert not kernels.pack_weights(source, torch.empty(2, 3, 70, dtype=dtype), 1.0)
        assert not kernels.pack_weights(
            np.full((1, 1, 2), 3e38, np.float32), torch.empty(1, 1, 2, dtype=dtype), 100.0
        )


def test_without_a_compiler_the_plain_kernels_serve_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels, why = choose_ops(torch.device("cpu"), torch.float32, tmp_path)
    assert kernels.name == "plain"
    assert "C++" in why


@pytest.mark.exhaustive
def test_a_damaged_library_in_the_cache_is_built_anew(
    natives: dict[torch.dtype, Ops], tmp_path: Path
) -> None:
    CpuOps(tmp_path, torch.float32)
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries
    for built in libraries:
        built.unlink()  # Not written over: this process still runs the former one.
        built.write_bytes(b"half a file")
    assert CpuOps(tmp_path, torch.float32).rms_norm(
        torch.ones(1, 4), torch.ones(4), 0.0
    ).tolist() == [[1.0] * 4]
    for built in libraries:
        assert [path.name for path in built.parent.iterdir()] == [built.name]


def test_without_a_gpu_the_plain_kernels_serve_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.cuda, "_lazy_init", lambda: (_ for _ in ()).throw(RuntimeError("no NVIDIA driver"))
    )
    kernels, why = choose_ops(torch.device("cuda"), torch.bfloat16, None)
    assert kernels.name == "plain"
    assert "NVIDIA" in why or "Triton" in why


@pytest.mark.exhaustive
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # In a process of its own: this one interprets. The interpreter takes much that the compiler does not.
    script = Path(__file__).with_name("compile_for_a_gpu.py")
    given = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, script],
        env=given,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == {
        "shrink",
        "expand",
        "write_kv",
        "paged_attention",
        "merge_splits",
        "rms_norm",
    }

"""Every kernel matches the reference operations for all shapes.

GPU kernels run in Triton's interpreter (tests/conftest.py); ``TRITON_INTERPRET=0`` compiles them
and needs a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from personalpeft.backends.openmp import limit_threads
from personalpeft.backends.torch.ops import choose_ops
from personalpeft.backends.torch.ops.base import (
    KV_BLOCK_SIZE,
    AttentionMetadata,
    AttentionParams,
    KVLayer,
    LoRAMapping,
    NoKernels,
    Ops,
    PrefillChunk,
    StackedLoRAWeights,
    attention,
)
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.self_test import depends_on_batch
from personalpeft.backends.torch.ops.training_ops import Heads

PLAIN = Ops(torch.device("cpu"), torch.float32)
DTYPES = (torch.float32, torch.bfloat16)
few = examples(25)
fewer = examples(6)


@dataclass(frozen=True)
class FastOps:
    """Fast operations by number format, and their device."""

    of: dict[torch.dtype, Ops]
    device: torch.device


@pytest.fixture(scope="module")
def natives(shared_cache: Path) -> dict[torch.dtype, Ops]:
    try:
        return {dtype: CpuOps(shared_cache, dtype) for dtype in DTYPES}
    except NoKernels as why:
        pytest.skip(str(why))


@pytest.fixture(
    scope="module", params=["native", pytest.param("triton", marks=pytest.mark.exhaustive)]
)
def fast(request: pytest.FixtureRequest) -> FastOps:
    if request.param == "native":
        return FastOps(request.getfixturevalue("natives"), torch.device("cpu"))
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from personalpeft.backends.torch.ops.triton_ops import try_triton_ops

    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
    return FastOps({dtype: try_triton_ops(device, dtype) for dtype in DTYPES}, device)


@dataclass(frozen=True)
class AdapterCase:
    """Tokens before and after a projection, and slots that hold adapters."""

    x: Tensor
    y: Tensor
    pointers: LoRAMapping
    shelf: StackedLoRAWeights

    def added(self, kernels: Ops, tokens: slice = slice(None)) -> Tensor:
        """Return the outputs of some tokens, computed without the others."""
        y = self.y[tokens].clone()
        kernels.apply_lora(
            self.x[tokens],
            y,
            LoRAMapping(self.pointers.slots[tokens], self.pointers.ranks),
            self.shelf,
            1,
        )
        return y

    def on(self, device: torch.device) -> AdapterCase:
        pointers = LoRAMapping(self.pointers.slots.to(device), self.pointers.ranks.to(device))
        shelf = StackedLoRAWeights(
            self.shelf.a.to(device), self.shelf.b.to(device), self.shelf.ends
        )
        return AdapterCase(self.x.to(device), self.y.to(device), pointers, shelf)


@st.composite
def adapted(draw: st.DrawFn) -> AdapterCase:
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
        # As in a pass that reads prompts: many consecutive tokens of one slot.
        pointed = (
            pointed[:1].expand(tokens).contiguous()
            if draw(st.booleans())
            else pointed.sort().values
        )
    return AdapterCase(
        random(chance, tokens, inputs, dtype=dtype),
        random(chance, tokens, sum(widths), dtype=dtype),
        LoRAMapping(pointed, torch.tensor([0, *ranks], dtype=torch.int32)),
        StackedLoRAWeights(a.flatten(2, 3), b, tuple(np.cumsum(widths).tolist())),
    )


@dataclass(frozen=True)
class RowsCase:
    """Rows of a batch: their keys and values, and the blocks that hold them."""

    rows: list[tuple[Tensor, Tensor]]
    table: Tensor
    heads: int
    window: int
    softcap: float
    chance: torch.Generator

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(float(self.rows[0][0].shape[-1] ** -0.5), self.softcap, self.window)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(k) for k, _ in self.rows], dtype=torch.int32)

    def queries(self, count: int) -> Tensor:
        k, _ = self.rows[0]
        return random(self.chance, count, self.heads, k.shape[-1], dtype=k.dtype)

    def pool(self, device: torch.device) -> KVLayer:
        _, kv_heads, dim = self.rows[0][0].shape
        size, dtype = int(self.table.max()) + 1, self.rows[0][0].dtype
        # Stale contents of other and former rows are larger than any valid value.
        keys = torch.full((size, kv_heads, dim, KV_BLOCK_SIZE), 50.0, dtype=dtype)
        values = torch.full((size, kv_heads, KV_BLOCK_SIZE, dim), 50.0, dtype=dtype)
        for row, (k, v) in enumerate(self.rows):
            spots = torch.arange(len(k))
            writes = (
                self.table[row][spots // KV_BLOCK_SIZE].long() * KV_BLOCK_SIZE
                + spots % KV_BLOCK_SIZE
            )
            PLAIN.write_kv(k, v, KVLayer(keys, values), AttentionMetadata(writes, writes, writes))
        return KVLayer(keys.to(device), values.to(device))

    def attended(
        self, kernels: Ops, device: torch.device, q: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """Return the attention of the last tokens of some rows, computed without the other rows."""
        lengths = self.lengths[rows]
        table = self.table[rows, : -(-int(lengths.max()) // KV_BLOCK_SIZE)].contiguous()
        places = AttentionMetadata(
            torch.tensor([0], device=device), table.to(device), lengths.to(device)
        )
        return kernels.paged_attention(
            q[rows].to(device), self.pool(device), places, self.params
        ).cpu()

    def read(self, kernels: Ops, device: torch.device, q: Tensor, length: int) -> Tensor:
        """Return the attention of tokens of the first row that end at token ``length - 1``."""
        chunk = PrefillChunk(0, len(q), length, self.table[0].to(device))
        return kernels.prefill_attention(q.to(device), self.pool(device), chunk, self.params).cpu()

    def expected(self, q: Tensor, row: int, length: int) -> Tensor:
        """Return the expected attention of a row's token ``length - 1``."""
        k, v = self.rows[row]
        window_slice = slice(max(0, length - self.window) if self.window else 0, length)
        return attention(q[None], k[window_slice], v[window_slice], None, self.params)[0]


@st.composite
def batches(draw: st.DrawFn) -> RowsCase:
    chance, dtype = (
        torch.Generator().manual_seed(draw(st.integers(0, 2**31))),
        draw(st.sampled_from(DTYPES)),
    )
    # Some are long. A GPU reads those in parts.
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
    return RowsCase(
        rows=rows,
        table=blocks.view(len(lengths), longest),
        heads=heads,
        window=draw(st.sampled_from([0, 1, 7, 40])),
        softcap=draw(st.sampled_from([0.0, 2.0])),
        chance=chance,
    )


def random(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=generator).to(dtype)


def assert_near(found: Tensor, expected: Tensor) -> None:
    rough = found.dtype == torch.bfloat16
    torch.testing.assert_close(
        found, expected, rtol=2e-2 if rough else 1e-4, atol=5e-2 if rough else 1e-4
    )


@few
@given(case=adapted())
def test_each_token_gets_the_output_of_its_own_slot(fast: FastOps, case: AdapterCase) -> None:
    expected = case.added(PLAIN)
    found = case.on(fast.device).added(fast.of[case.x.dtype]).cpu()
    assert_near(found, expected)
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
def test_keys_and_values_are_written_to_their_positions_only(
    fast: FastOps, seed: int, dtype: torch.dtype, tokens: int, heads: int, dim: int
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
            k.to(device),
            v.to(device),
            KVLayer(keys, values),
            AttentionMetadata(there, there, there),
        )
        pools.append((keys.cpu(), values.cpu()))
    assert all(torch.equal(*both) for both in zip(*pools, strict=True))


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    dim=st.sampled_from([8, 12, 64]),
)
def test_rotated_queries_and_keys_have_the_bits_of_torch(
    fast: FastOps, seed: int, dtype: torch.dtype, tokens: int, heads: tuple[int, int], dim: int
) -> None:
    chance = torch.Generator().manual_seed(seed)
    shape = Heads(*heads, dim, 1.0, 0)
    wide = random(chance, tokens, (heads[0] + 2 * heads[1]) * dim + 7, dtype=dtype)
    tables = [random(chance, tokens, dim, dtype=dtype) for _ in range(2)]
    writes = torch.randperm(3 * KV_BLOCK_SIZE, generator=chance)[:tokens]
    results = []
    for kernels, device in ((PLAIN, torch.device("cpu")), (fast.of[dtype], fast.device)):
        keys = torch.full((3, heads[1], dim, KV_BLOCK_SIZE), 7.0, dtype=dtype, device=device)
        values = torch.full((3, heads[1], KV_BLOCK_SIZE, dim), 7.0, dtype=dtype, device=device)
        cos, sin = (table.to(device) for table in tables)
        there = writes.to(device)
        metadata = AttentionMetadata(there, there, there)
        qkv = wide.to(device)[:, 7:]
        q = kernels.rotate_and_write_kv(qkv, cos, sin, shape, KVLayer(keys, values), metadata)
        results.append((q.cpu(), keys.cpu(), values.cpu()))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


@few
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 700),
    inputs=st.integers(1, 60),
    outputs=st.integers(1, 90),
    bias=st.booleans(),
    cut=st.integers(1, 699),
)
def test_products_of_our_own_are_right_and_have_the_same_bits_in_any_batch(
    natives: dict[torch.dtype, Ops],
    seed: int,
    rows: int,
    inputs: int,
    outputs: int,
    bias: bool,
    cut: int,
) -> None:
    matmul = natives[torch.bfloat16].matmul
    if matmul is None:
        pytest.skip("the processor has no AMX")
    chance = torch.Generator().manual_seed(seed)
    x, weight = (random(chance, n, 32 * inputs, dtype=torch.bfloat16) for n in (rows, outputs))
    added = random(chance, outputs, dtype=torch.bfloat16) if bias else None
    packed = matmul.pack(weight)
    assert torch.equal(matmul.unpack(packed, outputs), weight)
    found = matmul(x, packed, added, outputs)
    expected = torch.nn.functional.linear(
        x.float(), weight.float(), None if added is None else added.float()
    )
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=0.1)
    with limit_threads(2):
        parts = [matmul(part, packed, added, outputs) for part in (x[:cut], x[cut:]) if len(part)]
        columns = x.t().contiguous().t()
        assert torch.equal(matmul(columns, packed, added, outputs), found)
    assert torch.equal(torch.cat(parts), found)


@few
@given(rows=batches())
def test_a_token_attends_to_its_own_row_only(fast: FastOps, rows: RowsCase) -> None:
    q = rows.queries(len(rows.rows))
    expected = torch.stack(
        [rows.expected(q[row], row, len(k)) for row, (k, _) in enumerate(rows.rows)]
    )
    assert_near(rows.attended(PLAIN, torch.device("cpu"), q), expected)
    assert_near(rows.attended(fast.of[q.dtype], fast.device, q), expected)


@few
@given(rows=batches(), count=st.integers(1, 40), short=st.integers(0, 40))
def test_a_prompt_token_attends_to_the_tokens_before_it(
    fast: FastOps, rows: RowsCase, count: int, short: int
) -> None:
    length = max(1, len(rows.rows[0][0]) - short)
    q = rows.queries(min(count, length))
    expected = torch.stack(
        [rows.expected(q[at], 0, length - len(q) + at + 1) for at in range(len(q))]
    )
    assert_near(rows.read(PLAIN, torch.device("cpu"), q, length), expected)
    assert_near(rows.read(fast.of[q.dtype], fast.device, q, length), expected)


@fewer
@given(case=adapted(), rows=batches(), count=st.integers(2, 40), cut=st.integers(1, 39))
def test_other_rows_of_the_pass_change_no_bit(
    fast: FastOps, case: AdapterCase, rows: RowsCase, count: int, cut: int
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
@given(rows=batches(), count=st.integers(1, 40), short=st.integers(0, 40))
def test_a_prompt_token_has_the_bits_of_a_decoded_one(
    fast: FastOps, rows: RowsCase, count: int, short: int
) -> None:
    k, v = rows.rows[0]
    length = max(1, len(k) - short)
    q = rows.queries(min(count, length))
    kernels = fast.of[q.dtype]
    cut = replace(rows, rows=[(k[:length], v[:length])], table=rows.table[:1])
    decoded = cut.attended(kernels, fast.device, q[-1:])
    assert torch.equal(rows.read(kernels, fast.device, q, length)[-1:], decoded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trial_shows_whether_bits_depend_on_the_batch(
    fast: FastOps, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = fast.of[dtype]
    assert kernels.batch_invariant
    assert not depends_on_batch(kernels)
    decode = kernels.paged_attention
    monkeypatch.setattr(kernels, "paged_attention", lambda *args: 1.01 * decode(*args))
    assert depends_on_batch(kernels)


@few
@given(
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from(DTYPES),
    tokens=st.integers(1, 5),
    size=st.integers(1, 70),
)
def test_norms_match_the_model(
    fast: FastOps, seed: int, dtype: torch.dtype, tokens: int, size: int
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
def test_argmax_returns_the_first_maximum(
    fast: FastOps, seed: int, dtype: torch.dtype, rows: int, size: int, kinds: int
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
def test_packed_weights_are_the_source_times_its_factor(
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
def test_packing_detects_non_finite_values(
    natives: dict[torch.dtype, Ops], dtype: torch.dtype, bad: float
) -> None:
    source = np.ones((2, 3, 70), np.float32)
    source[1, 2, 69] = bad
    for kernels in (PLAIN, natives[dtype]):
        assert not kernels.pack_weights(source, torch.empty(2, 3, 70, dtype=dtype), 1.0)
        assert not kernels.pack_weights(
            np.full((1, 1, 2), 3e38, np.float32), torch.empty(1, 1, 2, dtype=dtype), 100.0
        )


def test_without_a_compiler_the_reference_operations_serve_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    kernels, why = choose_ops(torch.device("cpu"), torch.float32, tmp_path)
    assert type(kernels) is Ops
    assert "C++" in why


@pytest.mark.exhaustive
def test_a_damaged_library_in_the_cache_is_rebuilt(
    natives: dict[torch.dtype, Ops], tmp_path: Path
) -> None:
    CpuOps(tmp_path, torch.float32)
    libraries = list(tmp_path.rglob("*.so"))
    assert libraries
    for built in libraries:
        built.unlink()  # Not overwritten: this process still runs the former library.
        built.write_bytes(b"half a file")
    assert CpuOps(tmp_path, torch.float32).rms_norm(
        torch.ones(1, 4), torch.ones(4), 0.0
    ).tolist() == [[1.0] * 4]
    for built in libraries:
        assert {path.name for path in built.parent.iterdir()} == {built.name, "compiling.lock"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_the_reference_operations_serve_with_a_reason() -> None:
    kernels, why = choose_ops(torch.device("cuda"), torch.bfloat16, None)
    assert type(kernels) is Ops
    assert "Triton" in why


@pytest.mark.exhaustive
def test_a_gpu_kernel_that_gives_wrong_results_is_named_and_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from personalpeft.backends.torch.ops import triton_kernels
    from personalpeft.backends.torch.ops.triton_ops import try_triton_ops

    class WritesNothing:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: None

    device = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
    try_triton_ops(device, torch.float32)
    monkeypatch.setattr(triton_kernels, "write_kv", WritesNothing())
    with pytest.raises(NoKernels, match="write_kv"):
        try_triton_ops(device, torch.float32)


@pytest.mark.exhaustive
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    # In a child process, since this one interprets; the compiler refuses code that the interpreter
    # runs.
    script = Path(__file__).with_name("compile_for_h100.py")
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

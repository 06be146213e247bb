"""What must hold on a GPU, tried without one: nothing waits that need not.

Torch's meta device stands for it. Its tensors have a shape and no numbers. So code that reads a
number from the device, and waits for it, raises an error here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from backend_makers import attach, random_stack, row, session_spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from personalpeft.adapters.types import Matrix
from personalpeft.backends.base import Backend, TrainingBackend
from personalpeft.backends.torch import backend as torch_backend
from personalpeft.backends.torch import host_to_device, model_runner
from personalpeft.backends.torch.device import DeviceChoice, choose_learning_device
from personalpeft.backends.torch.host_to_device import InputBuffer, to_device
from personalpeft.backends.torch.llama import empty_llama
from personalpeft.backends.torch.lora_bank import LoRABank, default_slots
from personalpeft.backends.torch.ops import Ops
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE
from personalpeft.backends.torch.training.session import TorchSession
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput
from personalpeft.settings import LEARNING_DEVICE, resolve

DEVICE = torch.device("meta")
GIB = 2**30


class ShapeOps(Ops):
    """Operations that give results of the right shape and device, and wait for nothing."""

    def pack_weights(self, source: Matrix, target: Tensor, factor: float) -> bool:
        return True

    def apply_lora(self, x: Tensor, y: Tensor, *rest: Any) -> None:
        assert x.device == y.device == DEVICE

    def write_kv(self, k: Tensor, v: Tensor, *rest: Any) -> None: ...

    def paged_attention(self, q: Tensor, *rest: Any) -> Tensor:
        return torch.empty_like(q)

    def prefill_attention(self, q: Tensor, *rest: Any) -> Tensor:
        return torch.empty_like(q)


class Recorder(TorchDispatchMode):
    """Records each operation with its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, list[Tensor], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
        self.calls.append((str(func), tensors, result))
        return result

    @property
    def transfers(self) -> int:
        """How many copies went from the processor to the device."""
        return sum(
            isinstance(result, Tensor)
            and result.device == DEVICE
            and any(t.device.type == "cpu" and t.dim() for t in tensors)
            for _, tensors, result in self.calls
        )


def fake_gpu(patch: pytest.MonkeyPatch, free: int = 100 * GIB) -> None:
    """Have torch report a GPU with so many free bytes."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda *device: "a GPU")
    patch.setattr(torch.cuda, "mem_get_info", lambda *device: (free, 2 * free))


@pytest.fixture
def backend(tiny_base: Base, monkeypatch: pytest.MonkeyPatch) -> torch_backend.TorchBackend:
    """The backend on the device, with room for four adapters."""
    monkeypatch.setattr(model_runner, "load_llama", lambda folder, dtype: empty_llama(folder))
    monkeypatch.setattr(
        torch_backend, "choose_ops", lambda device, dtype, cache: (ShapeOps(device, dtype), "")
    )
    where = DeviceChoice(DEVICE, torch.float32, "for tests")
    return torch_backend.TorchBackend(tiny_base, slots=4, rows=4, where=where)


def test_a_step_reads_the_device_once_and_copies_its_inputs_once(
    backend: torch_backend.TorchBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Tensor] = []
    tolist = torch.Tensor.tolist

    def counted(tensor: Tensor) -> Any:
        if tensor.device != DEVICE:
            return tolist(tensor)
        reads.append(tensor)
        return np.full(tuple(tensor.shape), 65).tolist()

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    attach(backend, "one", random_stack(backend, 1))
    backend.admit(row(backend, "a greedy one", "one", temperature=0.0))
    backend.admit(row(backend, "drawn", temperature=0.8, top_p=0.9, top_k=40, seed=3))
    backend.admit(row(backend, "with log-probs", temperature=0.8, logprobs=True))
    for _ in range(3):
        reads.clear()
        with Recorder() as recorder:
            assert len(backend.step()) == 3
        assert len(reads) == 1
        # The pass; the draws, and which rows report log-probs.
        assert recorder.transfers == 2


def test_a_resumed_session_has_all_that_a_step_reads_on_the_device(
    backend: torch_backend.TorchBackend, torch_tiny: TrainingBackend
) -> None:
    session = torch_tiny.session(session_spec(torch_tiny))
    state = session.state()
    session.close()
    resumed = cast(TorchSession, backend.session(session_spec(backend)))
    resumed.restore(state)
    gradients = {
        name: torch.zeros(array.shape, device=DEVICE)
        for name, array in state.items()
        if name.endswith((".A", ".B"))
    }
    resumed.add_gradients(gradients)
    # Without numbers the step cannot be taken to its end.
    with Recorder() as recorder, suppress(RuntimeError):
        resumed.optim_step(resumed.default_params(1e-3))
    read = [tensor for _, tensors, _ in recorder.calls for tensor in tensors]
    assert any(tensor.dim() == 0 for tensor in read)
    assert {tensor.device for tensor in read} == {DEVICE}


def test_an_adapter_is_copied_on_a_stream_of_its_own_and_used_once_it_is_there(
    tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            assert device == DEVICE

        def wait_stream(self, other: str) -> None:
            events.append(f"waits for {other}")

        def synchronize(self) -> None:
            with pytest.raises(KeyError):
                bank.slot_of("one")
            events.append("synchronized")

    @contextmanager
    def stream(own: Stream) -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "steps")
    with monkeypatch.context() as patch:
        patch.setattr(host_to_device, "can_pin", lambda device: True)
        bank = LoRABank(tiny_base.architecture, 4, ShapeOps(DEVICE, torch.bfloat16))
    stack = random_stack(cast(Backend, SimpleNamespace(base=tiny_base)), 1)
    bank.fill_slot("one", bank.stage(stack))
    assert events == ["waits for steps", "begins", "ends", "synchronized"]
    assert bank.slot_of("one")


def test_a_gpu_holds_as_many_tokens_as_its_free_memory_allows(
    backend: torch_backend.TorchBackend, tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = SimpleNamespace(
        where=DeviceChoice(torch.device("cuda"), torch.float32, "for tests"),
        base=tiny_base,
        module=SimpleNamespace(config=backend._model.module.config),
    )
    blocks = {}
    for free in (2**22, 2**24, 2**40):
        fake_gpu(monkeypatch, free)
        blocks[free] = torch_backend.default_num_blocks(model, 64)
    assert 3.9 < blocks[2**24] / blocks[2**22] < 4.1
    # Not more than all rows can use.
    assert blocks[2**40] * KV_BLOCK_SIZE == 64 * tiny_base.card.context


def test_each_row_on_a_gpu_may_have_a_stack_of_its_own_as_far_as_memory_allows(
    tiny_base: Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = DeviceChoice(torch.device("cuda"), torch.bfloat16, "for tests")
    found = []
    for free in (2**20, 2**26, 2**40):
        fake_gpu(monkeypatch, free)
        found.append(default_slots(tiny_base.architecture, gpu, 128))
    assert found[0] == 32 < found[1] < found[2] == 128
    assert default_slots(tiny_base.architecture, gpu, 2) == 32
    on_cpu = DeviceChoice(torch.device("cpu"), torch.bfloat16, "for tests")
    assert default_slots(tiny_base.architecture, on_cpu, 128) == 32


@pytest.mark.parametrize(
    ("mode", "weights", "free", "device"),
    [
        ("auto", "auto", 40 * GIB, "cuda"),
        ("auto", "auto", GIB, "cpu"),
        ("auto", "mapped", 40 * GIB, "cpu"),
        ("cpu", "auto", 40 * GIB, "cpu"),
        ("cuda", "auto", GIB, "cuda"),
    ],
)
def test_learning_beside_another_backend_takes_a_gpu_that_has_the_memory(
    monkeypatch: pytest.MonkeyPatch,
    mode: Any,
    weights: Any,
    free: int,
    device: str,
) -> None:
    fake_gpu(monkeypatch, free)
    where = choose_learning_device(1 << 20, mode, weights)
    assert where.device.type == device
    # Why it is not the GPU, beside what builds record.
    assert bool(where.note) == (device == "cpu")
    assert where.note not in where.reason or not where.note


def test_a_gpu_that_is_not_there_is_refused_by_name() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidInput) as caught:
        choose_learning_device(1 << 20, "cuda")
    assert "LEARNING_DEVICE" in (caught.value.hint or "")
    assert choose_learning_device(1 << 20).device.type == "cpu"


def test_the_learning_device_comes_from_the_environment() -> None:
    assert resolve("home", {}).learning_device == "auto"
    assert resolve("home", {LEARNING_DEVICE: "cpu"}).learning_device == "cpu"
    with pytest.raises(InvalidInput, match=LEARNING_DEVICE):
        resolve("home", {LEARNING_DEVICE: "gpu"})


def test_one_transfer_carries_arrays_of_any_kind_and_shape() -> None:
    arrays: list[npt.NDArray[Any]] = [
        np.arange(5, dtype=np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3)[:, ::2],
        np.zeros((0, 4), np.int32),
        np.array([[0.5]]),
    ]
    # A GPU whose memory is this one.
    for array, tensor in zip(arrays, InputBuffer(arrays, torch.device("cpu")).tensors, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.numpy().dtype == array.dtype
        assert tensor.data_ptr() % 16 == 0 or not array.size
    with Recorder() as recorder:
        moved = to_device(arrays, DEVICE)
    assert [(each.shape, each.device) for each in moved] == [
        (each.shape, DEVICE) for each in arrays
    ]
    assert recorder.transfers == 1

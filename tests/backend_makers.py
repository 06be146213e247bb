"""Small backends for many requests, adapters with visible effects, and collected output."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pytest

from personalpeft.adapters.compose import compose
from personalpeft.adapters.types import Adapter, AdapterStack, LoRAWeights, Manifest
from personalpeft.backends.base import Backend, Continuation, Session, SessionSpec
from personalpeft.backends.sequence import OutputChunk, Request, SequenceState
from personalpeft.base_models.types import Base
from personalpeft.learning.train.losses import DPOLoss, SFTLoss
from personalpeft.types import FinishReason, Message, Sampling, Stack

if TYPE_CHECKING:
    from personalpeft.backends.torch.device import DeviceChoice

T = TypeVar("T")


def torch_backend(base: Base, **more: Any) -> Backend:
    """Use float32, where batching changes results so little that greedy tokens are equal."""
    from personalpeft.backends.torch.backend import TorchBackend

    return TorchBackend(base, where=device_choice("float32"), **more)


def device_choice(dtype: str) -> DeviceChoice:
    """Return the device that tests run on: a CPU, or a GPU with ``PERSONALPEFT_TEST_DEVICE=cuda``."""
    import torch

    from personalpeft.backends.torch.device import DeviceChoice

    device = torch.device(os.environ.get("PERSONALPEFT_TEST_DEVICE", "cpu"))
    return DeviceChoice(device, getattr(torch, dtype), "for tests")


def llamacpp_backend(base: Base, cache: Path, **more: Any) -> Backend:
    """Write the base's weights to a GGUF file in their own precision, and open it."""
    from personalpeft.backends.llamacpp.backend import LlamaCppBackend

    return LlamaCppBackend(base, cache=cache, **{"threads": 1, **more})


def fake_backend(**more: Any) -> Backend:
    from personalpeft.backends.fake import FakeBackend, fake_base

    return FakeBackend(fake_base(), **more)


def base_logprobs(backend: Backend) -> tuple[Any, ...]:
    """Return what the bare base says of some texts, to the bit. It shows a change of its weights."""
    texts = (("hello", " there, how are you?"), ("1, 2, 3", ", 4, 5, 6"), ("Ünï", "cödé \n\t!"))
    items = [Continuation(backend.encode(a), backend.encode(b)) for a, b in texts]
    scores = backend.score(items, None, top=50)
    return tuple((score.token_logprobs, score.top_logprobs) for score in scores)


def random_adapter(
    backend: Backend, seed: int, *, rank: int = 2, size: float = 0.5, layer: str = "style"
) -> Adapter:
    """Return an adapter with random matrices that are large enough to change the output."""
    random = np.random.default_rng(seed)
    architecture = backend.base.architecture
    pairs = {
        name: LoRAWeights(
            random.standard_normal((architecture.blocks, rank, inputs), dtype=np.float32) * size,
            random.standard_normal((architecture.blocks, outputs, rank), dtype=np.float32) * size,
        )
        for name, (inputs, outputs) in architecture.projections.items()
    }
    targets = tuple(sorted(pairs))
    manifest = Manifest(backend.base.digest, layer, rank, 0.5, targets, {"rank": rank}, "12" * 32)
    return Adapter(manifest, pairs)


def random_stack(backend: Backend, seed: int, *, rank: int = 2, size: float = 0.5) -> AdapterStack:
    return compose([(random_adapter(backend, seed, rank=rank, size=size), 1.0)])


def row(
    backend: Backend,
    prompt: str,
    stack: str | None = None,
    *,
    owner: str = "ada",
    logprobs: bool = False,
    **sampling: Any,
) -> SequenceState:
    tokens = backend.render([Message("user", prompt)])
    return sequence(tokens, stack, Sampling(**{"max_tokens": 12, **sampling}), owner, logprobs)


def sequence(
    tokens: Sequence[int],
    stack: str | None = None,
    sampling: Sampling = Sampling(),
    owner: str = "ada",
    logprobs: bool = False,
) -> SequenceState:
    """Return a sequence of tokens on an attached stack."""
    request = Request(owner, (), Stack(""), sampling, logprobs=logprobs)
    return SequenceState(request, tuple(tokens), stack)


def with_request(row: SequenceState, **changes: Any) -> SequenceState:
    """Return a row whose request differs in some fields."""
    return replace(row, request=replace(row.request, **changes))


def attach(backend: Backend, key: str, stack: AdapterStack) -> None:
    """Stage a stack and attach it."""
    backend.attach(key, backend.stage(stack))


@dataclass
class Output:
    """The output of one row as it came."""

    pieces: list[str] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    finish: FinishReason | None = None
    top: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, piece: OutputChunk) -> None:
        assert self.finish is None, "a row went on after its end"
        self.pieces.append(piece.text)
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs[: len(piece.tokens)]
        self.top += piece.top_logprobs
        self.finish = piece.finish


class Batch:
    """Rows in a batch and their output so far, in the order of joining."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._replies: dict[int, Output] = {}
        self._rows: dict[int, SequenceState] = {}

    def join(self, row: SequenceState) -> Output:
        # A copy, since tests submit the same row again.
        row = replace(row)
        number = self._backend.admit(row)
        assert number is not None, "no room"
        assert number not in self._replies, "a number was used again"
        self._rows[number] = row
        return self._replies.setdefault(number, Output())

    def leave(self, reply: Output) -> None:
        number = self._number(reply)
        self._backend.remove(number)
        if reply.finish is None:
            reply.add(self._rows[number].finish("cancelled"))

    def preempt(self, reply: Output) -> Callable[[], bool]:
        """Remove a row, and return a function that resumes it.

        The function returns False where there is no room.
        """
        number = self._number(reply)
        row = self._rows[number]
        self._backend.remove(number)
        assert reply.finish is not None or row.output_tokens == reply.tokens

        def resume() -> bool:
            if reply.finish is not None:
                return True
            again = self._backend.admit(row)
            if again is not None:
                self._rows[again] = self._rows.pop(number)
                self._replies[again] = self._replies.pop(number)
            return again is not None

        return resume

    def abandon(self) -> None:
        """Remove every row. Hypothesis may end an example at any draw."""
        for number in self._rows:
            self._backend.remove(number)

    def _number(self, reply: Output) -> int:
        return next(number for number, known in self._replies.items() if known is reply)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for piece in self._backend.step():
                if piece.error is not None:
                    self._backend.remove(piece.index)
                    raise piece.error
                self._replies[piece.index].add(piece)

    def finish(self) -> None:
        while self._backend.occupancy().num_sequences:
            self.step()
        assert all(reply.finish for reply in self._replies.values())
        self._backend.check_integrity()


def generate(backend: Backend, rows: Sequence[SequenceState]) -> tuple[Output, ...]:
    """Return the outputs, after a check that the last chunk of each row finishes it exactly once."""
    writing = Batch(backend)
    replies = tuple(writing.join(row) for row in rows)
    writing.finish()
    return replies


def continuation(backend: Backend, prompt: str, completion: str) -> Continuation:
    return Continuation(
        backend.render([Message("user", prompt)]), backend.encode(completion) + backend.end_of_turn
    )


def session_spec(backend: Backend, **changes: Any) -> SessionSpec:
    targets = tuple(sorted(backend.base.architecture.projections))
    return SessionSpec(
        **{"rank": 2, "scaling": 4.0, "target_modules": targets, "seed": 5, **changes}
    )


def training_steps(backend: Backend, count: int) -> list[list[Any]]:
    """Return the losses of so many training steps, with SFT and DPO in each."""
    steps: list[list[Any]] = []
    for number in range(count):
        wanted = continuation(backend, f"question {number % 3}", "Ahoy!")
        refused = continuation(backend, f"question {number % 3}", "Hello.")
        steps.append([SFTLoss(wanted, 0.5), DPOLoss(wanted, refused, 0.1, 0.5)])
    return steps


def train(
    session: Session, steps: Sequence[Sequence[Any]], *, done: int = 0, rate: float = 1e-2
) -> None:
    """Take the steps from ``done`` on.

    As in a learn, reference log-probs are computed for all steps.
    """
    session.precompute_ref_log_probs([term for terms in steps for term in terms])
    for terms in steps[done:]:
        session.step(terms, rate)


def bytes_of(session: Session) -> bytes:
    """Return the bytes of all weights that the session would make an adapter of."""
    return b"".join(
        name.encode() + pair.a.tobytes() + pair.b.tobytes()
        for name, pair in sorted(session.weights().items())
    )


def base_with_merges(folder: Path, change: Callable[[Any], None] = lambda tokenizer: None) -> Base:
    """Return a tiny random Qwen 2 whose tokenizer merges letters.

    Like real ones it has more embeddings than tokens. ``change`` may modify the tokenizer.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM

    from personalpeft.base_models.resolve import resolve_base
    from personalpeft.base_models.types import ModelCard, Source

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, the cat"] * 9, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")]
    )
    change(tokenizer)
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=tokenizer.get_vocab_size() + 20,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "weights")
    tokenizer.save(str(folder / "weights" / "tokenizer.json"))
    card = ModelCard(
        name="with-merges",
        title="One with merges",
        licence="Apache-2.0",
        source=Source("folder", path=folder / "weights"),
        targets=("q_proj", "v_proj"),
        context=256,
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        stop_tokens=("<|im_end|>",),
    )
    return resolve_base(card, cache=folder / "cache")


def generate_uncached(backend: Backend, row: SequenceState) -> Output:
    """Return a row's output alone, with an empty cache."""
    backend.clear_cache()
    return generate(backend, [row])[0]


def generate_staggered(
    backend: Backend, rows: Sequence[SequenceState], steps: Sequence[int]
) -> list[Output]:
    """Return the outputs of rows that each join so many steps after the previous one.

    A joining row interrupts the prompts of the others.
    """
    writing = Batch(backend)
    replies = []
    for each, count in zip(rows, steps, strict=True):
        replies.append(writing.join(each))
        writing.step(count)
    writing.finish()
    return replies


def in_thread(work: Callable[..., T], *given: Any) -> Future[T]:
    """Call a function in a thread of its own, which does not outlive a test that hangs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work(*given))
        except Exception as error:  # noqa: BLE001
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def bits(reply: Output) -> tuple[tuple[int, ...], bytes]:
    """Return what must be equal: the tokens, and each bit of their log-probs."""
    return reply.tokens, np.array(reply.logprobs).tobytes()


def hold_steps(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the steps of the fake model wait while the returned event is not set."""
    from personalpeft.backends.fake import FakeBackend

    allowed, plain = threading.Event(), FakeBackend.step

    def step(backend: FakeBackend) -> Sequence[OutputChunk]:
        assert allowed.wait(60)
        return plain(backend)

    monkeypatch.setattr(FakeBackend, "step", step)
    return allowed


INSTRUCTION_SETS: dict[str, tuple[str, dict[str, str]]] = {
    "avx2": (
        "avx2",
        {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "PERSONALPEFT_KERNELS": "avx2",
        },
    ),
    "avx512": ("avx512vl", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "PERSONALPEFT_KERNELS": "avx512"}),
    "avx512_bf16": ("avx512_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}),
    "amx": ("amx_bf16", {}),
}
"""The flag that a processor with these instructions has, and what keeps the libraries to them."""

"""The bare base's log-probs of general replies are cached per base, complete and free of user data."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from backend_makers import attach, bytes_of, continuation, random_stack, session_spec, torch_backend

from personalpeft.backends.base import Backend, Loss
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.packing import PackedSequence
from personalpeft.base_models.types import Base
from personalpeft.learning.train.losses import ContextDistillationLoss, DPOLoss, KLRegularizer


@pytest.fixture
def cache(tmp_path: Path, shared_cache: Path, torch_tiny: Backend) -> Path:
    """A cache with only the kernels that ``torch_tiny`` compiled, since compiling takes long."""
    place = tmp_path / "cache"
    place.mkdir()
    if (shared_cache / "kernels").is_dir():
        shutil.copytree(shared_cache / "kernels", place / "kernels")
    return place


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of continuations of each pass without gradients."""
    seen: list[int] = []
    hidden = ModelRunner.hidden

    def counted(self: ModelRunner, packed: PackedSequence) -> object:
        if not torch.is_grad_enabled():
            seen.append(len(packed.reads))
        return hidden(self, packed)

    monkeypatch.setattr(ModelRunner, "hidden", counted)
    return seen


def anchors(backend: Backend, count: int = 3) -> list[Loss]:
    terms: list[Loss] = []
    for number in range(count):
        terms.append(KLRegularizer(continuation(backend, f"Where is {number}?", "Here it is.")))
    return terms


def trained_bytes(
    base: Base, cache: Path | None, terms: Sequence[Loss] | None = None, *, below: str | None = None
) -> bytes:
    """Return the bytes after three steps on a backend of its own, as another process would have."""
    backend = torch_backend(base, cache=cache)
    attach(backend, "one", random_stack(backend, 3))
    session = backend.session(session_spec(backend, base_key=below))
    session_terms = anchors(backend) if terms is None else terms
    session.precompute_ref_log_probs(session_terms)
    for _ in range(3):
        session.step(session_terms, 1e-2)
    return bytes_of(session)


def kept(cache: Path) -> list[Path]:
    return list((cache / "generic").glob("*"))


def test_the_next_process_reads_the_cache_and_trains_the_same_bytes(
    tiny_base: Base, cache: Path, reads: list[int]
) -> None:
    first = trained_bytes(tiny_base, cache)
    assert sum(reads) == 3
    reads.clear()
    assert trained_bytes(tiny_base, cache) == first
    assert reads == []


def test_without_a_cache_folder_the_process_still_reads_once(
    tiny_base: Base, reads: list[int]
) -> None:
    backend = torch_backend(tiny_base)
    for _ in range(2):
        reads.clear()
        session = backend.session(session_spec(backend))
        session.precompute_ref_log_probs(anchors(backend))
        session.close()
    assert reads == []


def test_further_questions_are_added_to_the_cache(
    tiny_base: Base, cache: Path, reads: list[int]
) -> None:
    backend = torch_backend(tiny_base, cache=cache)
    for count, more in ((2, 2), (3, 1), (3, 0)):
        reads.clear()
        trained_bytes(tiny_base, cache, anchors(backend, count))
        assert sum(reads) == more


def test_user_texts_and_replies_of_stacks_are_not_cached(tiny_base: Base, cache: Path) -> None:
    backend = torch_backend(tiny_base, cache=cache)
    mine, other = (
        continuation(backend, "My door?", "The code is 4711."),
        continuation(backend, "My door?", "It is open."),
    )
    trained_bytes(
        tiny_base, cache, [DPOLoss(mine, other, 0.1, 1.0), ContextDistillationLoss(mine, mine)]
    )
    trained_bytes(tiny_base, cache, below="one")
    assert kept(cache) == []


def test_a_text_that_a_user_also_sent_is_not_cached(tiny_base: Base, cache: Path) -> None:
    """A text in both a general term and a user's own term is not kept for others."""
    backend = torch_backend(tiny_base, cache=cache)
    (generic,) = anchors(backend, 1)
    (words,) = generic.references
    trained_bytes(tiny_base, cache, [generic, ContextDistillationLoss(words, words)])
    assert kept(cache) == []


@pytest.mark.parametrize("harm", ["half", "one bit", "empty", "something else"])
def test_an_incomplete_file_is_computed_again(
    tiny_base: Base, cache: Path, reads: list[int], harm: str
) -> None:
    first = trained_bytes(tiny_base, cache)
    (file,) = kept(cache)
    whole = file.read_bytes()
    one_bit = bytearray(whole)
    one_bit[-1] ^= 1
    file.write_bytes(
        {"half": whole[: len(whole) // 2], "one bit": bytes(one_bit), "empty": b""}.get(
            harm, b"\0" * 99
        )
    )
    reads.clear()
    assert trained_bytes(tiny_base, cache) == first
    assert sum(reads) == 3
    assert file.read_bytes() == whole


def test_an_unwritable_cache_is_ignored(tiny_base: Base, cache: Path) -> None:
    first = trained_bytes(tiny_base, cache)
    (file,) = kept(cache)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder would be")
    assert trained_bytes(tiny_base, cache) == first

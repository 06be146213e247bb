"""What the bare base says of generic answers is read once a cache; only what is whole and nobody's is kept, and it is the
same to the byte.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from backend_makers import after, attach, bytes_of, composed, spec, torch_backend

from personalpeft.backends.base import Backend, Continuation, Loss
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.packing import PackedSequence
from personalpeft.base_models.types import Base
from personalpeft.learning.train.losses import ContextDistillationLoss, DPOLoss, KLRegularizer


@pytest.fixture
def cache(tmp_path: Path, shared_cache: Path, torch_tiny: Backend) -> Path:
    """Make a cache with nothing but the kernels that ``torch_tiny`` compiled, which takes long."""
    place = tmp_path / "cache"
    place.mkdir()
    if (shared_cache / "kernels").is_dir():
        shutil.copytree(shared_cache / "kernels", place / "kernels")
    return place


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass without a gradient read."""
    seen: list[int] = []
    hidden = ModelRunner.hidden

    def counted(self: ModelRunner, packed: PackedSequence) -> object:
        if self.context.training is None:
            seen.append(len(packed.tokens))
        return hidden(self, packed)

    monkeypatch.setattr(ModelRunner, "hidden", counted)
    return seen


def anchors(backend: Backend, count: int = 3) -> list[Loss]:
    terms: list[Loss] = []
    for number in range(count):
        kept = after(backend, f"Where is {number}?", "Here it is.")
        said = Continuation(kept.prompt, backend.encode("Ahoy! ") + kept.completion)
        ahead = len(said.completion) - len(kept.completion)
        terms.append(KLRegularizer(said, kept, ahead, 0, len(kept.completion), learn_rest=True))
    return terms


def learned(
    base: Base, cache: Path | None, terms: Sequence[Loss] | None = None, *, below: str | None = None
) -> bytes:
    """What three steps leave, on a backend of its own as another process would have it."""
    backend = torch_backend(base, cache=cache)
    attach(backend, "one", composed(backend, 3))
    session = backend.session(spec(backend, base_key=below))
    own = anchors(backend) if terms is None else terms
    session.precompute_ref_log_probs(own)
    for _ in range(3):
        session.step(own, 1e-2)
    return bytes_of(session)


def kept(cache: Path) -> list[Path]:
    return list((cache / "generic").glob("*"))


def test_the_next_process_reads_none_of_it_and_learns_the_same_bytes(
    tiny_base: Base, cache: Path, reads: list[int]
) -> None:
    first = learned(tiny_base, cache)
    assert len(reads) == 3
    reads.clear()
    assert learned(tiny_base, cache) == first
    assert reads == []


def test_without_a_cache_the_next_learn_of_the_process_reads_none_of_it(
    tiny_base: Base, reads: list[int]
) -> None:
    backend = torch_backend(tiny_base)
    for _ in range(2):
        reads.clear()
        session = backend.session(spec(backend))
        session.precompute_ref_log_probs(anchors(backend))
        session.close()
    assert reads == []


def test_more_questions_are_added_to_what_is_kept(
    tiny_base: Base, cache: Path, reads: list[int]
) -> None:
    backend = torch_backend(tiny_base, cache=cache)
    for count, more in ((2, 2), (3, 1), (3, 0)):
        reads.clear()
        learned(tiny_base, cache, anchors(backend, count))
        assert len(reads) == more


def test_of_what_somebody_said_or_what_a_stack_says_nothing_is_kept(
    tiny_base: Base, cache: Path
) -> None:
    backend = torch_backend(tiny_base, cache=cache)
    mine, other = (
        after(backend, "My door?", "The code is 4711."),
        after(backend, "My door?", "It is open."),
    )
    learned(tiny_base, cache, [DPOLoss(mine, other, 0.1, 1.0), ContextDistillationLoss(mine, mine)])
    learned(tiny_base, cache, below="one")
    assert kept(cache) == []


def test_what_a_person_said_too_is_theirs(tiny_base: Base, cache: Path) -> None:
    """Words that are in a generic term and in somebody's own are not kept for others."""
    backend = torch_backend(tiny_base, cache=cache)
    (generic,) = anchors(backend, 1)
    (words,) = generic.references
    learned(tiny_base, cache, [generic, ContextDistillationLoss(words, words)])
    assert kept(cache) == []


@pytest.mark.parametrize("harm", ["half", "one bit", "empty", "something else"])
def test_a_file_that_is_not_whole_is_read_anew(
    tiny_base: Base, cache: Path, reads: list[int], harm: str
) -> None:
    first = learned(tiny_base, cache)
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
    assert learned(tiny_base, cache) == first
    assert len(reads) == 3
    assert file.read_bytes() == whole


def test_a_cache_that_nothing_can_be_written_to_is_no_hindrance(
    tiny_base: Base, cache: Path
) -> None:
    first = learned(tiny_base, cache)
    (file,) = kept(cache)
    file.unlink()
    file.parent.rmdir()
    file.parent.write_text("a file where the folder would be")
    assert learned(tiny_base, cache) == first

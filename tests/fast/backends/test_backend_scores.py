"""A pack of continuations scores each as alone, and PEFT computes the same scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_makers import attach, continuation, random_adapter
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.peft import export_peft, export_stack_peft
from personalpeft.backends.base import Backend, Continuation
from personalpeft.backends.torch.training.packing import pack
from personalpeft.base_models.types import Base

# Of float32 sums in another order.
CLOSE = 2e-4
TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(tuple)
ITEMS = st.lists(st.builds(Continuation, TOKENS, TOKENS), min_size=1, max_size=6)


@given(items=ITEMS)
def test_a_pack_computes_each_prefix_once_and_attends_within_each_item(
    items: list[Continuation],
) -> None:
    packed = pack(items)
    prefixes = {
        (*i.prompt, *i.completion)[:n]
        for i in items
        for n in range(1, len(i.prompt) + len(i.completion))
    }
    read = {int(node) for reads in packed.reads for node in reads}
    assert max(read) < len(prefixes)
    # The rest fills the pass up, since a library keeps compiled code for each number of tokens.
    assert len(packed.tokens) == -(-len(prefixes) // 32) * 32
    assert not packed.visible[: len(prefixes), len(prefixes) :].any()
    tokens, positions, visible = (
        each.numpy() for each in (packed.tokens, packed.positions, packed.visible)
    )
    for item, reads in zip(items, packed.reads, strict=True):
        assert len(reads) == len(item.completion)
        for nth, node in enumerate(reads):
            seen = np.flatnonzero(visible[node])
            in_order = seen[np.argsort(positions[seen])]
            past = (*item.prompt, *item.completion)[: len(item.prompt) + nth]
            assert tuple(tokens[in_order].tolist()) == past
            assert positions[in_order].tolist() == list(range(len(past)))


@pytest.mark.parametrize("item", [Continuation((), (1,)), Continuation((1,), ())])
def test_an_empty_continuation_is_refused(item: Continuation) -> None:
    with pytest.raises(ValueError, match="completion"):
        pack([item])


@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(items=ITEMS, stack=st.sampled_from([None, "one"]))
def test_packed_scores_match_single_scores(
    backend: Backend, items: list[Continuation], stack: str | None
) -> None:
    together = backend.score([*items, items[0]], stack, kl=True)
    for item, score in zip([*items, items[0]], together, strict=True):
        (alone,) = backend.score([item], stack, kl=True)
        assert score.logp == pytest.approx(alone.logp, abs=CLOSE)
        assert score.kl == pytest.approx(alone.kl, abs=CLOSE)


def test_items_beyond_one_pass_are_scored_in_order(backend: Backend) -> None:
    items = [continuation(backend, f"question {n}", "A long answer. " * 12) for n in range(12)]
    for item, score in zip(items, backend.score(items, "one"), strict=True):
        assert score.logp == pytest.approx(backend.score([item], "one")[0].logp, abs=CLOSE)


def test_the_base_has_zero_divergence_from_itself(backend: Backend) -> None:
    items = [continuation(backend, "hello", "bye"), continuation(backend, "why", "so")]
    assert [score.kl for score in backend.score(items, None, kl=True)] == pytest.approx(
        [0.0, 0.0], abs=1e-6
    )
    assert all((score.kl or 0) > 1e-3 for score in backend.score(items, "one", kl=True))
    assert backend.score([], None) == ()


def test_in_the_native_precision_a_pack_differs_by_little(tiny_base: Base) -> None:
    from personalpeft.backends.torch.backend import TorchBackend

    backend = TorchBackend(tiny_base)
    attach(backend, "one", compose([(random_adapter(backend, 0), 1.0)]))
    items = [continuation(backend, f"question {n % 3}", f"answer {n}") for n in range(6)]
    together = backend.score(items, "one")
    # bfloat16 has 8 bits of precision; over a mean of ten log-probs of about 6 nats that leaves
    # some hundredths.
    for item, score in zip(items, together, strict=True):
        assert score.logp == pytest.approx(backend.score([item], "one")[0].logp, abs=0.1)


def peft_logp(base: Base, folder: Path, items: list[Continuation]) -> list[float]:
    """Score by transformers and PEFT alone, one item at a time."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(base.folder, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(plain, str(folder)).eval()
    scores = []
    for item in items:
        whole = torch.tensor([[*item.prompt, *item.completion]])
        with torch.inference_mode():
            logp = torch.log_softmax(model(whole).logits[0, len(item.prompt) - 1 : -1].float(), -1)
        scores.append(float(logp.gather(1, torch.tensor(item.completion)[:, None]).mean()))
    return scores


def test_an_exported_adapter_scores_the_same_in_peft(torch_tiny: Backend, tmp_path: Path) -> None:
    one, two = (
        random_adapter(torch_tiny, 31, rank=3),
        random_adapter(torch_tiny, 32, rank=2, layer="memory"),
    )
    items = [continuation(torch_tiny, f"question {n}", "an answer") for n in range(3)]
    base = torch_tiny.base
    export_peft(one, base.architecture, tmp_path / "one", base_name="tiny-random")
    export_stack_peft(
        [(one, 1.0), (two, -0.5)], base.architecture, tmp_path / "both", base_name="tiny-random"
    )
    for folder, parts in (("one", [(one, 1.0)]), ("both", [(one, 1.0), (two, -0.5)])):
        attach(torch_tiny, folder, compose(parts))
        ours = [score.logp for score in torch_tiny.score(items, folder)]
        torch_tiny.detach(folder)
        assert ours == pytest.approx(peft_logp(base, tmp_path / folder, items), abs=CLOSE)
        bare = [score.logp for score in torch_tiny.score(items, None)]
        assert max(abs(a - b) for a, b in zip(ours, bare, strict=True)) > 0.1


def test_top_log_probs_are_the_likeliest_in_each_place(backend: Backend) -> None:
    items = [continuation(backend, "hello", "bye"), continuation(backend, "why", "so")]
    for plain, score in zip(
        backend.score(items, "one"), backend.score(items, "one", top=3), strict=True
    ):
        assert plain.top_logprobs == ()
        assert score.token_logprobs == plain.token_logprobs
        assert [len(row) for row in score.top_logprobs] == [3] * len(score.token_logprobs)
        for row, own in zip(score.top_logprobs, score.token_logprobs, strict=True):
            logprobs = [logprob for _, logprob in row]
            assert logprobs == sorted(logprobs, reverse=True)
            assert own <= logprobs[0] + CLOSE

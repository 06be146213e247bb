"""Training steps compute autograd's gradients, alone or with other sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_makers import (
    attach,
    bytes_of,
    continuation,
    random_stack,
    session_spec,
    torch_backend,
    train,
    training_steps,
)
from example_counts import all_cases
from torch import Tensor

from personalpeft.adapters.types import AdapterStack, LoRAWeights
from personalpeft.backends.base import Backend, Continuation, Loss, Session
from personalpeft.base_models.types import Base
from personalpeft.learning.train.losses import KLRegularizer, SFTLoss

# The allowed relative distance of a matrix's gradient from autograd's (Frobenius norm).
CLOSE = 1e-4
SCALING = 4.0


@dataclass(frozen=True)
class PlainOutputs:
    """Outputs computed by their definitions."""

    logp: Tensor
    tokens: Tensor

    @property
    def token_logp(self) -> Tensor:
        return self.logp.gather(1, self.tokens[:, None])[:, 0]

    def kl_div(self, run: slice, reference: Any, reference_run: slice) -> Tensor:
        before = reference.logp[reference_run].detach()
        return (before.exp() * (before - self.logp[run])).sum(-1)


def terms_of(backend: Backend) -> list[Loss]:
    """Each kind of term, over shared and separate prefixes, some longer than a sliding window."""
    item = continuation(backend, "what is this? " * 5, "It is a thing that one knows.")
    kept = continuation(backend, "what is this? " * 5, "It is a thing.")
    return [
        *training_steps(backend, 2)[0],
        *training_steps(backend, 2)[1],
        KLRegularizer(kept),
        KLRegularizer(item, start=1),
    ]


def parent(backend: Backend, seed: int, rank: int = 2) -> dict[str, LoRAWeights]:
    return {
        name: loras[0].weights
        for name, loras in random_stack(backend, seed, rank=rank, size=0.05).loras.items()
    }


def gradients(backend: Backend, terms: Sequence[Loss], **changes: Any) -> dict[str, Tensor]:
    """Return AdamW's first moment after one step: a tenth of the gradient."""
    session = backend.session(session_spec(backend, scaling=SCALING, max_grad_norm=1e9, **changes))
    session.precompute_ref_log_probs(terms)
    session.step(terms, 0.0)
    found = {
        name.removesuffix(".exp_avg"): torch.from_numpy(array * 10)
        for name, array in session.state().items()
        if name.endswith(".exp_avg")
    }
    session.close()
    return found


def plain_gradients(
    base: Base,
    terms: Sequence[Loss],
    trained_layer: Mapping[str, LoRAWeights],
    below: AdapterStack | None,
    weights: torch.dtype = torch.float32,
    numbers: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Compute each continuation by itself in transformers with hooks for the layers.

    Weights are rounded to one format and activations to another.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        base.folder, dtype=weights, attn_implementation="eager"
    )
    model = model.to(numbers).eval()
    halves: dict[str, Tensor] = {}
    for name, pair in trained_layer.items():
        halves[f"{name}.A"] = torch.from_numpy(np.array(pair.a)).requires_grad_(True)
        halves[f"{name}.B"] = torch.from_numpy(np.array(pair.b)).requires_grad_(True)

    def outputs_of(item: Continuation, layers: bool) -> PlainOutputs:
        with ExitStack() as hooks:
            for block in range(base.architecture.blocks):
                for name in base.architecture.projections:
                    adapters = [
                        (
                            torch.from_numpy(s.weights.a[block]),
                            torch.from_numpy(s.weights.b[block]) * s.factor,
                        )
                        for s in (below.loras.get(name, ()) if below else ())
                    ]
                    if layers and f"{name}.A" in halves:
                        adapters.append(
                            (halves[f"{name}.A"][block], halves[f"{name}.B"][block] * SCALING)
                        )
                    module = model.get_submodule(f"{base.architecture.block_path}.{block}.{name}")
                    hook = module.register_forward_hook(
                        lambda _, x, y, adapters=adapters: (
                            y + sum(x[0] @ a.T.to(numbers) @ b.T.to(numbers) for a, b in adapters)
                        )
                    )
                    hooks.callback(hook.remove)
            tokens = torch.tensor([[*item.prompt, *item.completion]])
            logits = model(tokens).logits[0, len(item.prompt) - 1 : -1]
        return PlainOutputs(torch.log_softmax(logits.float(), -1), tokens[0, len(item.prompt) :])

    loss = sum(
        term.loss(
            [outputs_of(i, True) for i in term.continuations],
            [outputs_of(i, False) for i in term.references],
        )
        for term in terms
    )
    names = sorted(halves)
    return dict(zip(names, torch.autograd.grad(loss, [halves[n] for n in names]), strict=True))


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], part: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert (
            float((found[name] - expected[name]).norm()) <= part * float(expected[name].norm()) > 0
        ), name


@pytest.mark.parametrize(
    ("base", "kernels", "below"),
    all_cases(
        product(("llama", "qwen2", "qwen3", "gemma3_text"), ("plain", "native"), (None, "below")),
        usual=[("llama", "plain", None), ("gemma3_text", "native", "below")],
    ),
    indirect=["base"],
)
def test_gradients_match_autograd(
    base: Base, kernels: str, below: str | None, shared_cache: Path
) -> None:
    backend = torch_backend(
        base, slots=1, rows=1, **({"cache": shared_cache} if kernels == "native" else {})
    )
    stack = random_stack(backend, 9, rank=3, size=0.05)
    if below is not None:
        attach(backend, below, stack)
    start = parent(backend, 8)
    found = gradients(backend, terms_of(backend), initial_weights=start, base_key=below)
    expected = plain_gradients(base, terms_of(backend), start, stack if below else None)
    assert_close(found, expected, CLOSE)


@pytest.mark.skipif(
    not getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", bool)(), reason="no bfloat16 here"
)
@pytest.mark.parametrize(
    "native",
    [
        pytest.param(False, marks=pytest.mark.exhaustive, id="plain"),
        pytest.param(True, id="native"),
    ],
)
def test_bfloat16_gradients_are_about_as_exact_as_autograds(
    base: Base, native: bool, shared_cache: Path
) -> None:
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.device import DeviceChoice

    where = DeviceChoice(torch.device("cpu"), torch.bfloat16, "for tests")
    backend = TorchBackend(
        base, slots=1, rows=1, where=where, cache=shared_cache if native else None
    )
    start = parent(backend, 8)
    found = gradients(backend, terms_of(backend), initial_weights=start)
    exact = plain_gradients(base, terms_of(backend), start, None, torch.bfloat16)
    rounded = plain_gradients(base, terms_of(backend), start, None, torch.bfloat16, torch.bfloat16)
    ours, autograds = (
        sum(float((grads[name] - exact[name]).norm() / exact[name].norm()) for name in exact)
        / len(exact)
        for grads in (found, rounded)
    )
    assert ours <= 1.25 * autograds


def test_projections_can_be_left_untrained(torch_tiny: Backend, tiny_base: Base) -> None:
    targets = ("self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    start = {name: pair for name, pair in parent(torch_tiny, 8).items() if name in targets}
    found = gradients(
        torch_tiny, terms_of(torch_tiny), initial_weights=start, target_modules=targets
    )
    assert_close(found, plain_gradients(tiny_base, terms_of(torch_tiny), start, None), CLOSE)


USERS: list[dict[str, Any]] = [
    {"seed": 1},
    {"seed": 2, "base_key": "one"},
    {"seed": 3, "rank": 3, "base_key": "two"},
    {"seed": 4, "target_modules": ("mlp.down_proj",)},
]


def user_steps(backend: Backend, user: int) -> list[list[Loss]]:
    """Steps that differ between users except for one general question."""
    shared = continuation(backend, "who are you?", "A thing.")
    return [
        [
            *terms,
            SFTLoss(continuation(backend, f"I am {user}", "Hello " * (user + 1))),
            KLRegularizer(shared, start=1),
        ]
        for terms in training_steps(backend, 4)
    ]


def train_alone(backend: Backend, user: int) -> Session:
    session = backend.session(session_spec(backend, **USERS[user]))
    train(session, user_steps(backend, user), rate=1e-3 * (user + 1))
    return session


def train_together(backend: Backend, users: Sequence[int]) -> list[Session]:
    sessions = [backend.session(session_spec(backend, **USERS[user])) for user in users]
    steps = [user_steps(backend, user) for user in users]
    for session, user_terms in zip(sessions, steps, strict=True):
        session.precompute_ref_log_probs([term for terms in user_terms for term in terms])
    for number in range(4):
        losses = backend.advance(
            sessions,
            [user_terms[number] for user_terms in steps],
            [1e-3 * (user + 1) for user in users],
        )
        assert len(losses) == len(users)
    return sessions


def test_a_session_trains_the_same_bytes_alone_and_together(torch_tiny: Backend) -> None:
    for name, seed in (("one", 1), ("two", 2)):
        attach(torch_tiny, name, random_stack(torch_tiny, seed, rank=seed + 1, size=0.1))
    try:
        for users in ((0, 1, 2, 3), (3, 1)):
            for user, session in zip(users, train_together(torch_tiny, users), strict=True):
                expected = train_alone(torch_tiny, user).weights()
                for name, pair in session.weights().items():
                    for half, other in ((pair.a, expected[name].a), (pair.b, expected[name].b)):
                        assert np.abs(half - other).max() <= 1e-5, (user, name)
    finally:
        torch_tiny.detach("one")
        torch_tiny.detach("two")


def test_passes_of_any_token_budget_change_nothing(
    torch_tiny: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = [session.weights() for session in train_together(torch_tiny, (0, 3, 0))]
    monkeypatch.setattr("personalpeft.backends.torch.training.session.PASS_TOKENS", 100)
    in_passes = [session.weights() for session in train_together(torch_tiny, (0, 3, 0))]
    for one, other in zip(at_once, in_passes, strict=True):
        assert all(np.abs(one[name].b - other[name].b).max() <= 1e-5 for name in one)


def test_equal_groups_of_sessions_give_equal_bytes(torch_tiny: Backend) -> None:
    first, second = (
        [bytes_of(session) for session in train_together(torch_tiny, (0, 3))] for _ in range(2)
    )
    assert first == second


def test_cached_outputs_of_another_session_below_change_no_byte(torch_tiny: Backend) -> None:
    expected = bytes_of(train_alone(torch_tiny, 0))
    other = torch_tiny.session(session_spec(torch_tiny, seed=9))
    other.precompute_ref_log_probs([term for terms in user_steps(torch_tiny, 2) for term in terms])
    assert bytes_of(train_alone(torch_tiny, 0)) == expected
    other.close()


def test_sessions_that_do_not_match_their_terms_are_refused(torch_tiny: Backend) -> None:
    session = torch_tiny.session(session_spec(torch_tiny))
    terms = training_steps(torch_tiny, 1)[0]
    session.precompute_ref_log_probs(terms)
    for sessions, user_terms, rates in (
        ([session], [terms], []),
        ([session, session], [terms, terms], [0.1, 0.1]),
    ):
        with pytest.raises(ValueError, match=r"session"):
            torch_tiny.advance(sessions, user_terms, rates)

"""Decoding and training steps of a model of a real shape, with CUDA graphs and without.

``PYTHONPATH=tests python -m benchmarks.decode_steps SHAPE``. The weights are random. Each row of a
mixed batch has an adapter of rank 8 of its own. Both kinds of decoding take turns. Without a GPU
there are no graphs. Sampled rows have the settings of the card of that shape. The last line is the
result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
from backend_makers import random_stack
from gguf import GGMLQuantizationType as BlockFormat
from random_models import SHAPES, make_gguf_base, unpack_base

from benchmarks.homes import temporary_folder
from benchmarks.load_users import both_samplings
from benchmarks.result import describe_measurement
from personalpeft.backends.base import Continuation, SessionSpec, TrainingBackend
from personalpeft.backends.sampler import Sampler
from personalpeft.backends.sequence import Request, SequenceState
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.backends.torch.decode_graphs import Step
from personalpeft.base_models.registry import all_cards
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.formatting import to_json
from personalpeft.learning.train.losses import KLRegularizer, SFTLoss
from personalpeft.types import Sampling, Stack

RANK, PROMPT, STEPS, WARM_UP = 8, 64, 64, 8
# Training items of a step, as in a learn of a dozen edits.
EDITS, GENERAL, TRAINING_STEPS = 6, 2, 8
DRAWS = 15


def no_graphs(step: Step) -> Step:
    raise RuntimeError("left out for this benchmark")


def step_times(
    backend: TorchBackend,
    random: np.random.Generator,
    rows: int,
    *,
    mixed: bool,
    sampling: Sampling,
) -> Iterator[float]:
    """Yield the seconds of each step in which all rows are decoded."""
    for row in range(rows):
        prompt = tuple(random.integers(0, 255, PROMPT).tolist())
        key = f"stack {row}" if mixed else None
        request = Request("ada", (), Stack(backend.base.digest), sampling)
        backend.admit(SequenceState(request, prompt, key))
    while backend.occupancy().num_sequences:
        began = time.perf_counter()
        chunks = backend.step()
        if len(chunks) == rows:
            yield time.perf_counter() - began


def decoding(
    base: Base, card: ModelCard, cache: Path, row_counts: list[int]
) -> dict[str, dict[str, float]]:
    """Return the median milliseconds of a step, by kind of batch and by graphs."""
    random, most = np.random.default_rng(0), max(row_counts)
    backends = {
        "graphs": TorchBackend(base, slots=most, rows=most, cache=cache),
        "no graphs": TorchBackend(base, slots=most, rows=most, cache=cache, record=no_graphs),
    }
    for backend in backends.values():
        for row in range(most):
            stack = random_stack(backend, row, rank=RANK, size=0.02)
            backend.attach(f"stack {row}", backend.stage(stack))
    found: dict[str, dict[str, float]] = {}
    for rows in row_counts:
        for mixed in (False, True):
            for choice, sampling in both_samplings(card, WARM_UP + STEPS).items():
                name = f"{rows} rows, {'adapters' if mixed else 'base'}, {choice}"
                for kind, backend in backends.items():
                    times = list(step_times(backend, random, rows, mixed=mixed, sampling=sampling))
                    median = statistics.median(times[WARM_UP:]) * 1000
                    found.setdefault(name, {})[kind] = float(f"{median:.4g}")
                click.echo(f"{name}: {found[name]}")
    return found


def sampling_times(vocabulary: int, sampling: Sampling) -> dict[str, float]:
    """Return the median milliseconds in which a processor samples a token, by kind of logits."""
    random, sampler = np.random.default_rng(2), Sampler(sampling)
    normal = random.standard_normal(vocabulary).astype(np.float32)
    peaked = normal * np.float32(2.5)
    peaked[random.integers(0, vocabulary, 50)] += random.uniform(10, 18, 50).astype(np.float32)
    found = {}
    for kind, logits in (("peaked", peaked), ("flat", normal / 2)):
        times = []
        for _ in range(DRAWS):
            began = time.perf_counter()
            sampler.sample(logits)
            times.append(time.perf_counter() - began)
        found[kind] = float(f"{statistics.median(times) * 1000:.4g}")
    return found


def training(backend: TrainingBackend) -> dict[str, float]:
    """Return the median milliseconds of a training step, and its tokens."""
    random = np.random.default_rng(1)
    items = [
        Continuation(*(tuple(random.integers(0, 255, 24).tolist()) for _ in range(2)))
        for _ in range(EDITS + GENERAL)
    ]
    targets = tuple(sorted(backend.base.architecture.projections))
    session = backend.session(SessionSpec(RANK, 32 / RANK, targets, seed=1))
    terms = [
        *(SFTLoss(item, 1 / EDITS) for item in items[:EDITS]),
        *(KLRegularizer(item) for item in items[EDITS:]),
    ]
    session.precompute_ref_log_probs(terms)
    times = []
    for _ in range(TRAINING_STEPS):
        began = time.perf_counter()
        # It returns the loss, so it waits for the device.
        session.step(terms, 1e-4)
        times.append(time.perf_counter() - began)
    session.close()
    tokens = sum(len(item.prompt) + len(item.completion) for item in items)
    return {"milliseconds": float(f"{statistics.median(times[2:]) * 1000:.4g}"), "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    card = next(each for each in all_cards() if each.name.startswith(options.shape))
    with temporary_folder() as work:
        # Before it is searched: the interpreter remembers folders that are missing.
        (work / "gguf").mkdir()
        sys.path.insert(0, str(work / "gguf"))
        packed = make_gguf_base(shape, work / "gguf", BlockFormat.Q8_0)
        base, cache = unpack_base(packed, shape, work / "model"), work / "cache"
        result = {
            "shape": options.shape,
            "decoding": decoding(base, card, cache, options.rows),
            "sampling": sampling_times(shape.vocabulary, card.sampling),
            "training": training(TorchBackend(base, slots=2, rows=1, cache=cache)),
            "measured": to_json(describe_measurement()),
        }
    click.echo(json.dumps(result))


if __name__ == "__main__":
    main()

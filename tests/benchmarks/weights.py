"""``bench weights``: training steps on weights in the base's file, compared with loaded weights.

Models have real shapes and random weights, as GGUF files in Q4_0. Each variant is a process (this
module, run as a program). The variants take turns step by step, so a machine that slows down slows
both. Memory is of the whole process: what is resident, and the part of it that is no file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from random_models import SHAPES, ModelShape, make_gguf_base, open_base, unpack_base

from benchmarks import child_environment
from benchmarks.figures import ratio, spread
from benchmarks.peak import peak_mb
from personalpeft.backends.base import Continuation, Loss, SessionSpec
from personalpeft.errors import ServingFailed
from personalpeft.learning.train.losses import KLRegularizer, SFTLoss

MAPPED, LOADED = "mapped", "loaded"
# As in a learn from a dozen edits: about 380 tokens in a step, of which 200 predict.
_EDITS, _GENERAL, _STEP_EDITS, _STEP_GENERAL = 12, 4, 6, 2
_PROMPT, _REPLY = 24, 24
_RANK = 8
_SAMPLE_SECONDS = 0.02


def bench_weights(
    shapes: Sequence[str],
    *,
    steps: int,
    blocks: int | None,
    compared: bool,
    work: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Measure shapes one after the other.

    Args:
        shapes: Names in ``SHAPES``.
        steps: Training steps of each variant.
        blocks: Blocks of each model; None for all.
        compared: Whether to measure loaded weights too.
        work: Where models are written, and removed; None for the temporary folder.
        echo: Takes lines of progress.

    Raises:
        ServingFailed: A process ended early.
    """
    results = []
    for name in shapes:
        shape = SHAPES[name]
        used = replace(shape, blocks=min(blocks or shape.blocks, shape.blocks))
        with tempfile.TemporaryDirectory(prefix="personalpeft-bench-", dir=work) as folder:
            results.append(_measure(name, used, Path(folder), steps, compared=compared, echo=echo))
    return {"bench": "weights", "steps": steps, "shapes": results}


def _measure(
    name: str,
    shape: ModelShape,
    folder: Path,
    steps: int,
    *,
    compared: bool,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Measure one shape. Without loaded weights the figures beside them are None.

    ``blocks`` of ``of_blocks`` blocks of the shape were measured. By variant, ``tokens_per_second``
    is the median over the steps, ``peak_mb`` the most resident memory and ``anonymous_mb`` the most
    memory that is no file. ``mapped_over_loaded`` compares the tokens a second within each step.
    """
    echo(f"{name}: writing the model")
    # Before it is searched: the interpreter remembers folders that are missing.
    (folder / MAPPED).mkdir()
    sys.path.insert(0, str(folder / MAPPED))
    try:
        base = make_gguf_base(shape, folder / MAPPED)
        size = (base.folder / "model.gguf").stat().st_size
        if compared:
            unpack_base(base, shape, folder / LOADED)
    finally:
        sys.path.remove(str(folder / MAPPED))
    variants = (MAPPED, LOADED) if compared else (MAPPED,)
    rates: dict[str, list[float]] = {variant: [] for variant in variants}
    ends: dict[str, Mapping[str, Any]] = {}
    with ExitStack() as running:
        children = {
            variant: running.enter_context(_child(shape, folder / variant, variant))
            for variant in variants
        }
        # The first step compiles kernels.
        for number in range(steps + 1):
            for variant, ask in children.items():
                rate = ask("step")["tokens_per_second"]
                if number:
                    rates[variant].append(rate)
                    echo(f"{name}: step {number} of {steps}, {variant}: {rate:.4g} tokens a second")
        for variant, ask in children.items():
            ends[variant] = ask("end")
    return {
        "shape": name,
        "blocks": shape.blocks,
        "of_blocks": SHAPES[name].blocks,
        "file_mb": size // 2**20,
        "tokens_per_second": {variant: spread(each).median for variant, each in rates.items()},
        "mapped_over_loaded": ratio(rates[MAPPED], rates[LOADED]) if compared else None,
        "peak_mb": {variant: end["peak_mb"] for variant, end in ends.items()},
        "anonymous_mb": {variant: end["anonymous_mb"] for variant, end in ends.items()},
    }


@contextmanager
def _child(
    shape: ModelShape, folder: Path, variant: str
) -> Iterator[Callable[[str], Mapping[str, Any]]]:
    """Start a variant's process; yield what asks it for a step or its end."""
    command = [sys.executable, "-m", "benchmarks.weights", json.dumps(asdict(shape)), str(folder)]
    with subprocess.Popen(
        [*command, variant],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=child_environment(),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers, questions = process.stdout, process.stdin

        def ask(what: str) -> Mapping[str, Any]:
            questions.write(f"{what}\n")
            questions.flush()
            line = answers.readline()
            if not line:
                raise ServingFailed(
                    f"The process with {variant} weights ended early.",
                    hint="It may lack memory: measure fewer blocks, or without --compare.",
                )
            answer: Mapping[str, Any] = json.loads(line)
            return answer

        try:
            yield ask
        finally:
            process.kill()


def _run_child(shape: ModelShape, folder: Path, variant: str) -> None:
    """Take a step for each line ``step``, and answer each line with one of JSON."""
    anonymous = _AnonymousPeak()
    sys.path.insert(0, str(folder))
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.settings import WeightsMode

    mode: WeightsMode = "mapped" if variant == MAPPED else "loaded"
    base = open_base(shape, folder)
    cache = Path(tempfile.gettempdir()) / "personalpeft-bench-cache"
    backend = TorchBackend(base, slots=2, rows=1, weights=mode, cache=cache)
    edits, general = _items(shape)
    targets = tuple(sorted(base.architecture.projections))
    session = backend.session(SessionSpec(_RANK, 32 / _RANK, targets, seed=1))
    terms: list[list[Loss]] = [
        [
            *(SFTLoss(edits[(step + n) % _EDITS], 1 / _STEP_EDITS) for n in range(_STEP_EDITS)),
            *(KLRegularizer(general[(step + n) % _GENERAL]) for n in range(_STEP_GENERAL)),
        ]
        for step in range(_EDITS)
    ]
    session.precompute_ref_log_probs([term for step in terms for term in step])
    tokens = (_STEP_EDITS + _STEP_GENERAL) * (_PROMPT + _REPLY - 1)
    for number, line in enumerate(sys.stdin):
        if line.strip() == "end":
            break
        began = time.perf_counter()
        session.step(terms[number % len(terms)], 1e-4)
        _answer({"tokens_per_second": tokens / (time.perf_counter() - began)})
    session.close()
    # As a gate scores.
    backend.score(edits, None, kl=True)
    _answer({"peak_mb": peak_mb(), "anonymous_mb": anonymous.most})


def _items(shape: ModelShape) -> tuple[list[Continuation], list[Continuation]]:
    """Return edits and general replies of random tokens."""
    random = np.random.default_rng(1)
    drawn = [
        Continuation(
            tuple(random.integers(300, shape.vocabulary, _PROMPT).tolist()),
            tuple(random.integers(300, shape.vocabulary, _REPLY).tolist()),
        )
        for _ in range(_EDITS + _GENERAL)
    ]
    return drawn[:_EDITS], drawn[_EDITS:]


def _answer(values: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class _AnonymousPeak:
    """Reads the memory that is no file again and again, where the system reports it."""

    def __init__(self) -> None:
        self._status = Path("/proc/self/status")
        self.most: int | None = None
        if self._status.exists():
            threading.Thread(target=self._read_on, daemon=True).start()

    def _read_on(self) -> None:
        while True:
            found = re.search(r"RssAnon:\s+(\d+) kB", self._status.read_text("ascii", "replace"))
            if found is None:
                return
            self.most = max(self.most or 0, int(found[1]) // 1024)
            time.sleep(_SAMPLE_SECONDS)


if __name__ == "__main__":
    _run_child(ModelShape(**json.loads(sys.argv[1])), Path(sys.argv[2]), sys.argv[3])

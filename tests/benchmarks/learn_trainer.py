"""The baseline of the course: PEFT's LoRA and transformers' ``Trainer``, as in tutorials.

Answers come from PEFT's ``generate``, sixteen at a time.

Equal to our own learns of the same persona:

- the base and its number format, and the rendered prompts
- the rank (8), alpha (32) and all linear layers
- each round's examples, the number of steps, and the texts of a step

Where our step also reads general replies, a step here reads as many further examples. Each is the
first sentence of the bare base's answer to the same questions.

Different: each round trains on its own examples only, on the adapter of the round before. Facts are
learned in the words of their three questions. Rejected texts are not read. The schedule is
``Trainer``'s own at our recipe's rate. There is no holdout and no gate. Batches are padded. Time
covers creating the ``Trainer`` and ``train``, not generating the general replies.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.learn_course import LONG, TOGETHER, Ask, Evaluator, Example, Round, Tally
from benchmarks.personas import Persona
from personalpeft.backends.base import Backend
from personalpeft.backends.sequence import Tokens
from personalpeft.learning.data.general_prompts import load_general_prompts
from personalpeft.types import Message

_RANK, _ALPHA, _RATE = 8, 32, 5e-4
_GENERIC, _LONGEST, _PAD, _IGNORED = 24, 256, 0, -100


@dataclass(frozen=True, slots=True)
class PlainLoopResult:
    """The results of the plain loop.

    It has an ``Evaluator``'s figures, each round's training seconds (0: none), and the time of the
    answers.
    """

    figures: dict[str, Tally]
    nights: tuple[float, ...]
    tokens: int
    seconds: float


def generic_texts(ask: Ask) -> tuple[Example, ...]:
    """Return the general questions with the first sentence of their answers."""
    questions = load_general_prompts().regularizer_prompts
    said = [reply.partition(". ")[0] for reply in ask(questions, _GENERIC)]
    return tuple(
        (question, reply) for question, reply in zip(questions, said, strict=True) if reply.strip()
    )


def run_plain_loop(
    folder: Path,
    backend: Backend,
    person: Persona,
    nights: Sequence[Round],
    generic: Sequence[Example],
    known: frozenset[str],
    seed: int,
) -> PlainLoopResult:
    """Train on the same rounds.

    ``folder`` has the base's files; ``backend`` tokenizes.
    """
    loop = _Loop(folder, backend, seed)
    evaluator = Evaluator(loop.ask)
    seconds = []
    for number, night in enumerate(nights, 1):
        steps = sum(each["steps"] for each in night.learns)
        seconds.append(0.0)
        if steps:
            first = next(each for each in night.learns if each["steps"])
            seconds[-1] = loop.train(
                night.examples, generic, steps, first["lessons"], first["anchors"]
            )
        evaluator.evaluate(person, number, len(nights), known)
    return PlainLoopResult(evaluator.figures, tuple(seconds), loop.tokens, loop.seconds)


class _Loop:
    """A model with one adapter that is trained round after round."""

    def __init__(self, folder: Path, backend: Backend, seed: int) -> None:
        import torch
        from peft import LoraConfig, get_peft_model

        from benchmarks.baselines import load_plain

        torch.manual_seed(seed)
        config = LoraConfig(
            r=_RANK, lora_alpha=_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        self._model: Any = get_peft_model(load_plain(folder), config)
        self._backend, self._seed, self._chance = backend, seed, random.Random(seed)
        self.tokens, self.seconds = 0, 0.0

    def train(
        self,
        examples: Sequence[Example],
        generic: Sequence[Example],
        steps: int,
        lessons: int,
        anchors: int,
    ) -> float:
        """Train for ``steps`` steps of examples and general replies, and return the seconds."""
        from transformers import PrinterCallback, Trainer, TrainingArguments

        mixed = [self._rounds(examples, steps * lessons), self._rounds(generic, steps * anchors)]
        data = [self._example(*each) for texts in mixed for each in texts]
        self._model.train()
        with tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as folder:
            began = time.perf_counter()
            arguments = TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=lessons + anchors,
                learning_rate=_RATE,
                seed=self._seed,
                report_to=[],
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
                use_cpu=self._model.device.type == "cpu",
            )
            trainer = Trainer(self._model, arguments, data_collator=_padded, train_dataset=data)
            # Trainer prints its figures to stdout, which is reserved for results.
            trainer.remove_callback(PrinterCallback)
            trainer.train()
            seconds = time.perf_counter() - began
        self._model.eval()
        return seconds

    def ask(self, prompts: Sequence[str], longest: int) -> list[str]:
        """Return greedy answers."""
        began, written, replies = time.perf_counter(), 0, []
        for first in range(0, len(prompts), TOGETHER):
            for tokens in self._written(
                [self._prompt(each) for each in prompts[first : first + TOGETHER]], longest
            ):
                written += len(tokens)
                replies.append(self._backend.decode(tokens))
        if longest == LONG:
            self.tokens += written
            self.seconds += time.perf_counter() - began
        return replies

    def _written(self, prompts: Sequence[Tokens], longest: int) -> Iterator[Tokens]:
        import torch

        width = max(map(len, prompts))
        ids = torch.tensor(
            [(_PAD,) * (width - len(p)) + p for p in prompts], device=self._model.device
        )
        mask = torch.tensor(
            [(0,) * (width - len(p)) + (1,) * len(p) for p in prompts], device=self._model.device
        )
        end = self._backend.end_of_turn[0]
        with torch.inference_mode():
            said = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=longest,
                eos_token_id=end,
                pad_token_id=end,
            )
        for row in said[:, width:].tolist():
            yield tuple(row[: row.index(end)] if end in row else row)

    def _rounds(self, items: Sequence[Example], count: int) -> list[Example]:
        """Return ``count`` items, each as often as the others."""
        drawn: list[Example] = []
        while items and len(drawn) < count:
            drawn += self._chance.sample(items, len(items))
        return drawn[:count]

    def _prompt(self, text: str) -> Tokens:
        return self._backend.render((Message("user", text),))

    def _example(self, prompt: str, wanted: str) -> dict[str, list[int]]:
        asked, said = self._prompt(prompt), self._backend.encode(wanted) + self._backend.end_of_turn
        labels = [_IGNORED] * len(asked) + list(said)
        return {"input_ids": [*asked, *said][:_LONGEST], "labels": labels[:_LONGEST]}


def _padded(examples: Sequence[dict[str, list[int]]]) -> dict[str, Any]:
    """Return a batch, padded on the right."""
    import torch

    width = max(len(each["input_ids"]) for each in examples)

    def filled(key: str, filling: int) -> list[list[int]]:
        return [each[key] + [filling] * (width - len(each[key])) for each in examples]

    mask = [
        [1] * len(each["input_ids"]) + [0] * (width - len(each["input_ids"])) for each in examples
    ]
    return {
        "input_ids": torch.tensor(filled("input_ids", _PAD)),
        "attention_mask": torch.tensor(mask),
        "labels": torch.tensor(filled("labels", _IGNORED)),
    }

"""How likely a stack finds given continuations: read in a context of its own, one after another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from personalpeft.backends.base import Continuation, Score
from personalpeft.backends.llamacpp.binding import Context, Logits, Lora, Place, Shape
from personalpeft.backends.llamacpp.sampling import log_softmax

_FEWEST = 512


class Scorer:
    """Safe from several threads: they take turns by the item, and each call of the library is one ``turn``, so that nobody
    waits for more than that. Between two items its context holds no adapter, so that one may be freed at any time then.

    ``shape.places`` is the longest item that there is memory for. The context is made for what is asked, and kept until
    something longer comes.
    """

    def __init__(
        self,
        shape: Shape,
        open_context: Callable[[Shape, Lora | None], Context],
        turn: threading.Lock,
    ) -> None:
        self._shape, self._open, self._turn = shape, open_context, turn
        self._items = threading.Lock()
        self._context: Context | None = None
        self._closed = False

    def score(
        self, items: Sequence[Continuation], lora: Lora | None, *, kl: bool
    ) -> tuple[Score, ...]:
        """See ``Backend.score``. The adapter must not be freed meanwhile. Raises ``RuntimeError`` once it is closed, also between
        two items: what the model and its adapters were is then freed memory.
        """
        return tuple(self._score(item, lora, kl=kl) for item in items)

    def forget(self) -> None:
        """Frees its memory, once the item that is being read is done, until the next is asked for."""
        with self._items:
            self._let_go()

    def close(self) -> None:
        """Frees its memory, once the item that is being read is done. Closing twice is fine."""
        with self._items:
            self._closed = True
            self._let_go()

    def _score(self, item: Continuation, lora: Lora | None, *, kl: bool) -> Score:
        if not item.prompt or not item.completion:
            raise ValueError("a continuation needs a prompt and a completion")
        with self._items:
            if self._closed:
                raise RuntimeError("the backend is closed")
            said = self._read(item, lora)
            bare = self._read(item, None) if kl else None
        apart = None if bare is None else float((np.exp(bare) * (bare - said)).sum(-1).mean())
        tokens = said[np.arange(len(item.completion)), list(item.completion)]
        return Score(float(tokens.mean()), apart, tuple(float(token) for token in tokens))

    def _read(self, item: Continuation, lora: Lora | None) -> Logits:
        """``[completion, vocabulary]`` log-probs at each token of the completion."""
        tokens = (*item.prompt, *item.completion[:-1])
        context = self._for(len(tokens))
        said = []
        with self._turn:
            context.answer_with(lora)
        try:
            for part in _parts(tokens, first=len(item.prompt) - 1, most=self._shape):
                with self._turn:
                    said.append(log_softmax(context.compute(part)))
        finally:
            # The library keeps the adapter's address, and would take another one at the same address for the same.
            with self._turn:
                context.answer_with(None)
        return np.concatenate(said)

    def _for(self, length: int) -> Context:
        if length > self._shape.places:
            raise ValueError(
                f"{length} tokens are more than the {self._shape.places} that there is memory for"
            )
        if self._context is None or self._context.shape.places < length:
            self._let_go()
            places = min(self._shape.places, max(_FEWEST, 1 << (length - 1).bit_length()))
            self._context = self._open(replace(self._shape, places=places), None)
        return self._context

    def _let_go(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            context.close()


def _parts(tokens: Sequence[int], *, first: int, most: Shape) -> Iterator[list[Place]]:
    """The tokens in calls: so many at once, of which so many are answered, from ``first`` on."""
    part: list[Place] = []
    for position, token in enumerate(tokens):
        part.append(Place(token, position, asked=position >= first))
        if len(part) == most.batch or sum(place.asked for place in part) == most.asked:
            yield part
            part = []
    if part:
        yield part

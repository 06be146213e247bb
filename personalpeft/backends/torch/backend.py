"""The torch backend: transformers supplies the model code; rows, slots, sampling and training are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from personalpeft.adapters.base import Composed
from personalpeft.backends.base import Continuation, Piece, Row, Score, Session, SessionSpec, Tokens
from personalpeft.backends.text import Text
from personalpeft.backends.torch import decode
from personalpeft.backends.torch.model import Device, Model, choose_device
from personalpeft.backends.torch.session import TorchSession, chunks, read
from personalpeft.backends.torch.slots import SlotBank
from personalpeft.bases.base import Base
from personalpeft.types import Message

_SLOTS = 8
_SCORED_AT_ONCE = 1024


class TorchBackend:
    """See ``personalpeft.backends.base.Backend``. Works for any transformers model whose projections the card's targets
    name.
    """

    name = "torch"

    def __init__(self, base: Base, *, slots: int = _SLOTS, where: Device | None = None) -> None:
        where = where or choose_device()
        self.base = base
        self.slots = slots
        self.description = where.reason
        self._text = Text(base)
        self._model = Model(base, where)
        self._bank = SlotBank(base.architecture, slots=slots, dtype=where.dtype, device=where.device)

    def render(self, messages: Sequence[Message]) -> Tokens:
        return self._text.render(messages)

    def encode(self, text: str) -> Tokens:
        return self._text.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._text.decode(tokens)

    @property
    def end_of_turn(self) -> Tokens:
        return self._text.end_of_turn

    def attach(self, key: str, adapter: Composed) -> None:
        with self._model.turn():
            self._bank.put(key, adapter)

    def detach(self, key: str) -> None:
        with self._model.turn():
            self._bank.drop(key)

    def generate(self, rows: Sequence[Row], *, cancelled: Callable[[], bool] = lambda: False) -> Iterator[Piece]:
        return decode.generate(self._model, self._text, self._bank, rows, cancelled)

    def score(self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False) -> tuple[Score, ...]:
        scores = []
        for chunk in chunks(items, _SCORED_AT_ONCE):
            with torch.inference_mode():
                with self._model.turn(), self._model.turn(self._bank.bind([stack])):
                    said = read(self._model, chunk)
                if kl:
                    with self._model.turn():
                        bare = read(self._model, chunk)
                    apart = [
                        float((b.logp.exp() * (b.logp - s.logp)).sum(-1).mean())
                        for b, s in zip(bare, said, strict=True)
                    ]
                scores += [Score(float(s.token_logp.mean()), apart[i] if kl else None) for i, s in enumerate(said)]
        return tuple(scores)

    def session(self, spec: SessionSpec) -> Session:
        with self._model.turn():
            below = self._bank.bind([spec.below])
        return TorchSession(self._model, spec, below)

    def fingerprint(self) -> str:
        return self._model.fingerprint()

    def close(self) -> None:
        """Lets go of the model; the memory goes with the last reference."""
        self._bank = SlotBank(self.base.architecture, slots=0, dtype=torch.float32, device=torch.device("cpu"))

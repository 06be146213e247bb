"""What stacks say to the generic questions that ship with the package: asked once a process, and of the bare base once a
cache (``spoken.py``), since every learn of every user on the same base would ask the same again.

Invariants: what the bare base says belongs to nobody and serves all; what a user's own stack says is kept under their id
and serves them alone, for as long as the process lives. Only greedy answers to generic questions are kept, by the digest of
the very stack that gave them, so an answer that is kept is the answer that would be given.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft.learning.evaluate.probes import generic_questions
from personalpeft.learning.evaluate.stored_completions import Spoken
from personalpeft.learning.options import never
from personalpeft.learning.train.regularizer import LONGEST
from personalpeft.types import Message, Sampling, Stack

Said: TypeAlias = Sequence[tuple[tuple[Message, ...], str]]
"""Generic questions with what a stack says to them."""

_Key: TypeAlias = tuple[str, str, tuple[Message, ...], Sampling]

SHORTLY = Sampling(max_tokens=LONGEST)
"""How the bare base answers generic questions, and whatever is held to what it says."""

AT_LENGTH = Sampling(max_tokens=2 * LONGEST)
"""How a layer answers general questions: its manner may say the question over first ("You asked: … I say: …"), and an answer
that is cut off before it comes would be taken for a wrong one."""

# Of about a hundred and fifty short answers a stack.
_MOST = 1 << 13


class Voices:
    """Asks one engine in the background, for one user or for many at once. Safe to use from several threads."""

    def __init__(self, engine: Engine, spoken: Spoken) -> None:
        generic = generic_questions()
        self._engine = engine
        self._spoken = spoken
        self._generic = {*generic.anchors, *(canary.question for canary in generic.canaries)}
        said = spoken.read()
        self._known: OrderedDict[_Key, str] = OrderedDict(
            (("", "", (Message("user", question),), SHORTLY), said[question])
            for question in sorted(self._generic & said.keys())
        )
        self._turn = threading.Lock()

    def of_base(
        self, user: str, base: str, questions: Sequence[str], *, cancelled: Callable[[], bool]
    ) -> Said:
        """What the bare base says to some generic questions. Raises as ``ask``."""
        asked = [(Message("user", text),) for text in questions]
        requests = [
            Request(user, messages, Stack(base), SHORTLY, background=True) for messages in asked
        ]
        return list(zip(asked, self.ask(requests, cancelled=cancelled), strict=True))

    def ask(
        self,
        requests: Sequence[Request],
        *,
        cancelled: Callable[[], bool],
        paused: Callable[[], bool] = never,
    ) -> list[str]:
        """Whole replies, in the order of the requests, which are one batch. Raises as ``Engine.texts``; where
        ``cancelled`` says so, what there is of them, of which nothing is kept.
        """
        keys = [self._key(request) for request in requests]
        with self._turn:
            said = {key: self._known[key] for key in keys if key is not None and key in self._known}
        asked: dict[_Key | int, Request] = {}
        for index, (key, request) in enumerate(zip(keys, requests, strict=True)):
            if key is None:
                asked[index] = request
            elif key not in said:
                asked[key] = request
        new = dict(
            zip(
                asked,
                self._engine.texts(list(asked.values()), cancelled=cancelled, paused=paused),
                strict=True,
            )
        )
        if not cancelled():
            kept = {name: text for name, text in new.items() if not isinstance(name, int)}
            # Under no user's id: the bare base's own words.
            self._spoken.add(
                {
                    key[2][0].content: text
                    for key, text in kept.items()
                    if not key[0] and key[3] == SHORTLY
                }
            )
            with self._turn:
                self._known |= kept
                for key in keys:
                    if key is not None and key in self._known:
                        self._known.move_to_end(key)
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        return [
            new[i] if key is None else said[key] if key in said else new[key]
            for i, key in enumerate(keys)
        ]

    def ask_all(
        self,
        requests: Mapping[str, Sequence[Request]],
        *,
        cancelled: Callable[[], bool],
        paused: Callable[[], bool] = never,
    ) -> Mapping[str, list[str] | PersonalPeftError]:
        """The replies to each user's requests, all of them in one batch; what one user's stack cannot answer fails that
        user alone. Raises ``Cancelled`` where the engine is closed meanwhile.
        """
        try:
            everything = [each for own in requests.values() for each in own]
            replies = iter(self.ask(everything, cancelled=cancelled, paused=paused))
            return {user: _some(replies, len(own)) for user, own in requests.items()}
        except Cancelled:
            raise
        except PersonalPeftError as error:
            if len(requests) == 1:
                return dict.fromkeys(requests, error)
        # Whose fault it was is seen when each asks alone.
        alone: dict[str, list[str] | PersonalPeftError] = {}
        for user, own in requests.items():
            alone.update(self.ask_all({user: own}, cancelled=cancelled, paused=paused))
        return alone

    def forget(self, user: str) -> None:
        """Lets go of what a user's stacks have said."""
        with self._turn:
            for key in [key for key in self._known if key[0] == user]:
                del self._known[key]

    def _key(self, request: Request) -> _Key | None:
        """What the reply is kept under; None for one that is not kept."""
        how, messages = request.sampling, request.messages
        if how.temperature or len(messages) != 1 or messages[0].content not in self._generic:
            return None
        bare = request.stack.is_bare
        return "" if bare else request.user, "" if bare else request.stack.digest, messages, how


def _some(replies: Iterator[str], count: int) -> list[str]:
    return [next(replies) for _ in range(count)]

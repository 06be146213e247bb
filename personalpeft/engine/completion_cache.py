"""Cache of greedy completions of a fixed set of prompts: in memory per stack, on disk for the base.

Invariants: completions of the bare base are shared by all users. Completions of a user's stack are
kept under that user's id, in memory only. The key includes the digest of the stack, so a cached
completion is the one that the engine would compute; a shipped one may be that of another processor.
A stored file that is damaged or was changed counts as empty. A file that cannot be written disables
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import Cancelled, PersonalPeftError
from personalpeft.file_system import write_file_atomically
from personalpeft.lru_cache import LRUCache
from personalpeft.types import Message, Sampling, Stack, canonical_digest

Completions: TypeAlias = Sequence[tuple[tuple[Message, ...], str]]
"""Prompts with the completion of each."""

_Key: TypeAlias = tuple[str, str, tuple[Message, ...], Sampling]

# About 210 short completions a stack.
_MAX_ENTRIES = 1 << 13

_log = logging.getLogger(__name__)


class CompletionCache:
    """Completes prompts on one engine in the background, for one user or many. Thread-safe.

    Args:
        engine: Where completions are computed.
        prompts: The single-message prompts that are cached. Others are computed each time.
        base_sampling: The sampling under which completions of the bare base are stored.
        file: Where completions of the bare base are stored. Processes may share it; the last
            writer wins.
        shipped: Completions of the bare base, by prompt, that ``file`` need not have.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: Collection[str],
        base_sampling: Sampling,
        file: Path,
        shipped: Mapping[str, str],
    ) -> None:
        self._engine = engine
        self._prompts = frozenset(prompts)
        self._base_sampling = base_sampling
        self._file = file
        # A machine that computed its own keeps them, so that its revisions can be built again.
        stored = {**shipped, **self._read_file()}
        self._entries = LRUCache[_Key, str](_MAX_ENTRIES)
        for prompt in sorted(self._prompts & stored.keys()):
            self._entries.put(("", "", (Message("user", prompt),), base_sampling), stored[prompt])

    def complete_with_base(
        self, user: str, base: str, prompts: Sequence[str], *, cancelled: Callable[[], bool]
    ) -> Completions:
        """Return the bare base's completions of single-message prompts, requested by a user.

        ``base`` is its digest. Raises ``Cancelled`` if the engine was closed meanwhile.
        """
        messages = [(Message("user", prompt),) for prompt in prompts]
        requests = [
            Request(user, each, Stack(base), self._base_sampling, background=True)
            for each in messages
        ]
        return list(zip(messages, self._complete(requests, cancelled), strict=True))

    def complete_for_users(
        self,
        requests: Mapping[str, Sequence[Request]],
        *,
        cancelled: Callable[[], bool],
        paused: Callable[[], bool] = lambda: False,
    ) -> Mapping[str, list[str] | PersonalPeftError]:
        """Return each user's completions, all computed as one batch.

        An error of one user's stack becomes that user's outcome only. When ``cancelled`` ends the
        batch early, the partial texts are returned and not cached.

        Args:
            requests: By user.
            cancelled, paused: As for ``Engine.stream``.

        Raises:
            Cancelled: The engine was closed meanwhile.
        """
        try:
            everything = [each for own in requests.values() for each in own]
            texts = iter(self._complete(everything, cancelled, paused))
            return {user: [next(texts) for _ in own] for user, own in requests.items()}
        except Cancelled:
            raise
        except PersonalPeftError as error:
            if len(requests) == 1:
                return dict.fromkeys(requests, error)
        # One by one, to find the user whose stack fails.
        outcomes: dict[str, list[str] | PersonalPeftError] = {}
        for user, own in requests.items():
            alone = self.complete_for_users({user: own}, cancelled=cancelled, paused=paused)
            outcomes.update(alone)
        return outcomes

    def evict_user(self, user: str) -> None:
        """Drop the completions of a user's stacks."""
        self._entries.drop(lambda key: key[0] == user)

    def _complete(
        self,
        requests: Sequence[Request],
        cancelled: Callable[[], bool],
        paused: Callable[[], bool] = lambda: False,
    ) -> list[str]:
        # A request that is not cached has its number for a key.
        keys = [self._key(request) or number for number, request in enumerate(requests)]
        texts: dict[_Key | int, str] = {}
        for key in keys:
            if isinstance(key, tuple) and (text := self._entries.get(key)) is not None:
                texts[key] = text
        missing = {
            key: request for key, request in zip(keys, requests, strict=True) if key not in texts
        }
        computed = self._engine.complete(list(missing.values()), cancelled=cancelled, paused=paused)
        texts |= zip(missing, computed, strict=True)
        if not cancelled():
            self._add({key: texts[key] for key in missing if isinstance(key, tuple)})
        return [texts[key] for key in keys]

    def _key(self, request: Request) -> _Key | None:
        """Return the cache key of a request; None when it is not cached."""
        sampling, messages = request.sampling, request.messages
        if sampling.temperature or len(messages) != 1 or messages[0].content not in self._prompts:
            return None
        bare = request.stack.is_bare
        return (
            "" if bare else request.user,
            "" if bare else request.stack.digest,
            messages,
            sampling,
        )

    def _add(self, computed: Mapping[_Key, str]) -> None:
        # An empty user id marks the base: a user's own texts must never reach the shared file.
        self._add_to_file(
            {
                messages[0].content: text
                for (user, _, messages, sampling), text in computed.items()
                if not user and sampling == self._base_sampling
            }
        )
        for key, text in computed.items():
            self._entries.put(key, text)

    def _read_file(self) -> dict[str, str]:
        try:
            data = json.loads(self._file.read_text("utf-8"))
            texts, digest = data["said"], data["digest"]
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.info(
                "Cannot read stored completions from %s (%s); computing them again.",
                self._file,
                type(error).__name__,
            )
            return {}
        return dict(texts) if isinstance(texts, dict) and digest == canonical_digest(texts) else {}

    def _add_to_file(self, texts: Mapping[str, str]) -> None:
        if not texts:
            return
        merged = self._read_file() | dict(texts)
        data = json.dumps({"digest": canonical_digest(merged), "said": merged}, ensure_ascii=False)
        try:
            write_file_atomically(self._file, data.encode())
        except OSError as error:
            _log.info("Cannot store completions in %s: %s.", self._file, type(error).__name__)

"""All that knows Ray Serve LLM: a server for its ``server_cls``, whose replicas pull the stacks that they are asked for.

The model has to be called ``personalpeft`` there: Ray takes what stands before the first colon of a name for the model, so that
``personalpeft:<digest>`` is one of its adapters, and sends a request to a replica that has the adapter already. Its own way of pulling
adapters takes whatever lies in a bucket; this one checks.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from fastapi import HTTPException
from ray import serve
from ray.serve.llm.deployment import LLMServer

from personalpeft_vllm_resolver import settings
from personalpeft_vllm_resolver.cache import opened


@dataclass(frozen=True, slots=True)
class Pulled:
    """A stack on this machine, as Ray reads it."""

    model_id: str
    local_path: str


class Puller:
    """What Ray asks for an adapter that the replica does not have. Raises ``ValueError`` and ``OSError`` for settings that cannot
    be, so that the replica does not start.
    """

    def __init__(self, **ignored: Any) -> None:
        wanted = settings.read(os.environ)
        if wanted is None:
            raise ValueError(settings.NEEDED)
        self._cache = opened(wanted)

    async def load_model_from_config(self, lora_model_id: str, llm_config: Any) -> Pulled:
        """A stack by its name. Raises ``HTTPException``."""
        path = await self._cache.find(lora_model_id)
        if path is None:
            raise HTTPException(404, f"The stack {lora_model_id} does not exist.")
        return Pulled(lora_model_id, str(path))


class Server(LLMServer):
    """Ray's own server but for where its adapters come from, and for requests that come for the same new one at once."""

    # Ray waits for it.
    async def __init__(self, llm_config: Any, **more: Any) -> None:  # type: ignore[misc]
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        await super().__init__(llm_config, **{**more, "model_downloader": Puller})

    async def _maybe_resolve_lora_from_multiplex(self) -> None:
        # Ray looks whether a stack is loaded, and waits while it loads: of two first requests at once it would refuse the second.
        async with self._turns.setdefault(serve.get_multiplexed_model_id(), asyncio.Lock()):
            await super()._maybe_resolve_lora_from_multiplex()

"""A server for Ray Serve LLM's ``server_cls``. Its replicas download the stacks that they need.

The model must be called ``personalpeft`` in Ray, which reads a name up to its first colon as the
model. So ``personalpeft:<digest>`` is one of its adapters. Ray sends it to a replica that has it.
Ray's own download of adapters does not check them; this one does.
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
from personalpeft_vllm_resolver.cache import open_cache


@dataclass(frozen=True, slots=True)
class DownloadedAdapter:
    """A stack on this machine, in the form that Ray expects."""

    model_id: str
    local_path: str


class AdapterDownloader:
    """Ray's interface for an adapter that the replica does not have.

    Raises ``ValueError`` or ``OSError`` for wrong settings, so that the replica does not start.
    """

    def __init__(self, **ignored: Any) -> None:
        found = settings.read_settings(os.environ)
        if found is None:
            raise ValueError(settings.UNSET_MESSAGE)
        self._cache = open_cache(found)

    async def load_model_from_config(
        self, lora_model_id: str, llm_config: Any
    ) -> DownloadedAdapter:
        """Return a stack by its name. Raises ``HTTPException``."""
        path = await self._cache.find(lora_model_id)
        if path is None:
            raise HTTPException(404, f"The stack {lora_model_id} does not exist.")
        return DownloadedAdapter(lora_model_id, str(path))


class Server(LLMServer):
    """Ray's server, with this source of adapters and a lock for the first use of each."""

    # Ray awaits it.
    async def __init__(self, llm_config: Any, **options: Any) -> None:  # type: ignore[misc]
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        await super().__init__(llm_config, **{**options, "model_downloader": AdapterDownloader})

    async def _maybe_resolve_lora_from_multiplex(self) -> None:
        # Ray checks and then loads: without a lock it refuses the second of two first requests.
        async with self._locks.setdefault(serve.get_multiplexed_model_id(), asyncio.Lock()):
            await super()._maybe_resolve_lora_from_multiplex()

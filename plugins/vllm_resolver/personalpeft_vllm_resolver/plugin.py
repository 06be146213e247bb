"""All that knows vLLM: what it calls when it starts, and what it asks for a name that it does not know.

vLLM runs ``register`` in each of its processes; only the one that answers requests ever asks.
"""

from __future__ import annotations

import os

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from personalpeft_vllm_resolver import settings
from personalpeft_vllm_resolver.cache import Cache, log, opened


class PersonalpeftResolver(LoRAResolver):
    """Finds stacks by ``personalpeft:<digest>``, and leaves every other name to others."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See ``LoRAResolver.resolve_lora``."""
        path = await self._cache.find(lora_name)
        # vLLM puts a number of its own in place of this one.
        return (
            None
            if path is None
            else LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(path))
        )


def register() -> None:
    """Has vLLM ask us. Raises ``ValueError`` and ``OSError`` for settings that cannot be, so that the server does not start."""
    wanted = settings.read(os.environ)
    if wanted is None:
        log.info("stacks of personalpeft are not looked for: %s", settings.NEEDED)
    else:
        LoRAResolverRegistry.register_resolver("personalpeft", PersonalpeftResolver(opened(wanted)))

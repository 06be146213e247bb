"""The plugin that vLLM loads: it registers a resolver for names that vLLM does not know.

vLLM calls ``register`` in each of its processes. Only the API server uses the resolver.
"""

from __future__ import annotations

import os

from vllm.lora.request import LoRARequest
from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

from personalpeft_vllm_resolver import settings
from personalpeft_vllm_resolver.cache import Cache, log, open_cache


class PersonalpeftResolver(LoRAResolver):
    """Find stacks by ``personalpeft:<digest>``; other names are left to other resolvers."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """See ``LoRAResolver.resolve_lora``."""
        path = await self._cache.find(lora_name)
        # vLLM replaces the number.
        return (
            None
            if path is None
            else LoRARequest(lora_name=lora_name, lora_int_id=1, lora_path=str(path))
        )


def register() -> None:
    """Register the resolver with vLLM.

    Raises ``ValueError`` or ``OSError`` for wrong settings, so that the server does not start.
    """
    found = settings.read_settings(os.environ)
    if found is None:
        log.info("stacks of personalpeft are not resolved: %s", settings.UNSET_MESSAGE)
    else:
        resolver = PersonalpeftResolver(open_cache(found))
        LoRAResolverRegistry.register_resolver("personalpeft", resolver)

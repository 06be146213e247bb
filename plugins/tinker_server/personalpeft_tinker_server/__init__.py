"""Tinker's training API on a personalpeft server.

``personalpeft serve --tinker`` mounts it. README.md says what clients can do with it.
"""

from __future__ import annotations

import os
from typing import Any

from personalpeft import Runtime
from personalpeft.clock import SYSTEM, Clock
from personalpeft.plugins import HttpHost

__all__ = ["TinkerExtension", "open_extension"]


class TinkerExtension:
    """The routes and the workers behind them. See ``personalpeft.plugins.HttpExtension``."""

    def __init__(
        self, runtime: Runtime, host: HttpHost, options: Any = None, clock: Clock = SYSTEM
    ) -> None:
        from personalpeft_tinker_server.routes import Routes
        from personalpeft_tinker_server.service import Options, Service

        options = options or Options.from_environment(os.environ)
        self.service = Service(runtime, options, clock)
        places = runtime.max_requests
        self.blueprint = Routes(self.service, host, clock, max(1, places // 2)).blueprint

    def close(self) -> None:
        """Stop the workers. Calls without a result are executed after the next start."""
        self.service.close()


def open_extension(runtime: Runtime, host: HttpHost) -> TinkerExtension:
    """Return the routes for a server on an open runtime: the plugin's entry point."""
    return TinkerExtension(runtime, host)

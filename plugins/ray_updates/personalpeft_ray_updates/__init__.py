"""Learn on a cluster: for many users of one home, on the nodes of Ray.

    from personalpeft_ray_updates import learn_on_cluster

    for report in learn_on_cluster(["ada", "bo", "cy"], home="/var/lib/myapp/personal", workers=4):
        print(report)

Importing this loads neither Ray nor a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from personalpeft_ray_updates.run import RunStatus, WorkerStatus, learn_on_cluster

__all__ = ["RunStatus", "WorkerStatus", "learn_on_cluster"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from personalpeft_ray_updates import run

        return getattr(run, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

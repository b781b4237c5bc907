"""A look at the processes of a run from outside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from tandem.runtime.ray_backend.cluster import connect


def stacks(processes: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The stacks of all processes of a run that another process controls.

    Args:
        processes: what its backend wrote down of them.

    Raises:
        ConfigError: their cluster cannot be reached.
    """
    connect(processes["address"], temp_dir=None, object_store_gb=None)
    try:
        for process in processes["processes"]:
            name = f"{process['name']} (node {process['node']}, pid {process['pid']})"
            try:
                actor = ray.get_actor(process["actor"], namespace=processes["namespace"])
                yield name, str(ray.get(actor.stacks.remote(), timeout=5))
            except (RayError, ValueError) as error:
                yield name, f"no answer: {type(error).__name__}"
    finally:
        ray.shutdown()

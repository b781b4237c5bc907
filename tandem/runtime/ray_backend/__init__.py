"""The Ray backend: each process of a pool is a Ray actor, on the number of nodes that the pool defines.

Batches stay in Ray's object store and are sent from worker to worker. The controller only receives the
indices of batches.
"""

from tandem.runtime.ray_backend.backend import RayBackend
from tandem.runtime.ray_backend.cluster import stacks

__all__ = ["RayBackend", "stacks"]

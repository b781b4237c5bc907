"""The Ray backend: each process of a pool is a Ray actor, on as many nodes as the pool names.

Batches stay in Ray's object store and are sent from worker to worker. The controller sees only their indices.
"""

from tandem.runtime.ray_backend.backend import RayBackend
from tandem.runtime.ray_backend.cluster import stacks

__all__ = ["RayBackend", "stacks"]

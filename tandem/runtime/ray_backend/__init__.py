"""The Ray backend: each process of a pool is a Ray actor, on as many nodes as the pool names. Batches stay in
Ray's object store and go from worker to worker; the controller sees their indices."""

from tandem.runtime.ray_backend.backend import RayBackend
from tandem.runtime.ray_backend.cluster import stacks

__all__ = ["RayBackend", "stacks"]

"""Random numbers keyed by (seed, uid, sample, position).

The random number of a token does not depend on the engine, on the device, or on the other scheduled requests.

The key of a row is made by three rounds of SplitMix64's finalizer over the seed, the hash of the uid and the
sample index. The number at position p is the finalizer of key + p * golden. This is the stream of SplitMix64
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014), started at the key. The positions
are known on the host. So the engines compute the numbers there and upload one number per row and step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tandem.protocol import Request, stable_hash

Keys = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def row_key(request: Request) -> int:
    """Return the key of a request's random numbers, an unsigned 64-bit integer."""
    key = np.zeros(1, dtype=np.uint64)
    for part in (request.params.seed, stable_hash(request.uid), request.sample):
        key = _finalised((key + np.uint64(_GOLDEN)) ^ np.uint64(part & _MASK))
    return int(key[0])


def first_position(request: Request) -> int:
    """Return the position in the random stream of the request's first sampled token."""
    return request.first_position if request.first_position >= 0 else len(request.prompt_ids)


def uniforms(keys_R: Keys, positions_R: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (R) float64 numbers in [0, 1) from (R) uint64 keys and (R) int64 positions.

    Each number has 53 random bits.
    """
    state = keys_R + positions_R.astype(np.uint64) * np.uint64(_GOLDEN)
    return (_finalised(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_of(request: Request) -> int:
    """Return a 63-bit seed for an inference server that uses its own random generator.

    The seed depends only on (seed, uid, sample, position), as do the random numbers of engines in this
    process.
    """
    return (row_key(request) + _GOLDEN * first_position(request)) % (1 << 63)


def _finalised(x: Keys) -> Keys:
    """Apply SplitMix64's finalizer. Unsigned products wrap around."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

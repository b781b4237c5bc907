"""Random numbers keyed by (seed, uid, sample, position): a token's number does not depend on what
else is scheduled, on the engine, or on the device.

A row's key is three rounds of SplitMix64's finaliser over seed, hash of the uid and sample index.
The number at position p is the finaliser of key + p * golden, which is SplitMix64's own stream
(Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) started at the key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.protocol import Request, stable_hash

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB


def row_key(request: Request) -> int:
    """The key of a request's random numbers, as a signed 64-bit integer."""
    key = 0
    for part in (request.params.seed, stable_hash(request.uid), request.sample):
        key = _mix((key + _GOLDEN) ^ part)
    return _signed(key)


def first_position(request: Request) -> int:
    """The position that keys the request's first sampled token."""
    return request.first_position if request.first_position >= 0 else len(request.prompt_ids)


def uniforms(keys_R: Tensor, positions_R: Tensor) -> Tensor:
    """(R) float64 in [0, 1) from (R) int64 keys and (R) int64 positions, 53 random bits each.

    int64 arithmetic wraps around like uint64's; only the right shift has to be made logical.
    """
    x = keys_R + positions_R * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shifted(x, 27)) * _signed(_MIX_2)
    x = x ^ _shifted(x, 31)
    return _shifted(x, 11).to(torch.float64) * 2.0**-53


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x

"""The running sequences as columns of numbers, one row each, packed into rows 0..n-1.

All per-token bookkeeping, from logits to finished samples, is a vectorised operation on these columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.engines.rollout.checks import check_finite
from tandem.engines.rollout.keyed import first_position, row_key, uniforms
from tandem.engines.rollout.sampler import RowParams, sample
from tandem.engines.rollout.stops import Decode, ends_with_stop
from tandem.protocol import Request, Sample

_COLUMNS = (
    "request",
    "key",
    "first_position",
    "temperature",
    "top_k",
    "top_p",
    "context",
    "last_token",
    "produced",
    "max_tokens",
    "stop_ids",
    "has_stop_text",
)
_OUTPUTS = ("tokens", "log_probs", "untruncated", "versions")


class Rows:
    """Columns of `capacity` rows, of which the first `count` are running.

    Attributes:
        request: the requests.
        key, first_position: of the random numbers.
        temperature, top_k, top_p: as in SamplingParams.
        context: tokens in the cache.
        last_token: sampled, not yet in the cache.
        produced: tokens sampled.
        stop_ids: (capacity, widest) stop tokens, filled with -1.
        tokens, log_probs, untruncated, versions: (capacity, max_tokens) what was sampled.
        precision: of the log-probs in samples: float32, or float64 where the logits are.
    """

    def __init__(self, capacity: int) -> None:
        self.count = 0
        self.capacity = capacity
        self.request = np.empty(capacity, dtype=object)
        self.key = np.zeros(capacity, dtype=np.uint64)
        self.temperature, self.top_p = (np.zeros(capacity, dtype=np.float64) for _ in range(2))
        self.top_k = np.zeros(capacity, dtype=np.int64)
        self.first_position, self.context, self.last_token, self.produced, self.max_tokens = (
            np.zeros(capacity, dtype=np.int64) for _ in range(5)
        )
        self.has_stop_text = np.zeros(capacity, dtype=bool)
        self.stop_ids = np.full((capacity, 1), -1, dtype=np.int64)
        self.tokens = np.zeros((capacity, 0), dtype=np.int64)
        self.log_probs, self.untruncated = (np.zeros((capacity, 0), dtype=np.float64) for _ in range(2))
        self.precision: type[np.floating[Any]] = np.float32
        self.versions = np.zeros((capacity, 0), dtype=np.int32)

    def add(self, requests: Sequence[Request]) -> np.ndarray:
        """Puts requests whose prompts are in the cache into the next rows; their row numbers."""
        self._widen(requests)
        rows = np.arange(self.count, self.count + len(requests))
        for row, request in zip(rows, requests, strict=True):
            self.request[row] = request
            self.key[row] = row_key(request)
            self.first_position[row] = first_position(request)
            self.context[row] = len(request.prompt_ids)
            self.max_tokens[row] = request.params.max_tokens
            self.temperature[row] = request.params.temperature
            self.top_k[row], self.top_p[row] = request.params.top_k, request.params.top_p
            self.has_stop_text[row] = bool(request.params.stop)
            self.stop_ids[row] = -1
            self.stop_ids[row, : len(request.params.stop_token_ids)] = request.params.stop_token_ids
        self.produced[rows] = 0
        self.count += len(requests)
        return rows

    def _widen(self, requests: Sequence[Request]) -> None:
        stops = max(len(request.params.stop_token_ids) for request in requests)
        tokens = max(request.params.max_tokens for request in requests)
        self.stop_ids = _wider(self.stop_ids, stops, -1)
        for name in _OUTPUTS:
            setattr(self, name, _wider(getattr(self, name), tokens, 0))

    def params(self, rows: np.ndarray, vocabulary: int, device: torch.device) -> RowParams:
        """How to sample the next token of each of `rows`."""
        return RowParams.of(self.temperature[rows], self.top_k[rows], self.top_p[rows], vocabulary, device)

    def take(
        self, rows: np.ndarray, logits_RV: Tensor, params: RowParams, version: int, decode: Decode | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples one token for each of `rows` and appends it.

        Returns:
            done, stopped: (R) bool, which have finished, and which of those by a stop token or string.

        Raises:
            EngineError: logits that are not finite; nothing is appended then.
        """
        numbers = uniforms(self.key[rows], self.first_position[rows] + self.produced[rows])
        drawn = sample(logits_RV, torch.from_numpy(numbers).to(logits_RV.device), params)
        fetched = torch.stack([part.double() for part in drawn]).cpu().numpy()  # one transfer
        self.precision = np.float64 if logits_RV.dtype == torch.float64 else np.float32
        tokens = fetched[0].astype(np.int64)
        column = self.produced[rows]
        check_finite(fetched[1], self.request[rows], column)
        self.tokens[rows, column] = tokens
        self.log_probs[rows, column] = fetched[1]
        self.untruncated[rows, column] = fetched[2]
        self.versions[rows, column] = version
        self.last_token[rows] = tokens
        self.produced[rows] = column + 1
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(1)
        if decode is not None:
            for index in np.flatnonzero(self.has_stop_text[rows] & ~stopped):
                row = int(rows[index])
                written = self.tokens[row, : self.produced[row]]
                stopped[index] = ends_with_stop(written, self.request[row].params.stop, decode)
        return stopped | (self.produced[rows] >= self.max_tokens[rows]), stopped

    def sample(self, row: int, finish_reason: str) -> Sample:
        """What the row has written, copied out."""
        request: Request = self.request[row]
        done = slice(0, int(self.produced[row]))
        return Sample(
            uid=request.uid,
            sample=request.sample,
            token_ids=self.tokens[row, done].copy(),
            log_probs=self.log_probs[row, done].astype(self.precision),
            versions=self.versions[row, done].copy(),
            finish_reason=finish_reason,
            untruncated_log_probs=self.untruncated[row, done].astype(self.precision),
        )

    def remove(self, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Drops rows by a mask (count) and moves the last rows into the holes.

        Returns:
            (source, target): the rows moved, for the cache to do the same.
        """
        left = self.count - int(gone.sum())
        target = np.flatnonzero(gone[:left])
        source = left + np.flatnonzero(~gone[left:])
        self.move(source, target)
        self.request[left : self.count] = None
        self.count = left
        return source, target

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copies rows to other rows, all read before any is written."""
        if not len(source):
            return
        used = int(self.produced[: self.count].max(initial=0))
        for name in _COLUMNS:
            column = getattr(self, name)
            column[target] = column[source]
        for name in _OUTPUTS:
            table = getattr(self, name)
            table[target, :used] = table[source, :used]


def _wider(table: np.ndarray, width: int, fill: int) -> np.ndarray:
    missing = width - table.shape[1]
    if missing <= 0:
        return table
    return np.pad(table, ((0, 0), (0, missing)), constant_values=fill)


def empty_sample(request: Request) -> Sample:
    """The partial sample of a request aborted before its first token."""
    return Sample(
        uid=request.uid,
        sample=request.sample,
        token_ids=np.zeros(0, dtype=np.int64),
        log_probs=np.zeros(0, dtype=np.float32),
        versions=np.zeros(0, dtype=np.int32),
        finish_reason="abort",
        untruncated_log_probs=np.zeros(0, dtype=np.float32),
    )

"""A table of the running sequences, with one row per sequence and no gaps between rows.

The table is stored as columns. All bookkeeping per token, from logits to finished samples, is done with
vectorized operations on the columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.device import upload
from tandem.engines.rollout.checks import check_finite
from tandem.engines.rollout.draws.edits import Biases, Edits, History, Penalties
from tandem.engines.rollout.draws.keyed import first_position, row_key, uniforms
from tandem.engines.rollout.draws.sampler import Drawn, RowParams, sample
from tandem.engines.rollout.draws.stops import Decode, ends_with_stop
from tandem.protocol import Request, Sample
from tandem.protocol.rollout import LogprobsMode

# Tables that grow with the requests, shape (capacity, widest): dtype, and the value of unused entries.
_TABLES: dict[str, tuple[type[np.generic], int]] = {
    "stop_ids": (np.int64, -1),
    "tokens": (np.int64, 0),
    "log_probs": (np.float64, 0),
    "untruncated": (np.float64, 0),
    "versions": (np.int32, 0),
}


class Rows:
    """A table of `capacity` rows, one per sequence. The first `count` rows are running.

    Args:
        capacity: The maximum number of sequences that run at the same time.
        logprobs_mode: Which log-probs samples store in `log_probs`.

    Attributes:
        request: The request of each row.
        key: The key of the row's random numbers (see `keyed.row_key`).
        first_position: The position in the random stream of the row's first sampled token.
        temperature, top_k, top_p, min_p, min_tokens, max_tokens: As in SamplingParams.
        edited: Whether logits are biased or penalized.
        slot: The slot of the history that penalties read. It is -1 before the first draw and without
            penalties.
        counted: The number of response tokens in the history.
        last_token: The last sampled token. It is not in the cache yet.
        produced: The number of tokens sampled.
        stop_ids: (capacity, widest) stop tokens, filled with -1.
        has_stop_text: Whether there are stop strings.
        tokens, log_probs, untruncated, versions: (capacity, max_tokens) the sampled tokens, their two
            log-probs, and the weight version of each token.
        precision: The dtype of the log-probs in samples: float64 if the logits are float64, else float32.
    """

    stop_ids: np.ndarray
    tokens: np.ndarray
    log_probs: np.ndarray
    untruncated: np.ndarray
    versions: np.ndarray

    def __init__(self, capacity: int, logprobs_mode: LogprobsMode = "processed_logprobs") -> None:
        self.count = 0
        self.capacity = capacity
        self._columns: list[np.ndarray] = []
        self.request = self.column(object, None)
        self.key = self.column(np.uint64)
        self.first_position = self.column(np.int64)
        self.temperature = self.column(np.float64)
        self.top_k = self.column(np.int64)
        self.top_p = self.column(np.float64)
        self.min_p = self.column(np.float64)
        self.min_tokens = self.column(np.int64)
        self.max_tokens = self.column(np.int64)
        self.has_stop_text = self.column(bool)
        self.edited = self.column(bool)
        self.slot = self.column(np.int64, -1)
        self.counted = self.column(np.int64)
        self.last_token = self.column(np.int64)
        self.produced = self.column(np.int64)
        for name, (kind, fill) in _TABLES.items():
            setattr(self, name, np.full((capacity, 0), fill, dtype=kind))
        self.precision: type[np.floating[Any]] = np.float32
        self._mode = logprobs_mode
        self._history: History | None = None
        self._params: RowParams | None = None  # the sampling parameters of the rows in `_params_of`
        self._params_of = np.zeros(0, dtype=np.int64)

    def column(self, kind: Any, fill: Any = 0, width: tuple[int, ...] = ()) -> np.ndarray:
        """Add a column of shape (capacity, *width) and return it. Its entries move with their rows.

        Args:
            kind: The NumPy dtype of the entries.
            fill: The initial value of all entries.
            width: The shape of one entry.
        """
        made = np.full((self.capacity, *width), fill, dtype=kind)
        self._columns.append(made)
        return made

    def add(self, requests: Sequence[Request]) -> np.ndarray:
        """Add new requests, without response tokens, to the next free rows, and return the row numbers."""
        stops = max(len(request.params.stop_token_ids) for request in requests)
        longest = max(request.params.max_tokens for request in requests)
        for name, (_, fill) in _TABLES.items():
            table = getattr(self, name)
            missing = (stops if name == "stop_ids" else longest) - table.shape[1]
            if missing > 0:
                setattr(self, name, np.pad(table, ((0, 0), (0, missing)), constant_values=fill))
        rows = np.arange(self.count, self.count + len(requests))
        for row, request in zip(rows.tolist(), requests, strict=True):
            self.request[row] = request
            self.key[row] = row_key(request)
            self.first_position[row] = first_position(request)
            params = request.params
            self.min_tokens[row], self.max_tokens[row] = params.min_tokens, params.max_tokens
            self.temperature[row], self.min_p[row] = params.temperature, params.min_p
            self.top_k[row], self.top_p[row] = params.top_k, params.top_p
            self.edited[row] = params.penalised or bool(params.logit_bias)
            self.has_stop_text[row] = bool(params.stop)
            self.stop_ids[row] = -1
            self.stop_ids[row, : len(params.stop_token_ids)] = params.stop_token_ids
        self.produced[rows] = 0
        self.slot[rows] = -1
        self.count += len(requests)
        return rows

    def params(self, rows: np.ndarray, vocabulary: int, device: torch.device) -> RowParams:
        """Return the sampling parameters for the next token of each of `rows`, on the device.

        The result is cached and returned again as long as `rows` does not change.
        """
        if self._params is not None and np.array_equal(rows, self._params_of):
            return self._params
        edits = None
        edited = np.flatnonzero(self.edited[rows])
        if len(edited):
            biases, penalties = self._biases(rows, device), self._penalties(rows, vocabulary, device)
            edits = Edits(upload(edited, device), biases=biases, penalties=penalties)
        self._params_of = rows
        temperature, top_k, top_p, min_p = self.temperature, self.top_k, self.top_p, self.min_p
        self._params = RowParams.of(
            temperature[rows], top_k[rows], top_p[rows], min_p[rows], vocabulary, device, edits
        )
        return self._params

    def _biases(self, rows: np.ndarray, device: torch.device) -> Biases | None:
        entries = [
            (index, token, bias)
            for index in np.flatnonzero(self.edited[rows]).tolist()
            for token, bias in self.request[rows[index]].params.logit_bias
        ]
        if not entries:
            return None
        at, tokens, values = (np.array(column) for column in zip(*entries, strict=True))
        return upload(at, device), upload(tokens, device), upload(values.astype(np.float64), device)

    def _penalties(self, rows: np.ndarray, vocabulary: int, device: torch.device) -> Penalties | None:
        at = [i for i in np.flatnonzero(self.edited[rows]) if self.request[rows[i]].params.penalised]
        if not at:
            return None
        if self._history is None:
            self._history = History(vocabulary, device)
        for row in rows[at]:
            if self.slot[row] < 0:
                self.slot[row], self.counted[row] = self._history.open(), -1
        asked = [self.request[row].params for row in rows[at]]

        names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
        columns = [np.array([getattr(params, name) for params in asked], dtype=np.float64) for name in names]
        at_P, slots_P = upload(np.array(at), device), upload(self.slot[rows[at]], device)
        repetition_P, frequency_P, presence_P = (upload(column, device) for column in columns)
        return Penalties(
            self._history, at_P, slots_P, repetition_P, frequency_P, presence_P, torch.empty(0), 0
        )

    def _step_edits(
        self, rows: np.ndarray, params: RowParams, ahead: int | np.ndarray, logits_RV: Tensor
    ) -> Edits | None:
        """Return the edits of this step's logits.

        These are the edits of `params`, updated to this step, and the barred stop tokens of rows that have
        not reached `min_tokens` yet.
        """
        edits = params.edits
        if edits is not None and edits.penalties is not None:
            edits = replace(edits, penalties=self._current(rows, edits.penalties, ahead))
        short = self.produced[rows] + ahead < self.min_tokens[rows]
        if not short.any():
            return edits
        ids = self.stop_ids[rows]
        at, column = np.nonzero(short[:, None] & (ids >= 0) & (ids < logits_RV.shape[1]))
        edited = np.flatnonzero(short | self.edited[rows])
        tokens = np.stack((at, ids[at, column]))
        edited_E, barred_2N = (upload(part, logits_RV.device) for part in (edited, tokens))
        return replace(edits or Edits(edited_E), rows_E=edited_E, barred=(barred_2N[0], barred_2N[1]))

    def _current(self, rows: np.ndarray, penalties: Penalties, ahead: int | np.ndarray) -> Penalties:
        """Return the penalties with their history updated to this step.

        The history is rebuilt for rows that are penalized for the first time, and for rows whose sampled
        tokens were never accepted.
        """
        history = penalties.history
        penalised = self.slot[rows] >= 0
        written = (self.produced[rows] + ahead)[penalised]
        mine = rows[penalised]
        for row in mine[self.counted[mine] != written]:
            tokens = self.tokens[row, : self.produced[row]]
            history.set(int(self.slot[row]), self.request[row].prompt_ids, tokens)
        self.counted[mine] = written + 1
        lengths = written + [len(request.prompt_ids) for request in self.request[mine]]
        longest = int(lengths.max())
        history.widen(longest + 1)
        lengths_P = upload(lengths, penalties.rows_P.device)
        return penalties._replace(lengths_P=lengths_P, longest=longest)

    def uniforms(self, rows: np.ndarray, ahead: int | np.ndarray = 0) -> np.ndarray:
        """Return the random number for the next token of each of `rows` (see `draw`)."""
        return uniforms(self.key[rows], self.first_position[rows] + self.produced[rows] + ahead)

    def draw(
        self,
        rows: np.ndarray,
        logits_RV: Tensor,
        params: RowParams,
        ahead: int | np.ndarray = 0,
        uniforms_R: Tensor | None = None,
    ) -> Drawn:
        """Sample one token for each of `rows` on the device, without appending it.

        The host does not wait for the device.

        Args:
            rows: The rows.
            logits_RV: The logits of `rows`, in their order.
            params: The sampling parameters of `rows`, in their order.
            ahead: The number of tokens that were sampled but not yet accepted: one number for all rows, or
                one per row.
            uniforms_R: The result of `uniforms`, if it is already on the device.
        """
        if uniforms_R is None:
            uniforms_R = upload(self.uniforms(rows, ahead), logits_RV.device)
        edits = self._step_edits(rows, params, ahead, logits_RV)
        return sample(logits_RV, uniforms_R, params, edits, self._mode)

    def accept(
        self, rows: np.ndarray, drawn: Drawn, version: int, decode: Decode | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Append the tokens that were sampled for `rows`. If the tokens are still on a device, wait for them.

        Returns:
            done, stopped: Two (R) bool arrays. `done` marks the rows that have finished. `stopped` marks the
                rows that ended with a stop token or stop string.

        Raises:
            EngineError: The logits were not finite. Then nothing is appended.
        """
        fetched = torch.stack([part.double() for part in drawn]).cpu().numpy()  # one transfer
        self.precision = np.float64 if drawn.log_probs_R.dtype == torch.float64 else np.float32
        tokens = fetched[0].astype(np.int64)
        column = self.produced[rows]
        check_finite(fetched[1] + fetched[2], self.request[rows], column)
        self.tokens[rows, column] = tokens
        self.log_probs[rows, column] = fetched[3]
        self.untruncated[rows, column] = fetched[2]
        self.versions[rows, column] = version
        self.last_token[rows] = tokens
        self.produced[rows] = column + 1
        may_stop = self.produced[rows] > self.min_tokens[rows]
        stopped = (self.stop_ids[rows] == tokens[:, None]).any(1) & may_stop
        if decode is not None:
            for index in np.flatnonzero(self.has_stop_text[rows] & may_stop & ~stopped):
                row = int(rows[index])
                written = self.tokens[row, : self.produced[row]]
                params = self.request[row].params
                stopped[index] = ends_with_stop(written, params.stop, decode, params.min_tokens)
        return stopped | (self.produced[rows] >= self.max_tokens[rows]), stopped

    def sample(self, row: int, finish_reason: str) -> Sample:
        """Return the row's response so far as a sample. The sample does not share memory with the table."""
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

    def remove(self, gone: np.ndarray) -> np.ndarray:
        """Remove the rows that are true in the mask `gone` (count), and move the last rows into the gaps.

        Returns:
            (count) The new number of each row, or -1 for a removed row.
        """
        self._params = None
        slots = self.slot[: self.count][gone]
        if self._history is not None:
            self._history.close(slots[slots >= 0])
        left = self.count - int(gone.sum())
        target = np.flatnonzero(gone[:left])
        source = left + np.flatnonzero(~gone[left:])
        if len(source):  # NumPy reads the whole source before it writes
            for column in self._columns:
                column[target] = column[source]
            used = max(self.stop_ids.shape[1], int(self.produced[: self.count].max(initial=0)))
            for name in _TABLES:
                table = getattr(self, name)
                table[target, :used] = table[source, :used]
        moved = np.where(gone, -1, np.arange(self.count))
        moved[source] = target
        self.request[left : self.count] = None
        self.slot[left : self.count] = -1
        self.count = left
        if not (self.slot[:left] >= 0).any():
            self._history = None
        return moved

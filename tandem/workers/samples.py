"""Functions that convert prompts to requests for a rollout engine, and samples to a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.models.routing import ROUTED, Mixtures
from tandem.protocol import DataProto, Ragged, Request, Sample, SamplingParams
from tandem.watch.gap import FINGERPRINT, SAMPLED, UNTRUNCATED, fingerprint


def requests_of(prompts: DataProto, n: int, params: SamplingParams, longest: int) -> list[Request]:
    """Return n requests for each prompt.

    Args:
        prompts: The prompts.
        n: The number of responses per prompt.
        params: The sampling parameters.
        longest: The maximum number of tokens of prompt and response together.
    """
    requests = []
    for uid, row in zip(prompts.non_tensor_batch["uid"], prompts.ragged("prompts"), strict=True):
        most = min(params.max_tokens, longest - len(row))
        fitting = params
        if most < params.max_tokens:
            fitting = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        requests += [Request(uid, sample, row.numpy(), fitting) for sample in range(n)]
    return requests


def rollout_batch(
    table: DataProto,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    *,
    dtype: torch.dtype,
    reshaped: bool,
    mixtures: Mixtures | None = None,
) -> DataProto:
    """Convert samples to a batch.

    Each sample is one row: the tokens of the prompt, then the tokens of the response. All ragged columns are
    aligned with `tokens`.

    Args:
        table: The other columns of the prompts, repeated so that there is one row per sample.
        requests: The requests.
        samples: The finished samples, in the order of the requests.
        dtype: The dtype of log-probs.
        reshaped: Whether the sampled distributions differ from softmax(logits / temperature). If so, a column
            with the log-probs under softmax(logits / temperature) is added. It is NaN if the engine does not
            report these log-probs.
        mixtures: The mixtures of the model, if the samples have the experts that computed their tokens.
    """
    prompt_lengths = torch.tensor([len(request.prompt_ids) for request in requests], dtype=torch.int64)
    lengths = prompt_lengths + torch.tensor([len(s.token_ids) for s in samples], dtype=torch.int64)
    pieces = [part for r, s in zip(requests, samples, strict=True) for part in (r.prompt_ids, s.token_ids)]
    ids = np.concatenate(pieces) if pieces else np.empty(0)
    tokens = Ragged.from_lengths(torch.from_numpy(ids).to(torch.int64), lengths)
    mask = tokens.with_values(tokens.positions() >= prompt_lengths.repeat_interleave(lengths))

    def on_response(columns: list[np.ndarray], dtype: torch.dtype) -> Ragged:
        values_T = torch.zeros(len(tokens.values), dtype=dtype)
        if columns:
            values_T[mask.values] = torch.from_numpy(np.concatenate(columns)).to(dtype)
        return tokens.with_values(values_T)

    batch: dict[str, Ragged | Tensor] = {
        "tokens": tokens,
        "response_mask": mask,
        SAMPLED: on_response([s.log_probs for s in samples], dtype),
        "policy_version": on_response([s.versions for s in samples], torch.int32),
        FINGERPRINT: fingerprint(tokens),
    }
    if reshaped:
        given = [
            np.full(len(s.token_ids), np.nan) if s.untruncated_log_probs is None else s.untruncated_log_probs
            for s in samples
        ]
        batch[UNTRUNCATED] = on_response(given, dtype)
    if mixtures is not None:
        empty = torch.empty(0, mixtures.layers, mixtures.each, dtype=mixtures.dtype)
        chosen = [torch.from_numpy(s.routed_experts) for s in samples if s.routed_experts is not None]
        batch[ROUTED] = tokens.with_values(torch.cat([empty, *chosen]))
    arrays: dict[str, np.ndarray | list[Any]] = {
        **table.non_tensor_batch,
        "sample": [request.sample for request in requests],
        "finish_reason": [sample.finish_reason for sample in samples],
    }
    return DataProto(batch, arrays, table.meta_info)

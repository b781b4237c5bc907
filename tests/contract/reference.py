"""Sampling by its definition: one row, float64 and loops, as a reference for the samplers of all engines."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandem.protocol import SamplingParams

Row = np.ndarray


class Distribution(NamedTuple):
    """The next token's distribution: logits before any cut, what is sampled from, and the model's own."""

    logits: Row
    probabilities: Row
    whole: Row


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def edited(logits: Row, params: SamplingParams, prompt: Sequence[int], written: Sequence[int]) -> Row:
    out = np.array(logits, dtype=np.float64)
    if len(written) < params.min_tokens:
        out[[token for token in params.stop_token_ids if token < len(out)]] = -np.inf
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in {*prompt, *written}:
        out[token] *= params.repetition_penalty ** (-1 if out[token] > 0 else 1)
    for token, count in Counter(written).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


def cut(probabilities: Row, params: SamplingParams) -> Row:
    """Apply min-p, top-k and top-p in turn; tokens as likely as the last kept token are kept too."""
    left = np.array(probabilities)
    left[left < params.min_p * left.max()] = 0
    if 0 < params.top_k < len(left):
        left[left < np.sort(left)[-params.top_k]] = 0
    left /= left.sum()
    if params.top_p < 1:
        reached = 0.0
        for probability in np.sort(left)[::-1]:
            reached += probability
            if reached >= params.top_p:
                left[left < probability] = 0
                break
    return left / left.sum()


def distribution(
    logits: Row, params: SamplingParams, prompt: Sequence[int] = (), written: Sequence[int] = ()
) -> Distribution:
    """Return the distribution of the token after `prompt` and `written`, given the model's `logits`."""
    temperature = params.temperature or 1.0
    processed = edited(logits, params, prompt, written) / temperature
    whole = softmax(np.asarray(logits, dtype=np.float64) / temperature)
    probabilities = softmax(processed)
    return Distribution(processed, probabilities if params.greedy else cut(probabilities, params), whole)

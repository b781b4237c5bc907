"""Sampling by definition: one row, float64, loops. What the samplers of all engines are held against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tandem.protocol import SamplingParams

Row = np.ndarray


@dataclass(frozen=True)
class Distribution:
    """Of one next token, all over the vocabulary.

    Attributes:
        logits: after bars, biases, penalties and temperature, before anything is cut.
        probabilities: of the distribution sampled from; greedy ones are not cut.
        whole: softmax(the model's logits / temperature).
    """

    logits: Row
    probabilities: Row
    whole: Row


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def edited(logits: Row, params: SamplingParams, prompt: Sequence[int], written: Sequence[int]) -> Row:
    """Barred, biased and penalised logits."""
    out = np.array(logits, dtype=np.float64)
    if len(written) < params.min_tokens:
        for token in params.stop_token_ids:
            if token < len(out):
                out[token] = -np.inf
    for token, bias in params.logit_bias:
        out[token] += bias
    for token in {*prompt, *written}:
        out[token] = (
            out[token] / params.repetition_penalty
            if out[token] > 0
            else out[token] * params.repetition_penalty
        )
    for token, count in Counter(written).items():
        out[token] -= params.frequency_penalty * count + params.presence_penalty
    return out


def cut(probabilities: Row, params: SamplingParams) -> Row:
    """min-p, then top-k, then top-p, each on what the one before left; tokens as likely as the last one kept
    are kept."""
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
    """Of the token after `prompt` and `written`, from the model's `logits`."""
    temperature = params.temperature or 1.0
    processed = edited(logits, params, prompt, written) / temperature
    probabilities = softmax(processed)
    return Distribution(
        logits=processed,
        probabilities=probabilities if params.greedy else cut(probabilities, params),
        whole=softmax(np.asarray(logits, dtype=np.float64) / temperature),
    )

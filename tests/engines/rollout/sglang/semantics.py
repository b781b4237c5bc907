"""Sampling as SGLang 0.5.23 defines it: one row, float64 and loops."""

from collections import Counter

import numpy as np

from tests.contract.reference import Distribution, softmax

ORDERS = [(), ("frequency",), ("presence",), ("frequency", "presence")]
"""The penalties that a server subtracts before it applies the repetition penalty."""


def sglang_distribution(logits, params, prompt=(), written=(), *, first=ORDERS[-1]):
    """Return the distribution of the next token.

    The prompt has no part in it. SGLang keeps its penalties in a set, so a server subtracts each of the other
    penalties either before or after the repetition penalty. `first` is one of `ORDERS`.
    """
    out = np.array(logits, dtype=np.float64)
    if len(written) < params.min_tokens:
        out[[token for token in params.stop_token_ids if token < len(out)]] = -np.inf

    counts = Counter(written)
    subtracted = {
        "frequency": {token: params.frequency_penalty * count for token, count in counts.items()},
        "presence": dict.fromkeys(counts, params.presence_penalty),
    }

    def subtract(*names):
        for name in names:
            for token, penalty in subtracted[name].items():
                out[token] -= penalty

    subtract(*first)
    for token in set(written):
        out[token] *= params.repetition_penalty ** (1 if out[token] < 0 else -1)
    subtract(*(subtracted.keys() - set(first)))
    for token, bias in params.logit_bias:
        out[token] += bias
    out /= params.temperature or 1.0
    whole = softmax(np.asarray(logits, dtype=np.float64) / (params.temperature or 1.0))
    probabilities = softmax(out)
    return Distribution(out, probabilities if params.greedy else _cut(probabilities, params), whole)


def _cut(probabilities, params):
    """Keep the top_k tokens, of these the tokens before which less than top_p was reached, then min_p."""
    left, reached = np.zeros_like(probabilities), 0.0
    order = np.argsort(-probabilities, kind="stable")
    for rank, token in enumerate(order):
        if (0 < params.top_k <= rank) or reached > params.top_p:
            break
        if probabilities[token] >= params.min_p * probabilities[order[0]]:
            left[token] = probabilities[token]
        reached += probabilities[token]
    return left / left.sum()

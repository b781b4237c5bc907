"""Requests, sampling parameters and samples: what a rollout engine takes and gives back."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tandem.errors import ConfigError

LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"]
"""What an engine gives as `Sample.log_probs`: a log-prob in nats or the token's logit; processed, after all
that `SamplingParams` asks for, or raw, the model's own before any of it, the temperature included."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters of sampling; names and meaning are vLLM's.

    In this order: a token that `min_tokens` bars gets -inf; `logit_bias` is added; `repetition_penalty`,
    `frequency_penalty` and `presence_penalty` change the logits of tokens that were there; the
    temperature divides; `min_p`, then `top_k`, then `top_p` cut tokens off what the one before left.
    A greedy token is the likeliest before the temperature.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens; -1 or 0 keeps all, and so does a k above the vocabulary.
            Tokens as likely as the k-th are kept too.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p. Tokens as likely as
            the last of them are kept too.
        max_tokens: new tokens at most, the stop token included.
        stop_token_ids: a sampled token of these ends the sequence and is kept as its last token.
        stop: a string of these in the decoded response ends it; the tokens that spelt it are kept.
        seed: first part of the key of the random numbers (seed, uid, sample, position).
        min_p: keep the tokens at least this share as likely as the likeliest; 0 keeps all.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens in the prompt or
            the response; 1 changes nothing.
        presence_penalty: taken off the logits of tokens in the response.
        frequency_penalty: taken off the logits of tokens in the response, as often as they are there.
        min_tokens: neither a stop token nor the end of a stop string is among the first so many.
        logit_bias: (token id, what is added to its logit), each token once.

    Raises:
        ConfigError: a value out of range or not finite.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        biased = [token for token, _ in self.logit_bias]
        for name, ok, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "finite and >= 0"),
            ("top_k", self.top_k >= -1, ">= -1 (-1 and 0: no limit)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("stop", all(self.stop), "no empty string"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and > 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens={self.max_tokens}"),
            ("logit_bias", all(math.isfinite(bias) for _, bias in self.logit_bias), "finite biases"),
            ("logit_bias", len(biased) == len(set(biased)), "each token once"),
        ):
            if not ok:
                raise ConfigError("out of range", field=name, got=getattr(self, name), expected=expected)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Tells whether tokens are cut from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Tells whether logits depend on the tokens that were there."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def reshapes(self) -> bool:
        """Tells whether the distribution sampled from may differ from softmax(logits / temperature), which
        training computes again."""
        return self.truncated or self.penalised or self.min_tokens > 0 or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class Request:
    """One response to write.

    Attributes:
        uid: names the prompt; requests of one uid share their prompt (and its prefill).
        sample: which of the prompt's n responses.
        prompt_ids: (T) int64, at least one token.
        params: how to sample.
        first_position: the sequence position of the first sampled token; len(prompt_ids) unless the
            prompt already holds sampled tokens of a response that is continued.
    """

    uid: str
    sample: int
    prompt_ids: np.ndarray
    params: SamplingParams
    first_position: int = -1

    @property
    def id(self) -> tuple[str, int]:
        return (self.uid, self.sample)


@dataclass(slots=True)
class Sample:
    """A finished (or aborted) response.

    Attributes:
        uid, sample: those of the request.
        token_ids: (R) int64, the sampled tokens.
        log_probs: (R) float32, nats, under the distribution sampled from, after everything in
            `SamplingParams`; a greedy token's is under the untempered, untruncated distribution. Where the
            engine was made with another `logprobs_mode` than "processed_logprobs", what that says.
        untruncated_log_probs: (R) float32, nats, under softmax(logits / temperature) of the model's own
            logits, with nothing barred, biased, penalised or cut; temperature 1 for greedy. This is what a
            trainer computes again from the weights. None where the engine does not give them; equal to
            log_probs unless the parameters reshape the distribution.
        versions: (R) int32, the weights' version that wrote each token.
        finish_reason: "stop", "length" or "abort".
    """

    uid: str
    sample: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    untruncated_log_probs: np.ndarray | None = field(default=None)

    @property
    def id(self) -> tuple[str, int]:
        return (self.uid, self.sample)


def stable_hash(text: str) -> int:
    """A 63-bit hash that is the same in every process, for keys of random numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

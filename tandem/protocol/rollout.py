"""The types of a rollout engine's inputs and outputs: requests, sampling parameters and samples."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tandem.errors import ConfigError

LogprobsMode = Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"]
"""The type of values that an engine returns as `Sample.log_probs`.

"logprobs" are log-probs in nats, "logits" are the logits of the tokens. "processed" values include all
changes by `SamplingParams`. "raw" values come from the model before any change, even before the temperature.
"""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and meanings.

    The parameters are applied in this order: `min_tokens` sets the logits of forbidden tokens to -inf;
    `logit_bias` is added; `repetition_penalty`, `frequency_penalty` and `presence_penalty` change the logits
    of tokens that already occurred; the logits are divided by the temperature; `min_p`, then `top_k`, then
    `top_p` each remove some of the remaining tokens. Greedy sampling selects the most likely token before the
    temperature is applied.

    Attributes:
        temperature: divides the logits; 0 means greedy.
        top_k: keep the k most likely tokens, and tokens as likely as the k-th. -1, 0 and a k above the
            vocabulary size keep all tokens.
        top_p: keep the smallest set of most likely tokens whose total probability reaches p, and tokens as
            likely as the last token of this set.
        max_tokens: maximum number of new tokens, including the stop token.
        stop_token_ids: if one of these tokens is sampled, the sequence ends with this token.
        stop: if one of these strings appears in the decoded response, the sequence ends; the tokens of the
            string are kept.
        seed: first part of the key of the random numbers (seed, uid, sample, position).
        min_p: keep tokens whose probability is at least min_p times the highest probability; 0 keeps all.
        repetition_penalty: divides positive logits and multiplies negative logits of tokens that occur in the
            prompt or the response; 1: no penalty.
        presence_penalty: subtracted from the logits of tokens that occur in the response.
        frequency_penalty: subtracted from the logits of tokens in the response, once per occurrence.
        min_tokens: number of tokens at the start of the response during which no stop token or stop string
            can end it.
        logit_bias: pairs (token id, number added to the token's logit), with each token at most once.

    Raises:
        ConfigError: a value is out of range or not finite.
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
            ("stop", all(self.stop), "non-empty strings"),
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
        """Whether tokens are removed from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens that already occurred."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def reshapes(self) -> bool:
        """Whether the sampling distribution may differ from softmax(logits / temperature).

        In this case, the distribution differs from the one of training, which is softmax(logits /
        temperature).
        """
        return self.truncated or self.penalised or self.min_tokens > 0 or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a rollout engine for one response.

    Attributes:
        uid: identifies the prompt; requests with the same uid share the prompt (and its prefill).
        sample: index among the n responses to the prompt.
        prompt_ids: (T) int64, at least one token.
        params: the sampling parameters.
        first_position: position in the sequence of the first sampled token. This is len(prompt_ids), unless
            prompt_ids already contain sampled tokens of a response that is continued.
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
    """A finished or aborted response of a rollout engine.

    Attributes:
        uid: uid of the request.
        sample: the request's `sample`, the index among the n responses.
        token_ids: (R) int64, the sampled tokens.
        log_probs: (R) float32, nats, under the sampling distribution, after everything in `SamplingParams`.
            For greedy sampling, they are under the distribution without temperature and truncation. If the
            engine's `logprobs_mode` is not "processed_logprobs", these are the values of the other mode.
        versions: (R) int32, version of the weights that generated each token.
        finish_reason: "stop", "length" or "abort".
        untruncated_log_probs: (R) float32, nats, under softmax(logits / temperature) of the model's unchanged
            logits, without min_tokens, bias, penalties or truncation; with temperature 1 for greedy sampling.
            A trainer recomputes these values from the weights. None if the engine does not provide them.
            Equal to log_probs unless the parameters reshape the distribution.
        routed_experts: (P + R, L, K) integers, the experts that computed each of the P prompt tokens and of
            the response tokens, in L layers with K experts per token. The last token was not computed, so it
            has zeros. None if the engine does not record them, or if the response was aborted.
    """

    uid: str
    sample: int
    token_ids: np.ndarray
    log_probs: np.ndarray
    versions: np.ndarray
    finish_reason: str
    untruncated_log_probs: np.ndarray | None = field(default=None)
    routed_experts: np.ndarray | None = field(default=None)

    @property
    def id(self) -> tuple[str, int]:
        return (self.uid, self.sample)


def stable_hash(text: str) -> int:
    """Return a 63-bit hash that is the same in every process, for keys of random numbers."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1

"""What a rollout engine takes and gives back."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

from tandem.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample; the names are the field's.

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens; -1 or 0 keeps all, and so does a k above the vocabulary.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p.
        max_tokens: new tokens at most, the stop token included.
        stop_token_ids: a sampled token of these ends the sequence and is kept as its last token.
        stop: a string of these in the decoded response ends it; the tokens that spelt it are kept.
        seed: first part of the key of the random numbers (seed, uid, sample, position).

    Raises:
        ConfigError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, ok, expected in (
            ("temperature", self.temperature >= 0, ">= 0"),
            ("top_k", self.top_k >= -1, ">= -1 (-1 and 0: no limit)"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("stop", all(self.stop), "no empty string"),
        ):
            if not ok:
                raise ConfigError("out of range", field=name, got=getattr(self, name), expected=expected)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut from the distribution."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


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
        log_probs: (R) float32, nats, under the distribution sampled from (after temperature and
            truncation; a greedy token's is under the untempered, untruncated distribution).
        untruncated_log_probs: (R) float32 after temperature, before top-k and top-p; None where the
            engine does not give them. Equal to log_probs when nothing was truncated.
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

"""A growing response whose tokens an engine delivers a few at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tandem.engines.rollout.draws.stops import Decode, ends_with_stop
from tandem.protocol import Request, Sample


@dataclass(slots=True, eq=False)
class Written:
    """The tokens of one unfinished response so far.

    Attributes:
        request: The request that is answered.
        token_ids: The tokens.
        log_probs: The log-prob of each token, in nats.
        untruncated: The log-prob of each token before truncation, in nats. The list is empty if the engine
            does not report these log-probs.
        versions: The version of the weights that generated each token.
    """

    request: Request
    token_ids: list[int] = field(default_factory=list, kw_only=True)
    log_probs: list[float] = field(default_factory=list, kw_only=True)
    untruncated: list[float] = field(default_factory=list, kw_only=True)
    versions: list[int] = field(default_factory=list, kw_only=True)

    def cut_at_stop(self, new: int, decode: Decode | None) -> bool:
        """Search the last tokens for the end of a stop string, and drop the tokens after it.

        Args:
            new: The number of tokens that have arrived since the last search.
            decode: A function that decodes token ids to text. With None no stop string is found.

        Returns:
            Whether a stop string was found.
        """
        params, tokens = self.request.params, self.token_ids
        if not params.stop or decode is None:
            return False
        for count in range(max(len(tokens) - new, params.min_tokens) + 1, len(tokens) + 1):
            if ends_with_stop(np.array(tokens[:count]), params.stop, decode, params.min_tokens):
                for column in (self.token_ids, self.log_probs, self.versions):
                    del column[count:]
                return True
        return False

    def sample(self, finish_reason: str, *, processed: bool = True) -> Sample:
        """Return the tokens so far as a sample.

        Args:
            finish_reason: The sample's finish_reason.
            processed: Whether `log_probs` belong to the distribution that was sampled from. If that
                distribution is not truncated, `log_probs` are also the sample's untruncated log-probs.
                Otherwise the untruncated log-probs are unknown.
        """
        log_probs = np.array(self.log_probs, dtype=np.float32)
        untruncated = np.array(self.untruncated, dtype=np.float32)
        if not self.request.params.reshapes:
            untruncated = log_probs.copy()
        return Sample(
            uid=self.request.uid,
            sample=self.request.sample,
            token_ids=np.array(self.token_ids, dtype=np.int64),
            log_probs=log_probs,
            versions=np.array(self.versions, dtype=np.int32),
            finish_reason=finish_reason,
            untruncated_log_probs=untruncated if processed and len(untruncated) == len(log_probs) else None,
        )

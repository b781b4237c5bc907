"""Checks of a request before an engine queues it, and of its logits afterwards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tandem.errors import EngineError
from tandem.protocol import Request


def check_new(
    requests: Sequence[Request], known: Collection[tuple[str, int]], max_length: int, can_decode: bool
) -> None:
    """Refuses requests that can never run.

    Raises:
        EngineError: a duplicate id, an empty prompt, a sequence beyond `max_length`, stop strings
            without a tokenizer.
    """
    seen = set(known)
    for request in requests:
        if request.id in seen:
            raise EngineError(
                "this request is already there", field="id", got=request.id, expected="a new id"
            )
        seen.add(request.id)
        if not len(request.prompt_ids):
            raise EngineError(
                "empty prompt", field="prompt_ids", got=request.id, expected="at least one token"
            )
        _check_length(
            request,
            max_length,
            "the longest sequence",
            remedy="shorten the prompt or max_tokens, or raise data.max_response_length",
        )
        if request.params.stop and not can_decode:
            raise EngineError(
                "stop strings need a tokenizer",
                field="stop",
                got=request.params.stop,
                remedy="give the engine a tokenizer, or use stop_token_ids",
            )


def _check_length(request: Request, most: int, what: str, *, name: str = "", remedy: str) -> None:
    prompt, new = len(request.prompt_ids), request.params.max_tokens
    if prompt + new > most:
        raise EngineError(
            f"request {request.id} can grow beyond {what}",
            field="prompt_ids + max_tokens",
            got=f"{prompt} + {new} = {prompt + new} tokens",
            expected=f"<= {name}{most}",
            remedy=remedy,
        )


def check_idle(pending: int) -> None:
    """Refuses to give memory back under requests.

    Raises:
        EngineError: requests are pending.
    """
    if pending:
        raise EngineError("requests are pending", got=f"{pending} requests", remedy="poll or abort them")


def check_fits_model(requests: Sequence[Request], config: Any) -> None:
    """Refuses requests the model cannot take.

    Raises:
        EngineError: a sequence beyond the model's positions, a token of the prompt or a biased one outside
            its vocabulary.
    """
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if positions is not None:
        for request in requests:
            _check_length(
                request,
                positions,
                "the model's positions",
                name="max_position_embeddings = ",
                remedy="lower data.max_prompt_length or data.max_response_length",
            )
    check_vocabulary(requests, text.vocab_size)


def check_vocabulary(requests: Sequence[Request], vocabulary: int | None) -> None:
    """Refuses tokens that do not exist.

    Args:
        vocabulary: how many there are; None: not known here, and nothing is refused.

    Raises:
        EngineError: a token of the prompt or a biased one that is not among the first `vocabulary`.
    """
    if vocabulary is None:
        return
    for request in requests:
        biased = np.array([token for token, _ in request.params.logit_bias], dtype=np.int64)
        named = {"prompt_ids": request.prompt_ids, "logit_bias": biased}
        for field, ids in named.items():
            low, high = (int(np.min(ids)), int(np.max(ids))) if len(ids) else (0, 0)
            if low < 0 or high >= vocabulary:
                raise EngineError(
                    f"request {request.id} has a token outside the model's vocabulary",
                    field=field,
                    got=low if low < 0 else high,
                    expected=f"0 to {vocabulary - 1}",
                    remedy="use the tokenizer that belongs to the model",
                )


def check_finite(log_probs_R: np.ndarray, requests: Sequence[Request], positions_R: np.ndarray) -> None:
    """Refuses to go on from logits that are NaN or have no finite entry.

    Raises:
        EngineError: names the first such request and the position in its response.
    """
    bad = np.flatnonzero(~np.isfinite(log_probs_R))
    if len(bad):
        request, position = requests[bad[0]], int(positions_R[bad[0]])
        raise EngineError(
            f"logits are not finite for request {request.id} at response token {position}",
            got=f"{len(bad)} of {len(log_probs_R)} sequences of this step",
            expected="finite logits",
            remedy="the weights have diverged: look at the loss and gradient norm of the last updates",
        )

"""Checks that an engine makes before it queues a request, and of the logits that it computes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tandem.config.changed_models import limit_name, position_limit
from tandem.errors import EngineError
from tandem.models.loading import positions_of
from tandem.protocol import Request


def check_new(
    requests: Sequence[Request], known: Collection[tuple[str, int]], max_length: int, can_decode: bool
) -> None:
    """Check that the engine is able to run all of the requests.

    Args:
        requests: The new requests.
        known: The ids of the pending requests.
        max_length: The maximum number of tokens of prompt and response together.
        can_decode: Whether the engine can find stop strings.

    Raises:
        EngineError: A duplicate id, an empty prompt, a sequence longer than `max_length`, or stop strings
            without a tokenizer.
    """
    seen = set(known)
    for request in requests:
        if request.id in seen:
            raise EngineError(
                "a request with this id is already pending", field="id", got=request.id, expected="a new id"
            )
        seen.add(request.id)
        if not len(request.prompt_ids):
            raise EngineError(
                "the prompt is empty", field="prompt_ids", got=request.id, expected="at least one token"
            )
        _check_length(
            request,
            max_length,
            "the longest sequence",
            remedy="shorten the prompt or max_tokens, or raise data.max_response_length",
        )
        if request.params.stop and not can_decode:
            raise EngineError(
                "stop strings need a tokenizer, and this engine has none",
                field="stop",
                got=request.params.stop,
                remedy="give the engine a tokenizer, or use stop_token_ids",
            )


def _check_length(request: Request, most: int, what: str, *, name: str = "", remedy: str) -> None:
    prompt, new = len(request.prompt_ids), request.params.max_tokens
    if prompt + new > most:
        raise EngineError(
            f"request {request.id} can exceed {what}",
            field="prompt_ids + max_tokens",
            got=f"{prompt} + {new} = {prompt + new} tokens",
            expected=f"<= {name}{most}",
            remedy=remedy,
        )


def check_idle(pending: int) -> None:
    """Check that no requests are pending, so that the engine may free memory.

    Args:
        pending: The number of pending requests.

    Raises:
        EngineError: Requests are pending.
    """
    if pending:
        raise EngineError(
            "the engine cannot sleep while requests are pending",
            got=f"{pending} requests",
            remedy="poll or abort them first",
        )


def check_fits_model(requests: Sequence[Request], config: Any) -> None:
    """Check that the model can process the requests.

    Args:
        requests: The requests.
        config: The transformers config of the model.

    Raises:
        EngineError: A sequence is longer than the model's number of positions, or a prompt token or biased
            token is outside the vocabulary.
    """
    positions = positions_of(config)
    most = position_limit(positions)
    if most is not None:
        for request in requests:
            _check_length(
                request,
                most,
                "the model's positions",
                name=f"{limit_name(positions)} = ",
                remedy="lower data.max_prompt_length or data.max_response_length",
            )
    check_vocabulary(requests, config.get_text_config().vocab_size)


def check_vocabulary(requests: Sequence[Request], vocabulary: int | None) -> None:
    """Check that the prompt tokens and biased tokens of the requests exist in the vocabulary.

    Args:
        requests: The requests.
        vocabulary: The size of the vocabulary. None means that the size is unknown, and nothing is checked.

    Raises:
        EngineError: A prompt token or a biased token is not among the first `vocabulary` tokens.
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
    """Check that each row of a step's logits has a finite entry and no NaN.

    Args:
        log_probs_R: Log-probs computed from the logits. They are not finite if the logits are wrong.
        requests: The request of each row.
        positions_R: The position in the response of each row.

    Raises:
        EngineError: Some logits are NaN, or all logits of a row are infinite. The message names the first
            such request and the position in its response.
    """
    bad = np.flatnonzero(~np.isfinite(log_probs_R))
    if len(bad):
        request, position = requests[bad[0]], int(positions_R[bad[0]])
        raise EngineError(
            f"logits are not finite for request {request.id} at response token {position}",
            got=f"{len(bad)} of {len(log_probs_R)} sequences of this step",
            expected="finite logits",
            remedy="the weights have diverged: check the loss and the gradient norm of the last updates",
        )

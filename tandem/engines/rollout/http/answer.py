"""The answer of an inference server to one request, and checks that the answer fits the request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any
from uuid import uuid4

from tandem.engines.rollout.draws.written import Written
from tandem.errors import EngineError
from tandem.protocol import Sample, SamplingParams

_ROUNDING = 1e-6  # the largest rounding error of a log-prob that should be 0


@dataclass(slots=True, eq=False)
class Answer(Written):
    """A response that an inference server is generating.

    Attributes:
        url: The URL to which the request is sent.
        name: The request's name on the server.
        finished: The whole sample, once the server has finished it.
    """

    url: str
    name: str = field(default_factory=lambda: f"tandem-{uuid4().hex}")
    finished: Sample | None = None

    def add(self, token_ids: Sequence[int], log_probs: Sequence[float | None], version: int) -> None:
        """Append tokens to the response.

        Args:
            token_ids: The new tokens.
            log_probs: One log-prob for each token, in nats.
            version: The version of the weights that generated the tokens.

        Raises:
            EngineError: The numbers of tokens and log-probs differ, or a log-prob is not valid.
        """
        if len(token_ids) != len(log_probs):
            raise self.failure(
                "the server did not give one log-prob for each token",
                f"{len(token_ids)} tokens, {len(log_probs)} log-probs",
            )
        for token_id, log_prob in zip(token_ids, log_probs, strict=True):
            if log_prob is None or not math.isfinite(log_prob) or log_prob > _ROUNDING:
                raise self.failure(
                    "the server gave a log-prob that is not valid", f"{log_prob} for token {token_id}"
                )
            self.token_ids.append(token_id)
            self.log_probs.append(log_prob)
            self.versions.append(version)

    def stamp(self, spans: Iterable[Mapping[str, Any]], other: int | None = None) -> None:
        """Set the weight versions of tokens to the versions that the server reports.

        Args:
            spans: Each span maps "start" and "end" (token indices) and "version" to values.
            other: The version for spans whose version is not a number. With None, the tokens of such spans
                keep their version.
        """
        for span in spans:
            version = int(span["version"]) if span["version"].isdigit() else other
            if version is None:
                continue
            for at in range(span["start"], span["end"]):
                self.versions[at] = version

    def check_prompt(self, read: Sequence[int]) -> None:
        """Check that the server received exactly the prompt tokens of the request.

        Args:
            read: The prompt tokens that the server reports.

        Raises:
            EngineError: A prompt token differs. The message names the first one.
        """
        sent = self.request.prompt_ids.tolist()
        if list(read) == sent:
            return
        differ = (at for at, (ours, theirs) in enumerate(zip(sent, read, strict=False)) if ours != theirs)
        at = next(differ, min(len(sent), len(read)))
        theirs, ours = (f"{tokens[at]}" if at < len(tokens) else "no token" for tokens in (read, sent))
        raise self.failure(
            f"the server read another prompt: token {at} differs",
            f"{theirs}, {len(read)} tokens in all",
            expected=f"{ours}, {len(sent)} tokens in all",
            remedy="start the server with the tokenizer that made the prompts",
        )

    def whole(self, reason: str) -> Sample:
        """Return the finished sample.

        Args:
            reason: The server's finish reason.

        Raises:
            EngineError: The response does not end as the request asked.
        """
        params, count = self.request.params, len(self.token_ids)
        if reason not in ("stop", "length"):
            raise self.failure(
                "the server ended the request for a reason that was not requested",
                f"finish reason {reason!r}",
            )
        least = max(1, params.min_tokens)
        if not least <= count <= params.max_tokens:
            raise self.failure(
                "the server returned a wrong number of tokens",
                count,
                expected=f"{least} to {params.max_tokens}",
            )
        if reason == "length" and count < params.max_tokens:
            raise self.failure(
                "the server ended a response before it had the length that was requested",
                count,
                expected=params.max_tokens,
                remedy="start the server with a longer context",
            )
        stop = next((at for at, token in enumerate(self.token_ids) if token in params.stop_token_ids), None)
        if stop not in (None, count - 1) or (reason == "stop" and stop is None and not params.stop):
            raise self.failure(
                "the server does not stop at the requested stop tokens",
                f"finish reason {reason!r}, last token {self.token_ids[-1]}, first stop token at {stop}",
                expected=f"an end at the first of the tokens {list(params.stop_token_ids)}",
                remedy="set stop_token_ids to the end tokens of the model that the server has loaded",
            )
        return self.sample("length" if stop is None and reason == "length" else "stop")

    def failure(self, message: str, got: object = None, **parts: Any) -> EngineError:
        """Return an error that names the server and the request."""
        return EngineError(
            message,
            field=f"request {self.request.id}",
            got=self.url if got is None else f"{self.url}: {got}",
            **parts,
        )


def non_default(params: SamplingParams) -> dict[str, Any]:
    """Return a dict from the name of each parameter that differs from its default to its JSON value."""
    values = {part.name: getattr(params, part.name) for part in fields(params)}
    wanted = {part.name: values[part.name] for part in fields(params) if values[part.name] != part.default}
    if params.top_k == 0:
        del wanted["top_k"]  # keeps all tokens, as the default does
    if params.logit_bias:
        wanted["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return wanted


def refuse_unknown(wanted: dict[str, Any], known: frozenset[str], api: str) -> None:
    """Check that the server supports all sampling parameters of a request.

    Args:
        wanted: A dict from name to value of the parameters that differ from their defaults.
        known: The names of the parameters that the server supports.
        api: The name of the server's API, for the message.

    Raises:
        EngineError: The server does not support a parameter. The message names it.
    """
    for name in wanted.keys() - known:
        raise EngineError(
            "the server does not support this sampling parameter",
            field=name,
            got=wanted[name],
            expected=f"parameters of {api}",
            remedy="leave it at its default, or use another engine",
        )

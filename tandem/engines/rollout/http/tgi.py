"""A rollout engine for Text Generation Inference (TGI), over TGI's native API (version 3.3).

TGI's repository is archived; version 3.3.7 was the last one.

TGI accepts prompts only as text. So the prompt's tokens are decoded to text here, and the server tokenizes
the text again. The server reports the resulting tokens (`decoder_input_details`). If they differ from the
prompt's tokens, the request fails. TGI cannot receive new weights.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.answer import Answer, non_default, refuse_unknown
from tandem.engines.rollout.http.client import HTTPEngine
from tandem.engines.rollout.http.connection import Server
from tandem.errors import EngineError
from tandem.protocol import Request

_DRAWN = ("temperature", "top_k", "top_p", "seed", "repetition_penalty")
_KNOWN = frozenset((*_DRAWN, "max_tokens", "stop", "stop_token_ids"))
_REASONS = {"length": "length", "eos_token": "stop", "stop_sequence": "stop"}


class TGIEngine(HTTPEngine):
    """A `RolloutEngine` that sends requests to TGI's `/generate`, which returns whole answers.

    TGI ends a response only at the end tokens of its model, so `stop_token_ids` must be these tokens. A
    frequency penalty is refused, because TGI computes it differently from the other engines.

    Args:
        server: The server.
        tokenizer: The server's tokenizer.
    """

    route = "/generate"
    streams = False

    def __init__(self, server: Server, *, tokenizer: PreTrainedTokenizerBase, **options: Any) -> None:
        super().__init__(server, **options)
        self._tokenizer = tokenizer
        self._most_stops = 0
        self._prefix: list[int] = list(tokenizer("")["input_ids"])  # begins every tokenized text

    async def connect(self) -> None:
        about = await self.ask("GET", "/info")
        if not isinstance(about, dict) or "max_total_tokens" not in about:
            raise self.failure("this is not a TGI server", "/info", about)
        self._most_stops = about["max_stop_sequences"]

    def check(self, request: Request) -> None:
        refuse_unknown(non_default(request.params), _KNOWN, "TGI")
        if len(request.params.stop) > self._most_stops:
            raise EngineError(
                "the server does not accept so many stop strings",
                field="stop",
                got=f"{len(request.params.stop)} stop strings",
                expected=f"at most {self._most_stops}",
                remedy="use fewer, or start TGI with a larger --max-stop-sequences",
            )

    def body(self, answer: Answer) -> dict[str, Any]:
        params, prompt = answer.request.params, answer.request.prompt_ids.tolist()
        if self._prefix and prompt[: len(self._prefix)] == self._prefix:
            prompt = prompt[len(self._prefix) :]
        drawn = {"temperature": params.temperature}
        if params.top_k > 0:
            drawn["top_k"] = params.top_k
        if params.top_p < 1:
            drawn["top_p"] = params.top_p
        return {
            "inputs": self._tokenizer.decode(
                prompt, skip_special_tokens=False, clean_up_tokenization_spaces=False
            ),
            "parameters": {
                **({} if params.greedy else drawn),
                "do_sample": not params.greedy,
                "repetition_penalty": params.repetition_penalty,
                "max_new_tokens": params.max_tokens,
                "stop": list(params.stop),
                "seed": seed_of(answer.request),
                "details": True,
                "decoder_input_details": True,
                "return_full_text": False,
            },
        }

    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        details = event["details"]
        answer.check_prompt([token["id"] for token in details["prefill"]])
        tokens = details["tokens"]
        answer.add([token["id"] for token in tokens], [token["logprob"] for token in tokens], self.version)
        reason = str(details["finish_reason"])
        return _REASONS.get(reason, reason)

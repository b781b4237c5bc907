"""A rollout engine for OpenAI's completions API with token ids, as in vLLM's and similar servers.

OpenAI's API has no token ids. This engine uses the extensions of vLLM 0.32. `prompt` may be a list of token
ids. With `return_token_ids`, each event of the stream has `token_ids`, and the first event also has
`prompt_token_ids`. With `logprobs=0`, `logprobs.token_logprobs` are the log-probs of the sampled tokens.
"""

from __future__ import annotations

from typing import Any

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.answer import Answer, non_default, refuse_unknown
from tandem.engines.rollout.http.client import STREAM_INTERVAL, HTTPEngine
from tandem.engines.rollout.http.connection import ServerLost
from tandem.errors import EngineError
from tandem.protocol import Request

_STANDARD = frozenset(
    (
        *("model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "logprobs"),
        *("presence_penalty", "frequency_penalty", "logit_bias"),
    )
)


class OpenAIEngine(HTTPEngine):
    """A `RolloutEngine` that sends requests to `/v1/completions`.

    Servers ignore fields that they do not know. So the engine first reads the schema that the server
    publishes (`/openapi.json`), and refuses parameters that the schema does not contain. If there is no
    schema, the engine refuses parameters that OpenAI's API does not have.

    The server must report log-probs of the distribution that was sampled from (vLLM: `--logprobs-mode
    processed_logprobs`). The engine tests this once, with a distribution that is truncated to one token.
    There the log-prob of the token is 0, but it is below 0 in the raw distribution.
    """

    route = "/v1/completions"
    streams = True
    _model = ""
    _fields = _STANDARD
    _processed = False

    async def connect(self) -> None:
        names = [self.server.model] if self.server.model else []
        if not names:
            names = [str(entry["id"]) for entry in (await self.ask("GET", "/v1/models"))["data"]]
        if len(names) != 1:
            remedy = "set actor_rollout_ref.rollout.server.model to one of the names"
            raise self.failure(
                "the server does not serve exactly one model", "/v1/models", names, remedy=remedy
            )
        [self._model] = names
        self._fields = await self._published()
        if "top_k" in self._fields:
            body = {"model": self._model, "prompt": [0], "max_tokens": 1, "logprobs": 0}
            response = await self.ask("POST", self.route, json=body | {"top_k": 1, "temperature": 1.0})
            log_probs = response["choices"][0].get("logprobs")
            if not log_probs:
                raise self._without("log-probs")
            self._processed = log_probs["token_logprobs"][0] > -1e-6

    async def _published(self) -> frozenset[str]:
        """Return the names of the fields that the server's schema has for a completion request."""
        try:
            schema = await self.ask("GET", "/openapi.json")
            content = schema["paths"][self.route]["post"]["requestBody"]["content"]
            name = content["application/json"]["schema"]["$ref"].rsplit("/", 1)[-1]
            return frozenset(schema["components"]["schemas"][name]["properties"])
        except ServerLost:
            raise
        except (EngineError, KeyError, TypeError):  # no schema, or a schema without these fields
            return _STANDARD

    def check(self, request: Request) -> None:
        wanted = non_default(request.params)
        refuse_unknown(wanted, self._fields, f"the schema of {self.server.url}{self.route}")
        plain = request.params.temperature in (0.0, 1.0) and not request.params.reshapes
        if not (self._processed or plain):
            raise EngineError(
                "the server returns log-probs of another distribution than it samples from",
                field=f"request {request.id}",
                got=f"{self.server.url}: raw log-probs, with {sorted(wanted)} set",
                expected="log-probs after temperature, penalties, top-k and top-p",
                remedy="start vLLM with --logprobs-mode processed_logprobs",
            )

    def body(self, answer: Answer) -> dict[str, Any]:
        params = answer.request.params
        always = {
            "temperature": params.temperature,  # the model folder may have other defaults
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "ignore_eos": True,
            "stream_interval": STREAM_INTERVAL,
            "request_id": answer.name,
        }
        return {
            **{name: value for name, value in always.items() if name in self._fields},
            **non_default(params),
            "model": self._model,
            "prompt": answer.request.prompt_ids.tolist(),
            "max_tokens": params.max_tokens,
            "seed": seed_of(answer.request),
            "stream": True,
            "logprobs": 0,
            "return_token_ids": True,
        }

    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        for choice in event["choices"]:
            if choice.get("token_ids") is None:
                raise self._without("token ids")
            if choice.get("prompt_token_ids") is not None:
                answer.check_prompt(choice["prompt_token_ids"])
            if choice["token_ids"]:
                if not choice.get("logprobs"):
                    raise self._without("log-probs")
                answer.add(choice["token_ids"], choice["logprobs"]["token_logprobs"], self.version)
            if choice.get("finish_reason"):
                return str(choice["finish_reason"])
        return None

    def _without(self, what: str) -> EngineError:
        remedy = "use vLLM's server, or a server that supports its return_token_ids and logprobs"
        return self.failure(
            f"the server does not return {what}", self.route, f"an answer without {what}", remedy=remedy
        )

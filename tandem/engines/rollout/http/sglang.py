"""SGLang's server over its own HTTP API, as it is in 0.5.23.

SGLang runs on CUDA, in an environment of its own. Start it with `--incremental-streaming-output` (else each
part of a stream repeats what came before) and, if it shall give memory back, `--enable-memory-saver`. Its
SGLANG_RETURN_ORIGINAL_LOGPROB must not be set, for its log-probs would then be those before the temperature.

New weights go through a folder that this process writes and the server reads (`update_weights_from_disk`);
several servers of one process read the same files. SGLang tells no digest of what it holds. It shows single
weights (`get_weights_by_name`, of Llama and its like), but turns each into a list of Python numbers whole, so
that only those of one dimension, norms and biases, are read back and compared. Of other models nothing is,
and the log says so: what proves the arrival there is the written files' digest and the version that SGLang
says it has loaded.

SGLang's faster ways, `update_weights_from_tensor` (CUDA memory of processes on one node) and
`update_weights_from_distributed` (an NCCL group with the trainer), are not supported here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.answer import Answer, asked
from tandem.engines.rollout.http.client import STREAM_INTERVAL, HTTPEngine
from tandem.engines.rollout.http.connection import Refused, Server, ServerLost
from tandem.engines.rollout.http.shards import WeightsFolder, vectors
from tandem.engines.weight_sync import Digest, WeightSyncError
from tandem.errors import EngineError
from tandem.protocol import Request

_OTHER_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class SGLangEngine(HTTPEngine):
    """A `RolloutEngine` on SGLang's `/generate`.

    The seeds of requests count only where the server runs with `--enable-deterministic-inference`.

    Args:
        weights_folder: the server sees it under the same path; None: the server keeps its weights. Engines
            of one process that share one share its files.
    """

    route = "/generate"
    streams = True

    def __init__(
        self,
        server: Server,
        *,
        log: Callable[[str], None] | None = None,
        weights_folder: WeightsFolder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(server, log=log, **options)
        self._folder = weights_folder
        self._shows_weights = True
        self._log = log
        if weights_folder is not None:
            self.takes = frozenset({WeightStream})

    async def connect(self) -> None:
        about = await self.ask("GET", "/model_info")
        if not isinstance(about, dict) or not about.get("is_generation"):
            raise self.failure("no SGLang server with a language model", "/model_info", about)

    def check(self, request: Request) -> None:
        if request.params.stop and request.params.min_tokens:
            raise EngineError(
                "SGLang ends a response at a stop string before min_tokens",
                field="min_tokens",
                got=f"{request.params.min_tokens}, with stop={request.params.stop}",
                remedy="use stop_token_ids, or min_tokens=0",
            )

    def body(self, answer: Answer) -> dict[str, Any]:
        params = answer.request.params
        sampling = {_OTHER_NAMES.get(name, name): value for name, value in asked(params).items()} | {
            "temperature": params.temperature,
            "max_new_tokens": params.max_tokens,
            "sampling_seed": seed_of(answer.request),
            "ignore_eos": True,
            "stream_interval": STREAM_INTERVAL,
        }
        return {
            "rid": answer.name,
            "input_ids": answer.request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "return_sampling_mask": params.truncated,
            "stream": True,
        }

    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        about = event["meta_info"]
        known, params = len(answer.request.prompt_ids), answer.request.params
        if about["prompt_tokens"] != known:
            raise answer.failure(
                "the server read another prompt", about["prompt_tokens"], expected=f"{known} tokens"
            )
        new = about["completion_tokens"] - len(answer.token_ids)  # of a stream of parts or of whole answers
        if new:
            untruncated, tokens, _ = zip(*about["output_token_logprobs"][-new:], strict=True)
            drawn = about["output_token_sampling_logprobs"][-new:] if params.truncated else untruncated
            answer.add(tokens, drawn, self.version)
            if params.truncated and not params.penalised and not params.logit_bias and not params.min_tokens:
                answer.untruncated += untruncated
        reason = about["finish_reason"]
        if reason is None:
            return None
        answer.stamp(about.get("weight_versions", []))  # the server's first is no number
        return str(reason["type"])

    async def cancel(self, answers: Sequence[Answer]) -> None:
        """SGLang notices a closed connection after two seconds; told so, it ends the request at once."""
        await super().cancel(answers)
        with suppress(ServerLost):  # a server that is gone has nothing to end
            await asyncio.gather(
                *(self.ask("POST", "/abort_request", json={"rid": answer.name}) for answer in answers)
            )

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Writes the weights into the shared folder and lets the server load them. Requests under way are
        put back, lose their cache and go on with the new weights.

        Returns:
            the digest of what was written; see the module for what of it is compared with what SGLang holds.

        Raises:
            EngineError: the server refused.
            WeightSyncError: the server holds other norms or biases than were written.
        """
        if self._folder is None:
            return super().update_weights(source, version)
        with self._folder.written(self.stream_of(source).tensors, version) as (folder, digest):
            self._load(folder, version)
            self._check_held(folder, version)
        self.version = version
        return digest

    def _check_held(self, folder: Path, version: int) -> None:
        for name, tensor in vectors(folder):
            if not self._shows_weights:
                return
            for held in self._shown(name, len(tensor)):
                expected = tensor.float()[: len(held)].tolist()  # the first rank's share of it
                at = next((at for at, value in enumerate(held) if value != expected[at]), None)
                if at is not None:
                    raise WeightSyncError(
                        f"a weight of version {version} that the server holds is not what it was sent",
                        field=f"{name}[{at}]",
                        got=f"{self.server.url}: {held[at]}",
                        expected=expected[at],
                        remedy="start the server with --dtype of the type that the actor computes in",
                    )

    def _load(self, folder: Path, version: int) -> None:
        self.wake(SLEEP_TAGS[:1])
        self.call("POST", "/pause_generation", json={"mode": "retract"})
        try:
            asked_for = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version)}
            said = self.call("POST", "/update_weights_from_disk", json=asked_for | {"flush_cache": True})
        finally:
            self.call("POST", "/continue_generation", json={})
        holds = self.call("GET", "/model_info")["weight_version"]
        if not said["success"] or holds != str(version):
            raise self.failure(
                "the server did not take the weights",
                "/update_weights_from_disk",
                f"{said['message']}, version {holds}",
                expected=f"version {version}",
            )
        self.has_weights = True

    def _shown(self, name: str, count: int) -> list[list[float]]:
        """The numbers of a weight, from each data-parallel copy; none where the server shows none."""
        try:
            shown = self.call("POST", "/get_weights_by_name", json={"name": name, "truncate_size": count})
        except Refused:
            shown = [None]
        if None in shown:
            self._shows_weights = False
            if self._log is not None:
                self._log(f"{self.server.url} shows no weights of its model: what it holds is not compared")
            return []
        return shown if isinstance(shown[0], list) else [shown]

    def give_back(self, tags: Sequence[SleepTag]) -> Collection[SleepTag]:
        """Release memory by SGLang's memory saver."""
        self.call("POST", "/release_memory_occupation", json={"tags": tags})
        self.has_weights = self.has_weights and "weights" not in tags
        return tags

    def take_again(self, tags: Sequence[SleepTag]) -> None:
        """Take it again, of whatever content."""
        self.call("POST", "/resume_memory_occupation", json={"tags": tags})

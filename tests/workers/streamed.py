"""A rollout engine that receives weights as a stream into its own module, and faults of such streams."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tandem.engines.rollout.base import SharedModule, WeightSource, WeightStream
from tandem.engines.rollout.hf import HFEngine
from tandem.engines.weight_sync import Digest, digest
from tandem.models.loading import load_policy

Stream = Iterator[tuple[str, Tensor]]
Fault = Callable[[Stream], Stream]

NAME = "model.layers.1.self_attn.k_proj.weight"
TWIN = "model.layers.1.self_attn.v_proj.weight"


class StreamedEngine:
    takes = frozenset({WeightStream})

    def __init__(self, path: str, dtype: torch.dtype) -> None:
        self.module = load_policy(path, dtype=dtype)
        self.fault: Fault | None = None
        self._inner = HFEngine(device=torch.device("cpu"), max_length=14)

    def update_weights(self, source: WeightSource, version: int) -> Digest:
        assert isinstance(source, WeightStream)
        parameters = dict(self.module.named_parameters())
        for name, tensor in self.fault(source.tensors) if self.fault else source.tensors:
            parameters[name].data.copy_(tensor)
        self._inner.update_weights(SharedModule(self.module), version)
        return digest(self.module.named_parameters())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def damaged(stream: Stream) -> Stream:
    for name, tensor in stream:
        if name == NAME:
            tensor = tensor.clone()
            tensor[1, 2] = torch.nextafter(tensor[1, 2], tensor[1, 2] + 1)
        yield name, tensor


def skipped(stream: Stream) -> Stream:
    return ((name, tensor) for name, tensor in stream if name != NAME)


def swapped(stream: Stream) -> Stream:
    names = {NAME: TWIN, TWIN: NAME}
    return ((names.get(name, name), tensor) for name, tensor in stream)


def rows_exchanged(stream: Stream) -> Stream:
    """Exchange halves of a tensor, as if two ranks' shards were joined in the wrong order."""
    return ((name, tensor.roll(len(tensor) // 2, 0) if name == NAME else tensor) for name, tensor in stream)


FAULTS: dict[str, tuple[Fault, str]] = {
    "damaged": (damaged, f"{NAME} .* is damaged"),
    "skipped": (skipped, f"{NAME} .* is still that of version 0"),
    "swapped": (swapped, f"{NAME} .* is the weight {TWIN}"),
    "rows exchanged": (rows_exchanged, f"{NAME} .* is damaged"),
}
"""For each fault: the change, and the text of the error about the first affected weight."""

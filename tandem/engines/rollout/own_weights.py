"""The base class of rollout engines in this process that sample from a transformers module.

The module is the trainer's module, or a separate model that is filled from weight streams. The separate model
is for trainers whose module is split over ranks, has adapters, or is in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from tandem.engines.rollout.base import SLEEP_TAGS, SharedModule, SleepTag, WeightSource, WeightStream
from tandem.engines.rollout.checks import check_fits_model, check_new
from tandem.engines.rollout.counters import Counters
from tandem.engines.rollout.draws.stops import Decode
from tandem.errors import EngineError
from tandem.models.experts import EXPERTS
from tandem.models.linear import speed_up_linears
from tandem.models.loading import load_config
from tandem.models.routing import Mixtures
from tandem.models.weight_files import persistent_buffers
from tandem.protocol import Request

_SHOWN = 3  # names in a message


class OwnWeights:
    """The separate model of an engine, built from a model folder's config and filled from weight streams.

    The weights occupy no memory before the first stream, nor between `free` and the next stream.

    Args:
        model_path: The model folder. Only its config is read.
        device: The device of the weights.
        trust_remote_code: Whether to run the model class that the folder contains.
    """

    def __init__(
        self, model_path: str | Path, device: torch.device, *, trust_remote_code: bool = False
    ) -> None:
        self._path = model_path
        self._device = device
        self._trust = trust_remote_code
        self._module: nn.Module | None = None
        self._names: dict[str, list[str]] = {}  # first name → all names of a parameter (several if tied)
        self._held: dict[str, nn.Parameter] = {}  # parameters that have memory, or had memory before `free`
        self._constants: dict[str, Tensor] = {}  # persistent buffers

    def load(self, source: WeightStream) -> SharedModule:
        """Load all weights of a stream. Each weight keeps the dtype of its tensor in the stream.

        The weights that were loaded before are lost, even if the stream fails.

        Args:
            source: Each parameter and persistent buffer of the model once, by its Hugging Face name. A tied
                parameter has its first name.

        Returns:
            The model with the new weights.

        Raises:
            EngineError: A weight is missing, arrives twice, has another shape or does not belong to the
                model. Or the model has buffers that its config does not determine.
        """
        loaded: set[str] = set()
        for name, tensor in source.tensors:
            module = self._build(tensor.dtype)
            self._check(module, name, tensor, loaded)
            constant = self._constants.get(name)
            with torch.no_grad():
                (self._memory_of(module, name, tensor.dtype) if constant is None else constant).copy_(tensor)
            loaded.add(name)
        missing = [name for name in (*self._names, *self._constants) if name not in loaded]
        if missing or self._module is None:
            raise EngineError(
                "the weight stream ended too early",
                field=missing[0] if missing else None,
                got=f"{len(loaded)} weights",
                expected=f"{len(self._names) + len(self._constants) or 'some'} weights" + _some_of(missing),
                remedy="send all parameters and persistent buffers of the model",
            )
        return SharedModule(self._module, release=self.free)

    def free(self) -> None:
        """Free the memory of the weights. The module must not be used before the next `load`."""
        for parameter in self._held.values():
            parameter.untyped_storage().resize_(0)

    def _build(self, dtype: torch.dtype) -> nn.Module:
        """Return the model. Build it on the first call.

        The parameters of a new model have no memory yet. The buffers are computed from the config. Those
        that a stream brings are persistent.
        """
        if self._module is not None:
            return self._module
        config = load_config(self._path, trust_remote_code=self._trust)
        config._experts_implementation = EXPERTS
        with _Unallocated():
            make: Callable[..., nn.Module] = AutoModelForCausalLM.from_config
            # The buffers get the same precision as in a trainer, whose master weights are rarely below
            # float32.
            precision = torch.promote_types(dtype, torch.float32)
            module = make(config, dtype=precision, trust_remote_code=self._trust)
        self._names = _names(module)
        constants = persistent_buffers(module)
        for name, buffer in list(module.named_buffers()):
            if buffer.is_meta and name not in constants:
                raise EngineError(
                    "the model has a buffer that its config does not determine",
                    field=name,
                    got=f"{type(module).__name__} in {self._path}",
                    remedy="train with plain FSDP: then the rollout can share the trainer's module",
                )
            owner, _, leaf = name.rpartition(".")
            value = torch.empty_like(buffer, device="cpu") if buffer.is_meta else buffer
            module.get_submodule(owner)._buffers[leaf] = value.to(self._device)
        self._constants = persistent_buffers(module)
        speed_up_linears(module)
        module.mixtures = Mixtures(module)  # type: ignore[assignment]
        self._module = module.eval()
        return module

    def _check(self, module: nn.Module, name: str, tensor: Tensor, loaded: Iterable[str]) -> None:
        model = f"{type(module).__name__} in {self._path}"
        if name in loaded:
            raise EngineError("a weight arrived twice", field=name, expected="each weight once")
        if name not in self._names and name not in self._constants:
            first = next((first for first, names in self._names.items() if name in names), None)
            wrong, expected = "the model has no weight of this name", f"the parameters of {model}"
            if first is not None:
                wrong, expected = "a tied weight was sent under another name", f"only {first}"
            remedy = "send the parameters of this model, and each tied parameter once"
            raise EngineError(wrong, field=name, expected=expected, remedy=remedy)
        constant = self._constants.get(name)
        shape = (module.get_parameter(name) if constant is None else constant).shape
        if tensor.shape != shape:
            raise EngineError(
                "the shape of a weight is wrong",
                field=name,
                got=tuple(tensor.shape),
                expected=tuple(shape),
                remedy=f"send the parameters of {model}",
            )

    def _memory_of(self, module: nn.Module, name: str, dtype: torch.dtype) -> Tensor:
        """Return the memory of a weight. Allocate it if the weight has none."""
        held = self._held.get(name)
        if held is None or held.dtype != dtype:
            data = torch.empty(module.get_parameter(name).shape, dtype=dtype, device=self._device)
            held = self._held[name] = nn.Parameter(data, requires_grad=False)
            for each in self._names[name]:
                owner, _, leaf = each.rpartition(".")
                module.get_submodule(owner)._parameters[leaf] = held
        held.untyped_storage().resize_(held.numel() * held.element_size())
        return held


class ModuleEngine:
    """The base class of engines in this process that sample from a transformers module.

    Args:
        max_length: The maximum number of tokens of prompt and response together.
        own: The engine's own model, which weight streams fill. None means that the engine accepts no stream.
        decode: A function that decodes token ids to text, for stop strings.
        log: A function that receives a log line about every two seconds of work. None means no log.
    """

    def __init__(
        self,
        max_length: int,
        own: OwnWeights | None,
        decode: Decode | None,
        log: Callable[[str], None] | None,
    ) -> None:
        self.takes = kinds_taken(own)
        self._max_length = max_length
        self._own = own
        self._decode = decode
        self._counters = Counters(log)
        self._source: SharedModule | None = None
        self._version = 0

    def _check(self, requests: Sequence[Request], known: Collection[tuple[str, int]]) -> None:
        """Check that the requests can run (see `check_new` and `check_fits_model`)."""
        check_new(requests, known, self._max_length, self._decode is not None)
        if self._source is not None:
            check_fits_model(requests, self._source.module.config)

    def _take_source(self, source: WeightSource) -> SharedModule:
        """Accept new weights and return the module to sample from.

        This is the shared module, or the engine's own model with the weights of the stream. If the stream
        fails, the engine has no weights afterwards.

        Raises:
            EngineError: The engine accepts no stream, or `OwnWeights.load` failed.
        """
        own = self._own
        if isinstance(source, SharedModule):
            if own is not None:
                own.free()
            return source
        if own is None:
            raise EngineError(
                "this engine can only sample from the trainer's module",
                got=type(source).__name__,
                expected="a SharedModule",
                remedy="create the engine with a model folder, so that it has its own model",
            )
        self._source = None
        return own.load(source)

    def _drop_weights(self) -> None:
        self._source = None
        if self._own is not None:
            self._own.free()

    def wake(self, tags: Collection[SleepTag] = SLEEP_TAGS) -> None:
        """Do nothing. The cache is allocated at the first step that needs it, when its size is known."""

    def close(self) -> None:
        """Do nothing. The engine has no processes or connections to stop."""

    def stats(self) -> dict[str, float]:
        return self._counters.take()

    def progress(self) -> int:
        return self._counters.written


def kinds_taken(own: OwnWeights | None) -> frozenset[type[SharedModule] | type[WeightStream]]:
    """Return the types of weight source that an engine accepts."""
    return frozenset({SharedModule}) if own is None else frozenset({SharedModule, WeightStream})


class _Unallocated(TorchFunctionMode):
    """A context in which `torch.empty` allocates no memory.

    Parameters are created with `torch.empty`. Buffers are computed as usual.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, keyed by its first name."""
    first: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(first.setdefault(id(parameter), name), []).append(name)
    return names


def _some_of(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f", including {', '.join(names[:_SHOWN])}{more}" if names else ""

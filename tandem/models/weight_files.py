"""Reading of safetensors files piece by piece into a sharded module.

No rank ever holds more of the model than its own shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tandem.models.lora import is_adapter
from tandem.models.policy import PackedModel
from tandem.models.tensor_group import local, place
from tandem.texts import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class WeightFiles:
    """The safetensors files of a Hugging Face folder and the tensors in each.

    Args:
        files: the folder's safetensors files.

    Raises:
        OSError: If a file cannot be read.
        SafetensorError: If a file is not a valid safetensors file.
    """

    def __init__(self, files: list[Path]) -> None:
        self._file: dict[str, Path] = {}
        self._shape: dict[str, tuple[int, ...]] = {}
        for file in files:
            with _opened(file) as stored:
                for name in stored.keys():  # noqa: SIM118
                    piece = stored.get_slice(name)
                    if piece.get_dtype() in _FLOATS:
                        self._file[name] = file
                        self._shape[name] = tuple(piece.get_shape())

    @classmethod
    def find(cls, folder: str | Path) -> WeightFiles | None:
        """Find the files that transformers would read.

        Returns:
            The files; None if there are none or one cannot be read. transformers then gives a better error
            message.
        """
        path = Path(folder).expanduser()
        try:
            if (path / WEIGHTS).is_file():
                return cls([path / WEIGHTS])
            if (path / INDEX).is_file():
                places = parse_json((path / INDEX).read_bytes())["weight_map"].values()
                return cls([path / name for name in sorted(set(places))])
        except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError):
            return None
        return None

    def hold(self, module: PackedModel) -> bool:
        """Return whether the files hold each weight of the module under its name and in its shape.

        If not, transformers may still be able to convert the folder.
        """
        return self.fit(module.model, {name: value.shape for name, value in _stored(module).items()})

    def fit(self, model: nn.Module, needed: Mapping[str, Sequence[int]]) -> bool:
        """Return whether the files hold each weight of a transformers model.

        Args:
            model: the transformers model.
            needed: the shapes by name.
        """
        tied = getattr(model, "all_tied_weights_keys", {})
        twice = any(target in self._file and source in self._file for target, source in tied.items())
        return not twice and all(self._shape.get(name) == tuple(shape) for name, shape in needed.items())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors of the files, one after the other, in their stored type."""
        for name in names:
            with _opened(self._file[name]) as stored:
                yield name, stored.get_tensor(name)

    @torch.no_grad()
    def fill(self, module: PackedModel, device: torch.device) -> None:
        """Allocate the memory of a sharded module on the meta device and read each of its shards.

        Values are converted to the type of the shard. Parameters that no folder holds start at zero, except
        adapters.

        Args:
            module: a module that the files `hold`.
            device: the device for its parameters.
        """
        empty = partial(torch.empty_like, device=device)
        module._apply(lambda value: empty(value) if value.is_meta else value)  # type: ignore[no-untyped-call]
        stored = _stored(module)
        with ExitStack() as open_files:
            handles = {
                file: open_files.enter_context(_opened(file))
                for file in sorted({self._file[name] for name in stored})
            }
            for name, value in stored.items():
                shard = local(value)
                if shard.numel():
                    shard.copy_(_read(handles[self._file[name]], name, place(value)))
        for name, parameter in module.named_parameters():
            if name in module.starts_at_zero:
                local(parameter).zero_()


def _stored(module: PackedModel) -> dict[str, Tensor]:
    """Return the tensors of a module that a folder holds, by Hugging Face name.

    These are parameters, with tied ones once, and persistent buffers, but no adapters.
    """
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = {name: value for name, value in module.named_buffers() if name in persistent}
    named = {**dict(module.named_parameters()), **buffers}
    return {
        module.hf_name(n): value.detach()
        for n, value in named.items()
        if n not in module.starts_at_zero and not is_adapter(n)
    }


def _read(handle: Any, name: str, part: tuple[slice, ...]) -> Tensor:
    """Return a part of a stored tensor without reading the rest."""
    value: Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
    return value


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

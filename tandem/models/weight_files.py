"""The safetensors files of a Hugging Face folder, read piece by piece into a sharded module, so that no rank
ever holds more of the model than its own shards."""

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
    """The files of a folder and the tensors in each.

    Args:
        files: the folder's safetensors files.

    Raises:
        OSError, SafetensorError: a file that cannot be read.
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
        """The files that transformers would read; None where there are none, or one of them cannot be
        read, about which transformers has more to say."""
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
        """True where each weight that the module needs is there, under its name and in its shape. A folder
        of which that is not true may still be one that transformers can convert."""
        return self.fit(module.model, {name: value.shape for name, value in _stored(module).items()})

    def fit(self, model: nn.Module, needed: Mapping[str, Sequence[int]]) -> bool:
        """The same of a transformers model, of which shapes are needed by name."""
        tied = getattr(model, "all_tied_weights_keys", {})
        twice = any(target in self._file and source in self._file for target, source in tied.items())
        return not twice and all(self._shape.get(name) == tuple(shape) for name, shape in needed.items())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the files, one after the other, in the type they are stored in."""
        for name in names:
            with _opened(self._file[name]) as stored:
                yield name, stored.get_tensor(name)

    @torch.no_grad()
    def fill(self, module: PackedModel, device: torch.device) -> None:
        """Gives a sharded module on the meta device its memory, and each of its shards what the files hold
        there, in the shard's type. What no folder holds starts at zero, but for adapters.

        Args:
            module: one that the files `hold`.
            device: where its parameters go.
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
    """The tensors of a module that a folder holds, by Hugging Face name: parameters, tied ones once, and
    persistent buffers; no adapters."""
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = {name: value for name, value in module.named_buffers() if name in persistent}
    named = {**dict(module.named_parameters()), **buffers}
    return {
        module.hf_name(n): value.detach()
        for n, value in named.items()
        if n not in module.starts_at_zero and not is_adapter(n)
    }


def _read(handle: Any, name: str, part: tuple[slice, ...]) -> Tensor:
    """A part of a stored tensor; nothing else of it is read."""
    value: Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
    return value


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

"""Functions that read safetensors files into a sharded module, shard by shard.

A rank never has more of the model in memory than its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    """The safetensors files of a Hugging Face folder, and the names of the tensors in each file.

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
        """Find the files of a folder that transformers would read.

        Returns:
            The files; None if there are no files or a file cannot be read. Then use transformers, which
            raises a better error.
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

    def __contains__(self, name: str) -> bool:
        return name in self._file

    def file_of(self, name: str) -> Path:
        """Return the file with the tensor of this name."""
        return self._file[name]

    def hold(self, module: PackedModel) -> bool:
        """Return whether the files contain every weight of the module, with the same name and shape.

        If not, transformers may still be able to convert the folder.
        """
        return self.fit(module.model, {name: value.shape for name, value in _stored(module).items()})

    def fit(self, model: nn.Module, needed: Mapping[str, Sequence[int]]) -> bool:
        """Return whether the files contain every weight of a transformers model.

        Args:
            model: the transformers model.
            needed: a dict from weight name to shape.
        """
        tied = getattr(model, "all_tied_weights_keys", {})
        twice = any(target in self._file and source in self._file for target, source in tied.items())
        return not twice and all(self._shape.get(name) == tuple(shape) for name, shape in needed.items())

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole tensor of each given name, in the dtype of the file."""
        for name in names:
            with _opened(self._file[name]) as stored:
                yield name, stored.get_tensor(name)

    @torch.no_grad()
    def fill(self, module: PackedModel, device: torch.device) -> None:
        """Allocate memory for a sharded module that is on the meta device, and read this rank's shards.

        Values are converted to the dtype of the shard. Parameters that no folder contains (`starts_at_zero`)
        are set to zero. Adapters are not initialized.

        Args:
            module: a module for which `hold` returns true.
            device: the device for the module's parameters.
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


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to each buffer of a model that a model folder contains.

    Such a buffer has no gradient. Of such buffers, training only changes the biases of routers.
    """
    return {
        f"{path}.{name}" if path else name: value
        for path, part in model.named_modules()
        for name, value in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a dict from name to each parameter (tied parameters once) and each persistent buffer."""
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def read_weights(
    folder: str | Path, model: nn.Module, needed: Mapping[str, Tensor], load: Callable[[], nn.Module]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole tensor of some weights of a folder.

    Args:
        folder: the model's folder.
        model: the transformers model; its weights may be on the meta device.
        needed: parameters and buffers of the model, by name.
        load: a function that loads the whole model. It is called if the folder's files have other names.
    """
    files = WeightFiles.find(folder) if needed else None
    if files is not None and files.fit(model, {name: value.shape for name, value in needed.items()}):
        yield from files.read(needed)
    elif needed:
        whole = load().state_dict()
        yield from ((name, whole[name]) for name in needed)


def _stored(module: PackedModel) -> dict[str, Tensor]:
    """Return a dict from Hugging Face name to each tensor of a module that a model folder contains.

    These are parameters (tied parameters once) and persistent buffers, but not adapters.
    """
    return {
        module.hf_name(n): value.detach()
        for n, value in stored_tensors(module).items()
        if n not in module.starts_at_zero and not is_adapter(n)
    }


def _read(handle: Any, name: str, part: tuple[slice, ...]) -> Tensor:
    """Return a slice of a stored tensor without reading the remaining tensor."""
    value: Tensor = handle.get_slice(name)[part] if part else handle.get_tensor(name)
    return value


def _opened(file: Path) -> Any:
    return safe_open(file, framework="pt")

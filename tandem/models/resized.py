"""Functions that make the weights of a model folder complete.

Weights on the hub are downloaded. If a run changes the number of rows of the embedding, the files with the
embedding and the output head are written again, into the folder of the changed model.
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tandem.config.changed_models import Origin, changing_key, link_files, origin_of
from tandem.errors import ModelError
from tandem.hub import fetch_weights
from tandem.models.loading import lacks_score_head, load_config, load_policy, load_scorer
from tandem.models.weight_files import WeightFiles

_AT_A_TIME = 8192  # rows that are converted to float64 at a time


def complete_weights(folder: str, *, trust_remote_code: bool = False) -> None:
    """Make sure that a model folder contains its weights.

    Args:
        folder: the folder of a model, perhaps of a changed model.
        trust_remote_code: whether to run the model class in the folder.

    Raises:
        TandemError: If the download failed.
        ModelError: If the embedding cannot be resized.
    """
    origin = origin_of(folder)
    if origin is None:
        fetch_weights(folder)
        return
    complete_weights(origin.source, trust_remote_code=trust_remote_code)
    link_files(Path(folder))
    if origin.rows is not None:
        _resize(Path(folder), origin, origin.rows, trust_remote_code=trust_remote_code)


def resized(table_VD: Tensor, rows: int) -> Tensor:
    """Return a (rows, D) table with the first rows of a (V, D) table. New rows are the mean of the old rows.

    A bias (V) is resized in the same way.

    The mean is computed in float64.
    """
    if rows <= len(table_VD):
        return table_VD[:rows].clone()
    parts = [part.double().sum(0) for part in torch.split(table_VD, _AT_A_TIME)]
    mean_D = torch.stack(parts).sum(0) / len(table_VD)
    added = mean_D.to(table_VD.dtype).expand(rows - len(table_VD), *mean_D.shape)
    return torch.cat([table_VD, added])


def _resize(folder: Path, origin: Origin, rows: int, *, trust_remote_code: bool) -> None:
    """Write the files with the resized tables, unless the folder has them already."""
    stored = WeightFiles.find(origin.source)
    names = _tables(origin.source, trust_remote_code=trust_remote_code)
    there = {} if stored is None else {name: stored.file_of(name) for name in names if name in stored}
    if names[0] not in there:
        raise ModelError(
            "the embedding cannot be resized, because the folder does not have it under its usual name",
            field=changing_key(folder, "resize_embeddings"),
            got=origin.source,
            expected=f"safetensors files with {names[0]}",
            remedy="load the model with transformers, call resize_token_embeddings, and save it",
        )
    for file in set(there.values()):
        made, time = folder / file.name, file.stat().st_mtime_ns
        if not made.is_symlink() and made.stat().st_mtime_ns == time:
            continue
        with NamedTemporaryFile(dir=folder, prefix=".", delete=False) as beside:
            pass
        with safe_open(file, framework="pt") as held:
            tensors = {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
        for name in tensors.keys() & there.keys():
            tensors[name] = resized(tensors[name], rows)
        save_file(tensors, beside.name, metadata={"format": "pt"})
        os.utime(beside.name, ns=(time, time))
        os.replace(beside.name, made)


def _tables(source: str, *, trust_remote_code: bool) -> list[str]:
    """Return the names of the embedding and the output head. A tied head has names of its own.

    The bias of a head is one of the names.
    """
    scorer = not lacks_score_head(load_config(source, trust_remote_code=trust_remote_code))
    load = load_scorer if scorer else load_policy
    model = load(source, weights=False, trust_remote_code=trust_remote_code)
    ends: list[Any] = [model.get_input_embeddings()]
    ends += [] if scorer else [model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    named = list(model.named_parameters(remove_duplicate=False))
    sized = [parameter for table in ends for parameter in (table.weight, getattr(table, "bias", None))]
    return [name for part in sized for name, parameter in named if parameter is part]

"""Export a model as a Hugging Face folder: config, safetensors shards and additional files."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from tandem.checkpoint.shards import ShardWriter
from tandem.checkpoint.staging import staged
from tandem.errors import CheckpointError
from tandem.models.stored_layout import StoredLayout


def export(
    weights: Iterable[tuple[str, Tensor]],
    config: PretrainedConfig,
    beside: Callable[[Path], object],
    out: Path,
    dtype: torch.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
    trust_remote_code: bool = False,
    auto_class: Any = AutoModelForCausalLM,
) -> Path:
    """Write a folder that `from_pretrained` can load.

    The folder is written atomically. At any time, only the weights of one file and one further weight are in
    memory. The files have the names and shapes of `StoredLayout`.

    Args:
        weights: full tensors under the names of the transformers model, in any order, on any device. A tied
            weight may occur once, or under both of its names.
        config: config of the model; it is not changed.
        beside: a function that writes additional files. Its argument is the folder, which contains only
            config.json at this point.
        out: the folder to write; it must not exist, or must be empty.
        dtype: dtype of floating-point weights in the files; the config names it.
        max_shard_bytes: maximum size of one weights file; several files get an index.
        trust_remote_code: allow architectures whose code is not part of transformers.
        auto_class: the class that loads the folder, such as `AutoModelForCausalLM` or
            `AutoModelForSequenceClassification`.

    Raises:
        CheckpointError: `out` is not empty; weights are missing, unknown, of the wrong shape, or tied but
            different; the disk is full.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(
            "the folder for the export is not empty", field=str(out), expected="a new or empty folder"
        )
    with torch.device("meta"):
        skeleton: PreTrainedModel = auto_class.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            attn_implementation="eager",
        )
    with staged(out) as folder:
        skeleton.config.architectures = [type(skeleton).__name__]
        skeleton.config.dtype = dtype
        skeleton.config.to_json_file(folder / "config.json")
        beside(folder)
        writer = ShardWriter(folder, max_shard_bytes)
        for name, tensor in StoredLayout(skeleton).converted(_checked(skeleton, weights, dtype)):
            writer.add(name, tensor)
        writer.close()
    return out


def _checked(
    skeleton: PreTrainedModel, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield a CPU copy of each weight, after checking it against the architecture.

    The copy is needed because the memory of an input tensor may be reused for the next tensor. A tied pair is
    yielded once, under the name of the weight that the other weight is tied to.

    Raises:
        CheckpointError: a weight does not fit the architecture, or weights are missing.
    """
    tied = skeleton.get_expanded_tied_weights_keys(all_submodels=True)
    left = {name: value.shape for name, value in skeleton.state_dict().items() if name not in tied}
    shared: dict[str, bytes] = dict.fromkeys(tied.values(), b"")
    for given, tensor in weights:
        name = tied.get(given, given)
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        host = torch.empty(tensor.shape, dtype=wanted).copy_(tensor.detach())
        if name in shared:
            digest = hashlib.sha256(host.view(-1).view(torch.uint8).numpy().data).digest()
            known = shared[name]
            if known not in (b"", digest):
                raise CheckpointError(
                    "two weights have different values, but the config ties them",
                    field=given,
                    expected=f"the values of {name}",
                    remedy="set tie_word_embeddings=false in the model's config",
                )
            if known:
                continue
            shared[name] = digest
        expected = left.pop(name, None)
        if expected != host.shape:
            raise CheckpointError(
                "a weight does not fit the architecture",
                field=given,
                got=host.shape,
                expected=expected or "only weights of the architecture, each once",
            )
        yield name, host
    if left:
        missing = min(left)
        raise CheckpointError(
            f"{len(left)} weights of the architecture are missing",
            field=missing,
            got="missing",
            expected=left[missing],
        )
